"""A schedule: a group under load, rounds of faults, and checks after each round and at the end.

after each round    every client of every living worker soon succeeds at something
at the end          every operation has ended, all workers reach one another, nothing is left, all can shut down
"""

import contextlib
import heapq
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.chaos import faults, life
from tests.chaos.board import Board
from tests.chaos.load import GRACE
from tests.chaos.plan import MEMORY, Fault, Plan
from tests.chaos.proxy import Proxy
from tests.chaos.report import Report
from tests.cluster import PATIENCE, Process, free_port, pause, processes

CLIENTS = 2
TIMEOUT = 8.0  # seconds of a call that is not impatient
GLANCE = 0.005
FIRST = 3  # operations of each client before the first fault
LONGER = 2 * TIMEOUT + GRACE + PATIENCE


class Schedule:
    """A group of workers that live through a plan."""

    def __init__(self, plan: Plan, proxy: Proxy, group: list[Process], folder: str) -> None:
        self.report = Report(schedules=1)
        self._plan = plan
        self._proxy = proxy
        self._group = group
        self._record = Path(folder, "violations")
        self._board = Board(f"{folder}/board", plan.workers)
        self._squeezed: set[int] = set()
        self._order = itertools.count()
        self._undo: list[tuple[float, int, faults.Undo]] = []  # (time to end a fault, order, function that ends it)

    def run(self, meanwhile: Callable[[], None] | None = None) -> Report:
        """Live through the plan, or do something else under the load."""
        try:
            self._run(meanwhile or self._live_through_all)
        except Exception as error:
            self.report.violations.append(f"{type(error).__name__}: {error}")
        finally:
            self._end_faults(float("inf"))
        self.report.violations += self.told()
        self.report.operations = sum(map(self._board.ended, range(self._plan.workers)))
        return self.report

    def told(self) -> list[str]:
        """Return the violations that the workers' clients have found so far."""
        texts = self._record.read_text().split("\0")[:-1] if self._record.exists() else []
        return [text.strip() for text in texts]

    def living(self) -> dict[int, int]:
        """Return the process ids of the living workers."""
        return {rank: self._group[rank].pid for rank in self._alive}

    def _run(self, meanwhile: Callable[[], None]) -> None:
        plan = self._plan
        squeezed = any(fault.kind in MEMORY for round_ in plan.rounds for fault in round_)
        self.on_all(
            life.join, plan.workers, free_port(), plan.transport, TIMEOUT, self._proxy.address, self._board.path
        )
        self.on_all(life.call_all, self._alive, TIMEOUT)
        self.on_all(life.note_connected)
        self.on_all(life.start_load, plan.seed, CLIENTS, TIMEOUT, squeezed, str(self._record))
        self._wait_for_successes(FIRST)
        meanwhile()
        for tally in self.on_all(life.stop_load).values():
            self.report.take(tally)
        self.on_all(life.let_go)
        self.on_all(life.reach_all, self._alive, TIMEOUT)
        self.on_all(life.call_all, self._alive, TIMEOUT)
        self._nothing("left over", self.on_all(life.left_over, plan.workers - len(self._alive)))
        self.on_all(life.shut_down, PATIENCE)
        self._nothing("left after the shutdown", self.on_all(life.left_after_shutdown))

    # Workers

    @property
    def _alive(self) -> list[int]:
        """The ranks of living workers; a death that no fault explains is a violation."""
        for rank, process in enumerate(self._group):
            if not self._board.is_dead(rank) and not faults.is_alive(process):
                self._board.bury(rank)
                if rank in self._squeezed:
                    self.report.squeezed_to_death += 1
                else:
                    self.report.violations.append(f"{process.name} died by itself, of {process.join(0)}")
        return [rank for rank in range(self._plan.workers) if not self._board.is_dead(rank)]

    def on_all(self, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
        """Run a function on all living workers at once."""
        alive = self._alive
        for rank in alive:
            self._group[rank].begin(function, rank, *args)
        results = {}
        for rank in alive:
            try:
                results[rank] = self._group[rank].end(LONGER)
            except Exception as error:
                self.report.violations.append(f"{function.__name__} on worker{rank}: {type(error).__name__}: {error}")
        return results

    def _nothing(self, what: str, found: dict[int, dict[str, int]]) -> None:
        self.report.violations += [f"{what} on worker{rank}: {counts}" for rank, counts in found.items() if counts]

    def _wait_for_successes(self, more: int) -> None:
        """Wait until every client has succeeded that many times more."""
        wanted = {rank: [done + more for done in self._board.successes(rank)[:CLIENTS]] for rank in self._alive}
        deadline = time.monotonic() + LONGER
        while late := [
            rank
            for rank in self._alive
            if any(done < goal for done, goal in zip(self._board.successes(rank), wanted[rank], strict=False))
        ]:
            if time.monotonic() > deadline:
                self.report.violations.append(f"workers {late} did not succeed at anything within {LONGER:g} s")
                return
            pause(GLANCE)

    # Faults

    def _live_through_all(self) -> None:
        for round_ in self._plan.rounds:
            self._live_through(round_)
            self._wait_for_successes(1)

    def _live_through(self, round_: list[Fault]) -> None:
        began = time.monotonic()
        for fault in round_:
            self._end_faults(began + fault.start)
            self._begin(fault)
        self._end_faults(float("inf"))

    def _begin(self, fault: Fault) -> None:
        self.report.faults[fault.kind] += 1
        if fault.kind == "kill":
            self._board.bury(fault.victim)
        if fault.kind in MEMORY:
            self._squeezed.add(fault.victim)
        try:
            undo = faults.begin(fault, self._proxy, self._group)
        except faults.ReplayAccepted as error:
            self.report.violations.append(str(error))
            return
        heapq.heappush(self._undo, (time.monotonic() + fault.duration, next(self._order), undo))

    def _end_faults(self, until: float) -> None:
        """Sleep until then and end faults at their times; without a limit, until no fault is left."""
        while self._undo and self._undo[0][0] <= until:
            when, _, undo = heapq.heappop(self._undo)
            pause(when - time.monotonic())
            undo()
        if until < float("inf"):
            pause(until - time.monotonic())


@contextlib.contextmanager
def prepared(plan: Plan) -> Iterator[Schedule]:
    """Yield a schedule with the processes that it needs."""
    with tempfile.TemporaryDirectory() as folder, Proxy() as proxy, processes(plan.workers) as made:
        yield Schedule(plan, proxy, made, folder)


def run(plan: Plan) -> Report:
    with prepared(plan) as schedule:
        return schedule.run()
