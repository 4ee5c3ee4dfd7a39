"""Workers of dynamic groups, with the real registry, lease, watch and membership, under a seeded scheduler.

Each act of a worker (a join, a renewal, a watch, a claim) runs on a fiber and is suspended whenever it asks the
directory; meanwhile others go on. Time is simulated. Each worker has a clock of its own speed.
"""

import contextlib
import heapq
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import Registry
from telegrad._core.membership.suspects import Suspect
from telegrad._core.stores.lease_table import Limits
from tests.sim.dynamic_directory import UP, Server
from tests.sim.dynamic_invariants import DRIFT, TTL, Broken, Checked
from tests.sim.dynamic_worker import Thread, Worker, fibers, run_here
from tests.sim.fibers import Fiber

NAMES = ("a", "b")
CALM = 2.5  # ttls until all agree, after the last fault


@dataclass(frozen=True)
class Kinds:
    """The simulated code; a mutant replaces one of these."""

    registry: type[Registry] = Registry
    group: type[DynamicGroup] = DynamicGroup


class World(Checked):
    """A directory, its workers, and their faults."""

    def __init__(self, seed: int, kinds: Kinds, counts: Counter[str]) -> None:
        self.random = chance = random.Random(seed)
        self.kinds, self.counts = kinds, counts
        self.fibers = fibers
        self.now = 0.0
        self.log: list[str] = []
        self.is_calm = False
        self.lies = chance.random() < 0.3  # failure detectors may be wrong
        self.instant = chance.choice((0.5, 0.9))  # how many requests are answered at once
        self.flaky = chance.choice((0.0, 0.0, 0.1, 0.3))  # share of answers that are lost without any other fault
        self.slowest = chance.choice((0.05, 1.0, 8.0))
        self.server = Server(self, Limits(changes=chance.choice((6, 1000))), self.rate())
        self.workers: list[Worker] = []
        self.lives: dict[str, Worker] = {}
        self.wronged: set[str] = set()  # lives that were declared dead while they lived
        self.cuts: dict[tuple[Any, Any], int] = {}  # from one to another, nothing arrives
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._most = chance.randint(2, 6)
        self._until = chance.choice((8.0, 12.0, 16.0, 30.0))
        self._faults = chance.choice((0.0, 3.0, 8.0))  # seconds between two, on average

    def time(self) -> float:
        return self.now

    def rate(self) -> float:
        if self.random.random() < 0.5:
            return 1.0
        self.counts["clock that runs differently"] += 1
        return 1.0 + self.random.choice((-DRIFT, DRIFT, self.random.uniform(-DRIFT, DRIFT)))

    # Time

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, call, args))

    def resume(self, fiber: Fiber, worker: Worker) -> None:
        if worker.is_stopped:
            worker.postponed.append(partial(self.resume, fiber, worker))
        elif worker.is_alive:
            fibers.resume(fiber)

    def delay(self) -> float:
        if self.is_calm or self.random.random() < 0.8:
            return self.random.uniform(0.0, 0.02)
        return self.random.uniform(0.0, self.slowest)

    def run(self) -> None:
        self.after(0.0, self.come)
        self.after(0.0, self.fail)
        self.after(self._until, self.heal)
        end = self._until + CALM * TTL
        self.after(end, self.note, "the end")
        try:
            while self.now < end:
                if self.server.next_end() < self._events[0][0]:
                    self.now = self.server.next_end()
                    self.server.expire()
                else:
                    self.now, _, call, args = heapq.heappop(self._events)
                    call(*args)
            self.check_end()
        finally:
            fibers.kill_all()

    # Events

    def come(self) -> None:
        """Let a worker begin to join."""
        if self.is_calm:
            return
        chance = self.random
        if sum(worker.is_alive for worker in self.workers) < self._most:
            name = chance.choice((*NAMES, ""))
            worker = Worker(self, len(self.workers), name, chance.choice((-1, -1, -1, 0, 1)), self.rate())
            self.workers.append(worker)
            self.lives[worker.life] = worker
            self.note(f"{worker} comes")
            worker.start(worker.join)
        self.after(chance.choice((0.0, chance.uniform(0.0, 6.0), chance.uniform(0.0, 6.0))), self.come)

    def fail(self) -> None:
        if self.is_calm or not self._faults:
            return
        faults = [self.cut, self.cut, self.stop, self.kill, self.kill, self.stand, self.fail_server, self.break_one]
        self.random.choice(faults + 3 * self.lies * [self.accuse])()
        self.after(self.random.expovariate(1 / self._faults), self.fail)

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_alive]

    def cut(self) -> None:
        """Separate some nodes from the others, in one direction or in both, for a while."""
        nodes: list[Any] = [self.server, *self.living()]
        some = self.random.sample(nodes, self.random.randint(1, len(nodes)))
        pairs = [(one, other) for one in some for other in nodes if other not in some]
        ways = self.random.choice(("to", "from", "both"))
        self.count("cut one way" if ways != "both" else "cut")
        parted = [pair for pair in pairs if ways != "from"] + [pair[::-1] for pair in pairs if ways != "to"]
        self.note(f"cut {ways}: {some}")
        for pair in parted:
            self.cuts[pair] = self.cuts.get(pair, 0) + 1
        self.after(self.random.choice((0.5, 3.0, 12.0, 25.0)), self.join_again, parted)

    def join_again(self, pairs: list[tuple[Any, Any]]) -> None:
        for pair in pairs:
            self.cuts[pair] = max(0, self.cuts.get(pair, 0) - 1)

    def stop(self) -> None:
        for worker in self.random.sample(self.living(), min(1, len(self.living()))):
            self.count("process that stops and goes on")
            self.note(f"{worker} stops")
            worker.is_stopped = True
            self.after(self.random.choice((1.0, 5.0, 15.0)), worker.go_on)

    def kill(self) -> None:
        for worker in self.random.sample(self.living(), min(1, len(self.living()))):
            self.count("process that dies")
            self.note(f"{worker} dies")
            worker.die()

    def stand(self) -> None:
        for worker in self.random.sample(self.living(), min(1, len(self.living()))):
            self.count("worker that answers nobody")
            worker.stands_since = self.now
            self.after(self.random.choice((3.0, 25.0)), setattr, worker, "stands_since", 0.0)

    def fail_server(self) -> None:
        if self.server.state != UP:
            return
        seconds = self.random.choice((0.5, 3.0, 15.0))
        if self.random.random() < 0.5:
            self.count("directory that stops and goes on")
            self.server.stop()
            self.after(seconds, self.server.go_on)
        else:
            self.count("directory that is killed")
            self.server.kill()
            self.after(seconds, self.server.restart)
        self.note(f"the directory is {self.server.state} for {seconds} s")

    def break_one(self) -> None:
        """Break a connection between two workers."""
        pairs = [(worker, other) for worker in self.members() for other in worker.connected]
        if pairs:
            self.count("connection that breaks")
            worker, other = self.random.choice(sorted(pairs, key=repr))
            worker.hear_of_end(other)

    def accuse(self) -> None:
        """Let a worker declare a living one lost."""
        others = self.living()
        if self.members() and others:
            worker, other = self.random.choice(self.members()), self.random.choice(others)
            self.count("member that is declared lost and lives")
            self.note(f"{worker} declares {other} lost, which lives")
            self.wronged.add(other.life)
            worker.start(partial(worker.group.declare_lost, other.me, "wrongly"))

    def probe(self, worker: Worker, member: Member) -> bool | None:
        other = self.lives[member.incarnation]
        if other.is_alive:
            if self.lies and not self.is_calm and self.random.random() < 0.3:
                self.count("detector that says dead of one that lives")
                self.wronged.add(other.life)
                return False
            return True if self.connects(worker, other) and self.connects(other, worker) else None
        if self.now - other.died_at < self.random.choice((0.0, 5.0)):
            self.count("detector that is late")
            return self.random.choice((True, None))
        if self.lies and not self.is_calm and self.random.random() < 0.3:
            self.count("detector that says alive of one that died")
            return True
        return False

    def connects(self, one: Any, other: Any) -> bool:
        return not self.cuts.get((one, other))

    def reaches(self, worker: Worker, server: Server) -> bool:
        return server.state == UP and self.connects(worker, server) and self.connects(server, worker)

    def heal(self) -> None:
        self.is_calm = True
        self.note("all is well from here on")
        self.cuts.clear()
        self.server.go_on()
        self.server.restart()
        for worker in self.workers:
            worker.stands_since = 0.0
            worker.go_on()


def patched() -> contextlib.ExitStack:
    """Replace the threads of a group by steps of the world."""
    stack = contextlib.ExitStack()
    for module in ("dynamic", "membership"):
        stack.enter_context(mock.patch(f"telegrad._core.membership.{module}.Background", Thread))
    stack.enter_context(mock.patch("telegrad._core.membership.dynamic.run_in_thread", run_here))
    stack.enter_context(mock.patch("telegrad._core.membership.membership.Probes", FakeProbes))
    stack.enter_context(mock.patch.object(logging.getLogger("telegrad"), "exception", fail))
    return stack


def fail(text: str, *_: Any) -> None:
    """Raise instead of logging an exception that the code does not expect."""
    raise Broken(f"X1: {text}")


class FakeProbes(list[Suspect]):
    """A replacement for the probes of `suspects`: the worker of this fiber probes."""

    begin = list.append

    def answers(self) -> Iterator[tuple[Suspect, bool | None]]:
        worker = fibers.check().owner
        assert isinstance(worker, Worker)
        while self:
            suspect = self.pop()
            yield suspect, worker.probe(suspect.who)


def run(seed: int, kinds: Kinds, counts: Counter[str]) -> list[str]:
    """Simulate one world; return what has happened."""
    world = World(seed, kinds, counts)
    with patched(), mock.patch("telegrad._core.membership.membership.monotonic", world.time):
        try:
            world.run()
        except BaseException as error:
            story = "\n".join(world.log[-60:])
            raise AssertionError(f"SEED={seed} {type(error).__name__}: {error}\n{story}") from error
    return world.log
