"""The introspection of one worker: record events, answer queries, and write dumps when something fails."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from telegrad.ext.events import Event
from telegrad.ext.workers import Worker, WorkerExtension, register
from telegrad.reporting import dump
from telegrad.reporting.debug_server import DebugServer
from telegrad.reporting.decoding import ACCOUNT, CALL, DUMP, EVENTS, GROUP, GROUP_EVENTS, checked
from telegrad.reporting.dump import Dumper, Signalled
from telegrad.reporting.observer import Observer, Parts
from telegrad.reporting.recorder import recorder
from telegrad.reporting.state_queries import StateQueries
from telegrad.reporting.worker_state import LEAVING, WorkerState


class Introspection(WorkerExtension):
    """The introspection of one worker."""

    def __init__(self, name: str) -> None:
        self.observer = Observer(name)
        self._name = name
        self._inquiry: StateQueries | None = None  # None until there is an agent
        recorder.begin()
        self._dumper = Dumper(name, self._tell)
        self._signalled = Signalled(lambda: self._dumper.write("received SIGUSR2"))
        self._desk = DebugServer(name, self._signalled.file, self._answer)
        self._closed = False

    def on_start(self, worker: Worker, rank: int, size: int | None, place: str) -> None:
        self.observer.watch(Parts(worker.agent, worker.references, worker.conductor, rank, size, place))
        self._inquiry = StateQueries(worker.agent, self._answer)

    def on_join(self, worker: Worker) -> None:
        name = worker.me.name
        self.observer.joined(name, worker.me.id, worker.membership.present)
        if name != self._name:
            self._name = self._dumper.worker = name
            before, self._desk = self._desk, DebugServer(name, self._signalled.file, self._answer)
            before.close()  # closed after the new one is open, so that programs of this host always find the worker

    def account(self) -> WorkerState:
        """Return the state of this worker."""
        return self.observer.account()

    def look(self) -> tuple[list[WorkerState], dict[str, str]]:
        """Return the state of all workers that answer, and why the others do not."""
        own: WorkerState = checked(ACCOUNT, self.account())
        others = [name for name in own["members"] if name != self._name]
        if self._inquiry is None or not others:
            return [own], {}
        answers, silent = self._inquiry.ask(others, ACCOUNT)
        return [own, *answers.values()], silent

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        """Return the events of each worker since the given time of its own clock."""
        others = [member.name for member in self.observer.members() if member.name != self._name]
        answers: dict[str, Any] = {}
        if self._inquiry is not None:
            answers, _ = self._inquiry.ask(others, EVENTS, lambda name: after.get(name, 0.0))
        return {self._name: checked(EVENTS, recorder.events(after.get(self._name, 0.0))), **answers}

    def dump(self, reason: str = "a dump was requested") -> pathlib.Path | None:
        """Write a dump now; return None if dumps are off or it failed."""
        return self._dumper.write(reason)

    def on_leave(self, worker: Worker) -> None:
        self.observer.enter(LEAVING, worker.parting.missing)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._desk.close()
            self._signalled.close()
            self._dumper.close()
            recorder.end()

    def abandon(self) -> None:
        self._desk.abandon()

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
            why_not = self._dumper.failure or f"{dump.VARIABLE}=off"
            return f"nothing was written: {why_not}" if path is None else os.fspath(path)
        return None

    def _tell(self) -> dict[str, Any]:
        return {"account": self.account(), "events": recorder.events()}


def introspection_of(worker: Worker) -> Introspection:
    """Return the introspection of a worker of this process."""
    return worker.extensions.of_kind(Introspection)


register(Introspection)
