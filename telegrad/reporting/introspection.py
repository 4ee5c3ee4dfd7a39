"""The introspection of one worker: record events, answer queries, and write dumps when something fails."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Any, NamedTuple

from telegrad.errors import TelegradError, UnknownWorker
from telegrad.ext.calls import Agent, inspection
from telegrad.ext.events import Event
from telegrad.ext.feedback import safe
from telegrad.ext.host import Thread, renewed
from telegrad.ext.workers import Identity, Worker, WorkerExtension, register
from telegrad.reporting import ACCOUNT, CALL, DUMP, EVENTS, GROUP, GROUP_EVENTS, Malformed, WorkerState, checked, decode
from telegrad.reporting.debug_server import DebugServer
from telegrad.reporting.dump import VARIABLE, Dumper, Signalled, recorder
from telegrad.reporting.observer import Observer

PATIENCE = 1.5  # seconds
AT_ONCE = 0.1  # seconds, for the question about a call that timed out
BETWEEN = 0.1  # minimum seconds between two such questions to one callee


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
                    silent[name] = "it left the group, or died"
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
            Thread(target=self._tell, args=(sender, message), name="telegrad-witness").start()

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
        self.observer.leaving(worker.parting.missing)

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
