"""The introspection of one worker: record events, answer queries, and write dumps.

A dump is a file with the latest events and the worker's state. It is written when one of its calls times out, when it
loses a peer, and on SIGUSR2. `TELEGRAD_DUMPS` names the folder, or is `off`; the default is a private folder of this
user. Old files are removed. On SIGUSR2, unless the program uses that signal, the stacks of all threads are written as
well. That works even while a thread holds the interpreter.
"""

import contextlib
import faulthandler
import itertools
import json
import logging
import os
import pathlib
import re
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Any, NamedTuple

from telegrad.errors import TelegradError, UnknownWorker
from telegrad.ext.calls import Agent, inspection
from telegrad.ext.events import Event
from telegrad.ext.events import events as instruments
from telegrad.ext.feedback import safe
from telegrad.ext.host import Folder, Thread, error_text, forks, interrupts, open_folder, private_folder, renewed
from telegrad.ext.workers import Identity, Worker, WorkerExtension, register
from telegrad.reporting import (
    ACCOUNT,
    CALL,
    DUMP,
    EVENTS,
    GROUP,
    GROUP_EVENTS,
    LARGEST_FILE,
    Malformed,
    WorkerState,
    checked,
    decode,
)
from telegrad.reporting.debug_server import DebugServer
from telegrad.reporting.observer import Observer
from telegrad.reporting.process_state import recorder

PATIENCE = 1.5  # seconds
AT_ONCE = 0.1  # seconds, for the question about a call that timed out
BETWEEN = 0.1  # minimum seconds between two such questions to one callee
VARIABLE = "TELEGRAD_DUMPS"
PAUSE = 60.0  # minimum seconds between two automatic dumps of one worker
KEPT = 32  # maximum number of files of this user in the folder
ALL = 64 << 20  # bytes of this user's files in the folder; the newest is always kept
OURS = re.compile(r"[0-9]{8}-[0-9]{6}-[\w-]+\.json")  # the names of these files

log = logging.getLogger("telegrad")


class Inspect(NamedTuple):
    """A query of a worker's state; `topic` says which part."""

    number: int
    topic: str
    after: float  # for EVENTS a time on the clock of the callee; for CALL the number of the call that is asked about


class Inspected(NamedTuple):
    """The answer to an Inspect, as JSON."""

    number: int
    text: bytes


class StateQueries:
    """Queries between workers about their state. They wait neither for a slot nor for a user function to end."""

    # They are control messages and no calls: a call would wait for a slot at a worker whose slots are all taken, just
    # when the query is needed most, and the shutdown barrier would count it.

    def __init__(self, agent: Agent, answer: Callable[[str, Any], Any]) -> None:
        """`answer(topic, after)` returns a value that JSON can encode; it is called on its own thread."""
        self._agent = agent
        self._answer = answer
        # When a callee may be asked again; unlocked, since an extra question is harmless.
        self._next_word: dict[str, float] = {}
        self._numbers = itertools.count(1)  # `next` is atomic
        # The answers to each query, by worker, and an event that is set at each; no lock: each use is one operation of
        # a dict.
        self._rounds: dict[int, tuple[dict[str, bytes], threading.Event]] = {}
        self._lock = renewed(threading.Lock())  # guards _own
        self._own: tuple[Counter[str], Counter[str]] = Counter(), Counter()  # bytes sent and received here, by worker
        agent.on(Inspect, self._on_ask)
        agent.on(Inspected, self._on_told)
        agent.layers.last_word = self.last_word

    def ask(
        self,
        names: Iterable[str],
        topic: str,
        after: Callable[[str], float] = lambda _: 0.0,
        patience: float = PATIENCE,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the answers, and why other workers gave none. Block until all answered, `patience` seconds at most."""
        until = monotonic() + patience
        number = next(self._numbers)
        answers: dict[str, bytes] = {}
        silent: dict[str, str] = {}
        came = threading.Event()
        self._rounds[number] = answers, came
        waited = set()
        try:
            for name in names:
                try:
                    query = Inspect(number, topic, after(name))
                    self._agent.notify(name, query)
                    self._count(False, name, query)
                    silent[name] = f"it did not answer within {patience:g} s, although its connection is open"
                    waited.add(name)
                except UnknownWorker:
                    silent[name] = "it left the group, or was lost"
                except TelegradError as error:
                    silent[name] = str(error)
            # The thread that receives an answer stores it before it sets the event. This thread clears the event before
            # it looks at the answers again. So an answer that comes in between is not missed.
            while not waited <= answers.keys() and came.wait(max(0.0, until - monotonic())):
                came.clear()
        finally:
            # An answer that comes later finds no entry, and is dropped.
            del self._rounds[number]
        told: dict[str, Any] = {}
        # A copy: a thread that has found the entry before it was removed may still add an answer.
        for name, text in answers.copy().items():
            try:
                told[name] = decode(topic, text)
            except Malformed as error:
                silent[name] = f"its answer is invalid: {error}"
        return told, {name: safe(why) for name, why in silent.items() if name not in told}

    def leave_out(self, account: WorkerState) -> WorkerState:
        """Subtract the bytes of queries and their answers from the traffic of this worker's state."""
        with self._lock:
            for own, told in zip(self._own, (account["bytes_out"], account["bytes_in"]), strict=True):
                # The agent's counts are those of the open connections, and a new connection counts from 0. So the bytes
                # of queries over earlier connections are forgotten here as well; otherwise a difference could be
                # negative.
                for name in own.keys() - told.keys():
                    del own[name]
                for name, size in told.items():
                    own[name] = min(own[name], size)
                    told[name] -= own[name]
        return account

    def _count(self, received: bool, name: str, message: Inspect | Inspected) -> None:
        with self._lock:
            self._own[received][name] += inspection.size_of(message)

    def last_word(self, callee: Identity, number: int) -> str:
        """Return the callee's state of a call, to append to a message; empty without an answer within AT_ONCE."""
        # Many calls to a worker that hangs time out at once. Only the first of them asks: otherwise each would wait
        # AT_ONCE for the same answer, and each question starts a thread there.
        now = monotonic()
        if now < self._next_word.get(callee.name, 0.0):
            return ""
        self._next_word[callee.name] = now + BETWEEN
        answers, _ = self.ask([callee.name], CALL, lambda _: number, AT_ONCE)
        return str(answers.get(callee.name) or "")

    def _on_ask(self, sender: Identity, message: Inspect) -> None:
        self._count(True, sender.name, message)
        # Another thread answers: this one has read the message, and must go on reading while the stacks are walked. If
        # no thread can be started, there is no answer.
        with contextlib.suppress(RuntimeError, MemoryError):
            Thread(target=self._tell, args=(sender, message), name="telegrad-state").start()

    def _tell(self, sender: Identity, message: Inspect) -> None:
        about = (sender.name, message.after) if message.topic == CALL else message.after
        answer = Inspected(message.number, json.dumps(self._answer(message.topic, about)).encode())
        # To that incarnation of the worker only: a worker that was restarted under the same name has not asked. An
        # error means that the asking worker has gone.
        with contextlib.suppress(TelegradError):
            self._agent.notify(sender.name, answer, sender.incarnation)
            self._count(False, sender.name, answer)

    def _on_told(self, sender: Identity, message: Inspected) -> None:
        self._count(True, sender.name, message)
        if (asked := self._rounds.get(message.number)) is not None:
            answers, came = asked
            answers[sender.name] = message.text
            came.set()


# Dumps


def write_dump(worker: str, reason: str, content: dict[str, Any]) -> pathlib.Path | None:
    """Write a new file that only this user can read, and remove old files of this user. Return None if dumps are off;
    raise OSError if the file cannot be written."""
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return None
    text = _text({"reason": reason, **content})
    who = re.sub(r"[^\w-]", "_", worker, flags=re.ASCII)[:128]
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{who}-{os.getpid()}-{secrets.token_hex(8)}.json"
    with open_folder(named) if named else private_folder("dumps") as folder:
        try:
            with folder.create(name) as file:
                file.write(text)
        except OSError:
            folder.remove(name)  # an incomplete file is useless
            raise
        _remove_old(folder, name)
        return folder.path / name


def _text(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    while len(text) > LARGEST_FILE and content.get("events"):
        events = content["events"]
        content = {**content, "events": events[(len(events) + 1) // 2 :]}
        text = json.dumps(content).encode()
    return text


def _remove_old(folder: Folder, newest: str) -> None:
    own = [(name, found) for name in folder.names() if OURS.fullmatch(name) and (found := folder.own_file(name))]
    own.sort(key=lambda each: (each[0] == newest, each[1].st_mtime_ns), reverse=True)
    used = 0
    for number, (name, found) in enumerate(own):
        used += found.st_size
        if number >= KEPT or (used > ALL and name != newest):
            folder.remove(name)


class Dumper:
    def __init__(self, worker: str, tell: Callable[[], dict[str, Any]]) -> None:
        """`tell` returns the content of a dump."""
        self.worker = worker
        self._tell = tell
        self._next = 0.0  # earliest time of the next automatic dump
        self.failure = ""  # why the last dump could not be written
        instruments.alarms.append(self._alarmed)

    def write(self, reason: str) -> pathlib.Path | None:
        """Write a dump now; return None if dumps are off, or if it failed, which is logged."""
        try:
            path = write_dump(self.worker, reason, self._tell())
        except OSError as error:
            level = logging.INFO if self.failure else logging.WARNING  # warn only once
            self.failure = (
                f"the state of worker {self.worker!r}, for `telegrad why`, could not be written: {error_text(error)}. "
                f"The variable {VARIABLE} can name another folder, or be off"
            )
            log.log(level, "telegrad: %s", self.failure)
            return None
        if path is not None:
            log.info("telegrad: %s; the state of worker %r is in %s", reason, self.worker, path)
        return path

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            instruments.alarms.remove(self._alarmed)

    def _alarmed(self, reason: str) -> None:
        # Any thread may raise an alarm, also the one that serves calls, so a thread of its own writes the file. `_next`
        # has no lock: two threads at the same moment write two files.
        now = monotonic()
        if now >= self._next:
            self._next = now + PAUSE
            with contextlib.suppress(RuntimeError):  # no memory for a thread
                Thread(target=self.write, args=(reason,), name="telegrad-dump").start()


class Signalled:
    """Handle SIGUSR2, unless the program uses it: write stacks to a file, and call `act` on a new thread."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act  # None: closed
        self._depth = forks.process.depth
        self.file = -1  # the descriptor of that file; -1: none
        if not hasattr(signal, "SIGUSR2") or not hasattr(os, "memfd_create"):
            return
        found = signal.getsignal(signal.SIGUSR2)
        if found is not signal.SIG_DFL and not _is_left_over(found):
            return
        # Two handlers: that of faulthandler runs in C at once, also while a thread holds the interpreter, and then
        # chains to the one that was installed before it, which is Python's. So Python's is set first. On another thread
        # than the main one Python refuses to set a handler. Then the default action is still installed, and chaining to
        # it would end the process.
        chain = False
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGUSR2, self._came)
            chain = True
        # Other processes open this file by its descriptor in /proc, which the name of the debug server's socket has.
        # They send the signal only if the descriptor is a file of this name (`stacks_of` in `insight/seen_groups.py`).
        self.file = os.memfd_create("stacks-of-telegrad", os.MFD_CLOEXEC)
        faulthandler.register(signal.SIGUSR2, file=self.file, all_threads=True, chain=chain)
        interrupts.replaced[signal.SIGUSR2] = self._release

    def _came(self, *_: object) -> None:
        act = self._act
        if act is not None and self._depth == forks.process.depth:  # else this is a forked child without a worker
            Thread(target=act, name="telegrad-dump").start()

    def _release(self) -> None:
        """Stop writing stacks. Other processes send the signal only if the file exists."""
        faulthandler.unregister(signal.SIGUSR2)
        os.close(self.file)
        self.file = -1

    def close(self) -> None:
        """Leave a handler that does nothing, unless the program has set its own meanwhile."""
        # Not the default action, which ends the process: another process may have seen the file just before it is
        # closed, and send the signal just after that. Only a worker that joined on another thread than the main one has
        # no handler to leave.
        self._act = None
        # If the program sets a handler, `interrupts` calls `_release` on the main thread. The thread that removes the
        # entry is the one that releases the file, so it is released once.
        if self.file >= 0 and interrupts.replaced.pop(signal.SIGUSR2, None) is not None:
            self._release()


def _is_left_over(handler: Any) -> bool:
    """Return True if a worker set this handler that has left, or from which this process was forked."""
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, Signalled) and (owner._act is None or owner._depth != forks.process.depth)


# A worker


class Introspection(WorkerExtension):
    def __init__(self, name: str) -> None:
        self.observer = Observer(name)
        self._inquiry: StateQueries | None = None  # None until there is an agent
        recorder.begin()
        self._dumper = Dumper(name, lambda: {"account": self.account(), "events": recorder.events()})
        # Before the debug server, whose address has the descriptor of the file for stacks.
        self._signalled = Signalled(lambda: self._dumper.write("received SIGUSR2"))
        self._desk = DebugServer(name, self._signalled.file, self._answer)
        self._closed = False

    def on_start(self, worker: Worker, rank: int, size: int | None, place: str) -> None:
        self.observer.watch(worker, rank, size, place)
        self._inquiry = StateQueries(worker.agent, self._answer)

    def on_join(self, worker: Worker) -> None:
        name, known_as = worker.me.name, self.observer.name
        self.observer.joined(name, worker.me.id, worker.membership.present)
        if name != known_as:
            self._dumper.worker = name
            # The name of a bound socket cannot be changed. The new server is opened before the old one is closed, so
            # that programs of this host find the worker at each moment.
            before, self._desk = self._desk, DebugServer(name, self._signalled.file, self._answer)
            before.close()

    def account(self) -> WorkerState:
        account = self.observer.account()
        return account if self._inquiry is None else self._inquiry.leave_out(account)

    def look(self) -> tuple[list[WorkerState], dict[str, str]]:
        """Return the state of all workers that answer, and why the others do not."""
        # This worker's own state passes the same check, which sanitizes texts: names and lines of the user's program
        # may have control characters.
        own: WorkerState = checked(ACCOUNT, self.account())
        if self._inquiry is None:
            return [own], {}
        answers, silent = self._inquiry.ask([name for name in own["members"] if name != self.observer.name], ACCOUNT)
        return [own, *answers.values()], silent

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        """Return the events of each worker since the given time of its own clock."""
        name, answers = self.observer.name, dict[str, Any]()
        if self._inquiry is not None:
            others = [member.name for member in self.observer.members() if member.name != name]
            answers, _ = self._inquiry.ask(others, EVENTS, lambda name: after.get(name, 0.0))
        return {name: checked(EVENTS, recorder.events(after.get(name, 0.0))), **answers}

    def dump(self) -> pathlib.Path | None:
        """Write a dump now; return None if dumps are off or it failed."""
        return self._dumper.write("a dump was requested")

    def on_leave(self, worker: Worker) -> None:
        self.observer.leaving(worker.leaving.missing)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._desk.close()
            self._signalled.close()
            self._dumper.close()
            recorder.end()

    def abandon(self) -> None:
        self._desk.close(in_child=True)

    def _answer(self, topic: str, after: Any) -> Any:
        if topic == ACCOUNT:
            return self.account()
        if topic == CALL:
            return self.observer.word_on(*after)
        if topic == EVENTS:
            return recorder.events(after or 0.0)
        if topic == GROUP:
            accounts, silent = self.look()
            return {"accounts": accounts, "silent": silent}
        if topic == GROUP_EVENTS:
            return self.events(after or {})
        if topic == DUMP:
            path = self.dump()
            why_not = self._dumper.failure or f"{VARIABLE}=off"
            return f"nothing was written: {why_not}" if path is None else os.fspath(path)
        return None


def introspection_of(worker: Worker) -> Introspection:
    return worker.extensions.of_kind(Introspection)


register(Introspection)
