"""The report of a worker's state at one moment: plain values, sent as JSON and read without torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TypedDict, TypeVar

JOINING, MEMBER, LEAVING = "joining", "member", "leaving"  # phases of a worker's life in its group
# States of an incoming call; UNFINISHED: the function has returned a future or a coroutine that is not done yet.
RUNNING, QUEUED, UNFINISHED = "running", "queued", "going on"
MOST_ALIKE = 256  # maximum number of similar calls in a list


class SourceLine(TypedDict):
    """The line of a program that a thread executes."""

    file: str
    line: int
    function: str
    text: str  # the source line, if it can be read


class _Alike(TypedDict, total=False):
    more: int  # number of younger calls like this one that are not listed


class CallOut(_Alike):
    """An outgoing call of this worker without a response."""

    to: str
    number: int  # identifies the call at the callee, together with the caller's name
    function: str
    age: float  # seconds
    timeout: float  # 0: none
    thread: int | None  # the thread that waits for it; None if no thread waits


class CallIn(_Alike):
    """An incoming call that was not answered yet."""

    caller: str
    number: int
    function: str  # may be empty if the call was not decoded yet
    age: float  # seconds since it began to run; 0 while it waits
    state: str
    thread: int | None  # the thread that runs it


# Functions that all workers of a group call, and that wait for each other.
MEETINGS = ("barrier", "all_reduce", "process_group")


class _Dated(TypedDict, total=False):
    age: float  # seconds, if known


class WaitState(_Dated):
    """A wait of this package that a thread is in, except waits for calls, which `CallOut` lists."""

    what: str  # "shutdown", "serve", "backward", "future", "value", "init_rpc", "room", or the called function
    on: list[str]  # workers, by name; or "rank 2"
    about: str  # further text for the user


class ThreadState(TypedDict):
    """A thread, except this package's idle threads."""

    number: int
    name: str
    at: SourceLine | None  # the innermost line of the user's program; None if there is none
    stack: list[str]  # all frames as "file:line function", innermost last
    wait: WaitState | None
    asleep: bool | None  # True if the kernel has it asleep; None if unknown


class PassOut(TypedDict):
    """A backward pass that this worker drives."""

    context: int
    number: int
    age: float
    owing: list[str]  # workers that have not finished their part


class WorkerState(TypedDict):
    """The state of a worker."""

    worker: str
    rank: int
    group: str  # the same for all members of the group, and for no other group
    pid: int
    host: str
    program: str  # the program that runs, for users
    clock: float  # `perf_counter` at that moment
    time: float  # wall-clock time in seconds
    phase: str
    phase_age: float
    idle: float  # seconds since this worker's last own call, backward pass or step ended, as far as recorded
    missing: list[str]  # workers it waits for while joining or leaving, by name, or "rank 2" if the name is unknown
    place: str  # address of the store
    size: int | None  # of the group; None: membership is dynamic
    generation: int
    members: dict[str, str]  # hosts of the known members, by name
    gone: dict[str, str]  # members that died or left early, and why
    threads: list[ThreadState]
    calls_out: list[CallOut]
    calls_in: list[CallIn]
    slots: int  # calls that may run at once
    busy: int
    passes: list[PassOut]
    contexts: int
    references: dict[str, int]  # the counts of debug_info()
    bytes_out: dict[str, int]  # of messages and tensors, by worker, since the start
    bytes_in: dict[str, int]
    calls_done: int  # calls served for other workers since the start
    memory: int  # resident bytes of the process
    shared: int  # bytes of shared memory that it has lent


C = TypeVar("C", CallOut, CallIn)


def listed(calls: Iterable[C], kin: Callable[[C], object]) -> list[C]:
    """Return the calls that a thread waits for or runs, and up to MOST_ALIKE of each other kind; the last has the
    number of the rest."""
    found: list[C] = []
    alike: dict[object, list[C]] = defaultdict(list)
    for call in calls:
        lot = alike[kin(call)]
        if call["thread"] is not None:
            found.append(call)
        elif len(lot) < MOST_ALIKE:
            found.append(call)
            lot.append(call)
        else:
            lot[-1]["more"] = lot[-1].get("more", 0) + 1
    return found


def counts(calls: Iterable[C], by: Callable[[C], str]) -> Counter[str]:
    """Return the number of calls per key, including those that are not listed."""
    found: Counter[str] = Counter()
    for call in calls:
        found[by(call)] += 1 + call.get("more", 0)
    return found
