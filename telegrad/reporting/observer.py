"""Collect the state of one worker from its parts."""

import asyncio
import inspect
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures import wait as wait_for_futures
from concurrent.futures.thread import _WorkItem
from itertools import takewhile
from time import monotonic, perf_counter
from types import CodeType, FrameType
from typing import Any

import torch

from telegrad import reporting as states
from telegrad.ext.calls import Incoming, PendingCall, futures, inspection, user_name
from telegrad.ext.events import MADE
from telegrad.ext.feedback import Wait, plural, under_way
from telegrad.ext.graphs import Conductor
from telegrad.ext.values import ValueSlot
from telegrad.ext.workers import Leaving, Member, Membership, Worker, stores
from telegrad.reporting import CallIn, CallOut, PassOut, ReferenceKind, ThreadState, WaitState, WorkerState
from telegrad.reporting.process_state import (
    all_stacks,
    held,
    is_asleep,
    is_users,
    lockable,
    log_lines,
    recorder,
    stack_lines,
    user_line,
)

MOST_COROUTINES = 64  # the oldest calls whose coroutines are described
MOST_REFERENCES = 10_000  # the oldest references that are grouped by type
MOST_KINDS = 20

Threads = dict[int, int]  # by the id of an object


class Observer:
    """Observes one worker. All methods may be called from any thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._worker: Worker | None = None  # once it was created
        self._rank = -1
        self._size: int | None = None  # of the group that it joins
        self._place = ""  # address of that group's store
        self._begun = self._since = perf_counter()
        self.phase = states.JOINING
        # Returns the workers it waits for while joining or leaving.
        # Those of a spare are members of the running generation, and not missing.
        self.missing: Callable[[], list[str]] = lambda: [
            who for wait in self._joining() if wait.what != states.NEXT for who in wait.missing()
        ]
        self.members: Callable[[], list[Member]] = list  # of the group, after joining
        self.gone: dict[str, str] = {}  # the latest reason, by name
        self._processes: dict[str, int] = {}  # of members on this host that are present or gone, by name

    def _joining(self) -> list[Wait]:
        """Return the waits of this process that may be those of this worker, which is joining."""
        return [wait for wait in under_way() if wait.what in states.JOINS and wait.worker in ("", self.name)]

    def watch(self, worker: Worker, rank: int, size: int | None, place: str) -> None:
        """Begin to observe a worker that was created and is about to join."""
        self._rank, self._size, self._place = rank, size, place
        worker.agent.lost.append(lambda who, reason: self.gone.update({who.name: str(reason)}))
        worker.at_gone.append(self._note_process)
        self._worker = worker

    def _note_process(self, member: Member) -> None:
        _, _, process = member.unix.rpartition("-")[0].partition("-")  # its Unix socket is "telegrad-PID-..."
        if process.isdecimal() and self._worker is not None and member.host == self._worker.me.host:
            self._processes[member.name] = int(process)

    def joined(self, name: str, rank: int, members: Callable[[], list[Member]]) -> None:
        """Enter the phase MEMBER, with the worker's name and rank in its group."""
        self.name, self._rank, self.members = name, rank, members
        self.phase, self._since, self.missing = states.MEMBER, perf_counter(), list

    def leaving(self, missing: Callable[[], list[str]]) -> None:
        """Enter the phase LEAVING."""
        self.phase, self._since, self.missing = states.LEAVING, perf_counter(), missing

    def account(self) -> WorkerState:
        now, members = perf_counter(), self.members()
        joining = self._joining() if self.phase == states.JOINING else []
        threads, calls_in, waiting, runs = self._threads(now)
        for member in members:
            self._note_process(member)
        told = WorkerState(
            worker=self.name,
            rank=self._rank,
            group=next((wait.group for wait in joining), "")[:12],
            pid=os.getpid(),
            host=socket.gethostname(),
            program=_program(),
            clock=now,
            time=time.time(),
            phase=states.SPARE if any(wait.what == states.NEXT for wait in joining) else self.phase,
            phase_age=now - self._since,
            idle=now - max(recorder.last_own(), self._begun),
            missing=self.missing(),
            place=self._place or next((wait.place for wait in joining), ""),
            size=self._size,
            generation=0,
            members={member.name: member.host for member in members},
            processes=self._processes.copy(),
            gone=dict(self.gone),
            threads=threads,
            calls_out=[],
            calls_in=calls_in,
            slots=0,
            busy=0,
            passes=[],
            contexts=0,
            references={},
            bytes_out={},
            bytes_in={},
            calls_done=0,
            memory=_resident(),
            shared=0,
            processor=time.process_time(),
            devices=_allocated(),
            kinds=[],
            log=log_lines.lines(time.time()),
        )
        if self._worker is not None:
            self._tell_of(self._worker, told, now, waiting, runs)
        return told

    def _tell_of(self, worker: Worker, told: WorkerState, now: float, waiting: Threads, runs: Threads) -> None:
        """Add the state of the worker's parts. `waiting` maps ids of calls to the threads that wait for them."""
        agent, calls_in = worker.agent, told["calls_in"]
        going_on = sorted(inspection.calls_going_on(agent), key=lambda each: each[0].begun)
        others = [_call_in(call, states.UNFINISHED, now, None) for call, _ in going_on]
        for (_, coroutine), told_call in zip(going_on[:MOST_COROUTINES], others, strict=False):
            if frames := inspection.frames_of(coroutine):
                wait = WaitState(what=states.BEGIN, on=[], about="", age=told_call["age"])
                created = coroutine is not None and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
                told_call["thread"] = id(frames[0])
                state = _state(id(frames[0]), states.COROUTINE, frames, wait if created else None, True)
                told["threads"].append({**state, "awaits": _awaited(frames, runs)})
        others += [_call_in(call, states.QUEUED, now, None) for call in inspection.calls_queued(agent)]
        # The stacks were read first, then the calls in progress, then the queues. A call may have moved on meanwhile
        # and be in two of the lists. The state that was seen first is kept, so each call is listed once.
        first = {(call["caller"], call["number"]): call for call in reversed([*calls_in, *others])}
        unlisted = [call for call in others if call is first[call["caller"], call["number"]]]
        calls_in += states.listed(unlisted, lambda call: (call["caller"], call["function"], call["state"]))
        told["slots"], told["busy"] = inspection.slots(agent)
        told["bytes_out"], told["bytes_in"] = inspection.traffic(agent)
        told["calls_done"], told["shared"] = agent.served, inspection.shared(agent)
        told["contexts"] = len(worker.conductor.contexts)
        told["passes"] = [
            PassOut(context=context, number=number, age=now - begun, owing=owing)
            for context, number, begun, owing in worker.conductor.under_way()
        ]
        calls_out = (
            CallOut(
                to=pending.peer.name,
                number=pending.id,
                function=user_name(pending.label),
                age=max(0.0, now - pending.begun),
                timeout=pending.timeout,
                thread=waiting.get(id(pending)),
            )
            for pending in inspection.calls_out(agent)
        )
        told["calls_out"] = states.listed(calls_out, lambda call: (call["to"], call["function"]))
        if self.phase != states.JOINING:  # it has the group's key
            told["group"] = agent.keys.group[:12]
            told["generation"] = 0 if worker.turning is None else worker.turning.generation.number
            told["references"] = worker.references.counts()
            told["kinds"] = _kinds(worker, now)

    def word_on(self, caller: str, number: int) -> str:
        """Return the state of an incoming call, to append to a message; empty if the call is unknown."""
        told = self.account()
        call = next((each for each in told["calls_in"] if (each["caller"], each["number"]) == (caller, number)), None)
        if call is None:
            return ""
        if call["state"] == states.QUEUED:
            return f": it waits for its turn, {told['busy']} of {told['slots']} slots are taken"
        if call["state"] == states.RUNNING:
            threads = [each for each in told["threads"] if each["number"] == call["thread"]]
        else:  # such as those of a pipeline's batch, whose user code runs on a thread that serves no call
            serving = {each["thread"] for each in told["calls_in"]}
            own = (each for each in told["threads"] if each["name"].startswith("telegrad-") and each["wait"] is None)
            threads = [each for each in own if each["number"] not in serving]
        where = [
            f", at {at['file']}:{at['line']} in {at['function']}" + (f": `{at['text']}`" if at["text"] else "")
            for each in threads
            if (at := each["at"]) is not None
        ]
        return f": for {call['age']:.1f} s so far{where[0] if len(where) == 1 else ''}"

    def _threads(self, now: float) -> tuple[list[ThreadState], list[CallIn], Threads, Threads]:
        """Return the threads, the calls that they run, the waiting threads by id of the call, and `_runs_of_pools`."""
        found = all_stacks()
        # This frame and those below it are taken out of the stack of this thread. Otherwise `found`, a variable of this
        # frame, would contain the frame itself. This cycle would keep the frames of all threads, with the variables of
        # the user's functions, until the garbage collector runs.
        mine = found[threading.get_ident()]
        del mine[mine.index(sys._getframe()) :]
        threads: list[ThreadState] = []
        calls_in: list[CallIn] = []
        waiting: Threads = {}
        worker, runs = self._worker, _runs_of_pools(found)
        for thread in threading.enumerate():
            # The thread started after the stacks were read.
            stack = found.get(thread.ident or 0)
            if stack is None:
                continue
            stood = inspection.stands(stack, worker.agent) if worker is not None else inspection.NOWHERE
            if stood.waits is not None:
                waiting.setdefault(id(stood.waits), thread.ident or 0)
            calls_in += [_call_in(call, states.RUNNING, now, thread.ident) for call in stood.serves]
            described = self._thread(thread, stack, stood)
            if described is not None:
                threads.append({**described, "awaits": _awaited(stack, runs)})
        return threads, calls_in, waiting, runs

    def _thread(
        self, thread: threading.Thread, frames: list[FrameType], stood: inspection.Stands
    ) -> ThreadState | None:
        # A wait is known from two sources. `under_way` has the announced ones (`told`), whatever function the thread is
        # in. The stack shows the others. For MEETINGS the announced one is better: it names the missing workers, while
        # the stack shows a plain call or future.
        told = wait_of(thread.ident)
        wait = told if told is not None and told["what"] in states.MEETINGS else wait_on(frames, self.missing)
        if stood.room is not None:
            wait = WaitState(what="room", on=[stood.room.name], about="the limit of calls in flight to it is reached")
        elif wait is None and stood.waits is None and told is not None:
            # A thread may serve a call while it is in a wait that began earlier, further out on its stack. Such a wait
            # is not the reason why the call does not end.
            begun = stood.serves[-1].begun if stood.serves else 0.0
            wait = told if told["age"] <= perf_counter() - begun else None
        elif wait is None and stood.waits is None and thread is threading.current_thread():
            wait = WaitState(what=states.ASKS, on=[], about="", age=0.0) if any(map(is_users, frames)) else None
        serves = stood.serves or stood.waits or wait or any(map(is_users, frames))
        if thread.name.startswith("telegrad-") and not serves:
            return None
        state = _state(thread.ident or 0, thread.name, frames, wait, is_asleep(thread))
        return state if serves or not thread.daemon else {**state, "foreign": True}


def _call_in(call: Incoming, state: str, now: float, thread: int | None) -> CallIn:
    name = call.name or bytes(call.message.head).decode(errors="replace").replace(":", ".")
    age = max(0.0, now - call.begun) if call.begun else 0.0
    told = CallIn(caller=call.caller.name, number=call.message.id, function=name, age=age, state=state, thread=thread)
    return {**told, "cancelled": True} if call.cancelled else told


def _state(number: int, name: str, frames: list[FrameType], wait: WaitState | None, asleep: bool | None) -> ThreadState:
    return ThreadState(
        number=number,
        name=name,
        at=user_line(frames),
        stack=stack_lines(frames),
        wait=wait,
        asleep=asleep,
        holds=held(frames),
        objects=lockable(frames),
    )


def _program() -> str:
    """Return the name of the program, for users."""
    path = sys.argv[0] if sys.argv else ""
    return os.path.basename(path.removesuffix(f"{os.sep}__main__.py")) or "python"


def _resident() -> int:
    """Return the resident bytes of the process; 0 if unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _allocated() -> dict[str, int]:
    """Return the bytes that torch has allocated on each GPU, if it uses them."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    sizes = {f"cuda:{each}": torch.cuda.memory_allocated(each) for each in range(torch.cuda.device_count())}
    return {name: size for name, size in sizes.items() if size}


def _kinds(worker: Worker, now: float) -> list[ReferenceKind]:
    """Return the worker's references by type and line, the most numerous first."""
    recorded = recorder.events()
    # A reference whose event is not in the ring any more is older than the oldest event there: its age is at least
    # that.
    first = recorded[0][2] if recorded else now
    made: dict[str, float] = {event[4]: event[1] for event in recorded if event[0] == MADE}
    begun: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in worker.references.listed(MOST_REFERENCES):
        begun[each.kind, each.line].append(made.get(each.number, first) if each.begun is None else each.begun)
    most = sorted(begun.items(), key=lambda item: -len(item[1]))[:MOST_KINDS]
    return [
        ReferenceKind(kind=kind, number=len(times), age=max(0.0, now - min(times)), line=line)
        for (kind, line), times in most
    ]


# The waits of this package, except waits for calls, as found on the stack of a thread
#
# A waiting function keeps no record for this. It is recognized by its code object, since a frame has no reference to
# its function, and described from its local variables, which are read while it waits. So the functions of `_WAITS` must
# keep the names of the variables that are read below: `serving`, `wanted`, `wait`, `self`, `future`, `begun`, `host`,
# `port` and `driven`. A variable that the function may not have assigned yet is tested for by `in`.

Missing = Callable[[], list[str]]
Names = dict[str, Any]


def wait_on(frames: Sequence[FrameType], missing: Missing) -> WaitState | None:
    """Return the wait below the innermost user code. `missing` is `Observer.missing`."""
    # If several waits are found, the outermost is returned, because it is the most specific.
    last = None
    for frame in reversed(frames):
        if is_users(frame):
            break
        describe = _WAITS.get(frame.f_code)
        found = describe(frame.f_locals, missing) if describe is not None else None
        last = found or last
    return last


def wait_of(thread: int | None) -> WaitState | None:
    """Return the wait of that thread that is announced to users, whatever function it is in."""
    told = next((each for each in reversed(under_way()) if each.thread == thread), None)
    if told is None:
        return None
    text = told.text()
    about = text.partition(":")[0] if told.what in states.MEETINGS else text  # the rest names the missing workers
    return WaitState(what=told.what, on=list(told.missing()), about=about, age=monotonic() - told.begun)


def _leaving(names: Names, missing: Missing) -> WaitState | None:
    if names["serving"]:
        return _serving(names, missing)
    return WaitState(what="shutdown", on=missing(), about="all to call shutdown, and their calls to end")


def _serving(*_: object) -> WaitState:
    return WaitState(what="serve", on=[], about="calls of others")  # blocks for as long as other workers need this one


def _gathering(names: Names, _: Missing) -> WaitState:
    wanted, there = names["wanted"], {each.name for each in names["self"].workers()}
    on = [] if isinstance(wanted, int) else [name for name in wanted if name not in there]
    about = plural(wanted, "worker") if isinstance(wanted, int) else ""
    age = monotonic() - names["wait"].begun if "wait" in names else 0.0
    return WaitState(what="workers", on=on, about=about, age=age)


def _future(names: Names, _: Missing) -> WaitState | None:
    future = names["future"]
    age = perf_counter() - names["begun"] if "begun" in names else 0.0
    if isinstance(future, ValueSlot):
        about = "the value of a reference of this worker, which has not been created yet"
        return WaitState(what="value", on=[], about=about, age=age)
    if isinstance(getattr(future, "call", None), PendingCall):
        return None  # the list of calls has this one
    on, about = getattr(future, "awaited", []), getattr(future, "about", "") or "a future that is not done"
    return WaitState(what="future", on=on, about=about, age=age)


_WAITS: dict[CodeType, Callable[[Names, Missing], WaitState | None]] = {
    stores.join_store.__code__: lambda names, _: WaitState(
        what="store", on=[], about=f"the store at {names['host']}:{names['port']}, which does not answer yet"
    ),
    Membership.wait_for.__code__: _gathering,
    Leaving.wait.__code__: _leaving,
    Membership.wait_for_end.__code__: _serving,
    Conductor.wait.__code__: lambda names, _: WaitState(
        what="backward", on=names["driven"].owing, about=f"the end of {names['driven'].spec}"
    ),
    futures.wait_for.__code__: _future,
}


# Waits of the program for its own threads

# The functions of Python that wait for threads, each with its variable that has a thread, a set of
# futures, or a future or a function that a thread of a pool runs.
_AWAITED = {
    threading.Thread.join.__code__: "self",
    Future.result.__code__: "self",
    Future.exception.__code__: "self",
    wait_for_futures.__code__: "fs",
    as_completed.__code__: "pending",
    asyncio.to_thread.__code__: "func_call",
}


def _runs_of_pools(stacks_by_thread: Mapping[int, Sequence[FrameType]]) -> Threads:
    """Return the threads of pools, by the ids of the future and of the function that each of them runs."""
    runs: Threads = {}
    for thread, frames in stacks_by_thread.items():
        works = (frame.f_locals.get("self") for frame in frames if frame.f_code is _WorkItem.run.__code__)
        for work in (each for each in works if each is not None):  # it is None at the end of `run`
            function = work.fn if hasattr(work, "fn") else work.task[0]  # `task` since Python 3.14
            runs |= {id(work.future): thread, id(function): thread}
    return runs


def _awaited(frames: Sequence[FrameType], runs: Threads) -> list[int]:
    """Return the threads for which a thread or a coroutine waits below its innermost line of the program."""
    found = set()
    for frame in takewhile(lambda frame: not is_users(frame), reversed(frames)):
        thing = frame.f_locals.get(_AWAITED[frame.f_code]) if frame.f_code in _AWAITED else None
        for each in thing.copy() if isinstance(thing, set) else (thing,):
            if thread := each.ident if isinstance(each, threading.Thread) else runs.get(id(each)):
                found.add(thread)
    return sorted(found)
