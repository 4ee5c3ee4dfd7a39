"""Workers that die and come back under their names, and calls of another worker to them, in any order of events.

Each actor is a generator; its acts between two yields happen at once. There is a table of calls for each life of a
worker, with a connection such as `calls_world` tests; a queue of the calls that are retried, and a table of idempotent
calls in each life. A life that was removed from the store may live on, and the next one may listen where an earlier
one did.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from telegrad._core.agent.pending_call import CallTable
from telegrad._core.rpc.idempotency import IdempotencyTable
from telegrad._core.rpc.retry_queue import Failure, RetryPolicy, RetryQueue, backoff, should_retry

NAMES = ("x", "y")
PLAIN = RetryPolicy(False, False)
POLICIES = [PLAIN, RetryPolicy(True, False), RetryPolicy(False, True), *2 * [RetryPolicy(True, True)]]


@dataclass(eq=False)
class Run:
    """A run of a function, and the attempts that wait for its result."""

    life: Life
    attempts: list[Attempt] = field(default_factory=list)
    done: bool = False


@dataclass(eq=False)
class Life:
    """A life of a worker."""

    name: str
    number: int
    place: int  # the address at which it listens
    table: IdempotencyTable
    lives: bool = True
    arrived: list[Attempt] = field(default_factory=list)
    running: list[tuple[Attempt, Run]] = field(default_factory=list)


@dataclass(eq=False)
class Asked:
    """A call as its user sees it, which may wait in the queue."""

    to: str
    policy: RetryPolicy
    bound: Life | None  # the only life that the call is meant for
    number: int
    until: float
    repeats: int = 0
    lost: bool = False
    attempts: int = 0
    fates: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


@dataclass(eq=False)
class Attempt:
    """An attempt to make a call."""

    asked: Asked
    meant: Life
    tell: Callable[[Failure | None], None]
    timeout: float
    deadline: float
    left: float
    id: int = 0
    weight: int = 0
    outcome: bool = True
    link: Connection | None = None


@dataclass(eq=False)
class Connection:
    life: Life
    side: Side
    whole: bool = True

    @property
    def lives(self) -> bool:
        return self.whole and self.life.lives


class Side:
    """The calling side towards one life."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.calls: Any = CallTable(1000, 1000)
        self.open: Connection | None = None
        self.queue: list[Attempt] = []
        self.is_connecting = False
        self.connections: list[Connection] = []


class Unknown(Exception):
    """No worker has that name, or the worker that had it has gone."""


class World:
    """Variants with bugs override the methods of one line each."""

    def __init__(
        self, seed: int, queue: type[RetryQueue[Asked]] = RetryQueue, table: type[IdempotencyTable] = IdempotencyTable
    ) -> None:
        self.chance = random.Random(seed)
        self.make_table = table
        self.queue: RetryQueue[Asked] = queue()
        self.now = 0.0
        self.names: dict[str, Side] = {}  # as `Connections` has them
        self.sides: dict[Life, Side] = {}
        self.listed: dict[str, Life] = {}  # in the store
        self.seen: dict[str, Life] = {}  # by the membership of the caller
        self.lives: list[Life] = []
        self.doors: dict[int, Life] = {}  # the life that listens at each place
        self.all: list[Asked] = []
        self.calm = False
        self.names_used = NAMES[: self.chance.randint(1, 2)]
        for name in self.names_used:
            if self.chance.random() < 0.8:
                self.come(name)
        self.users = self.chance.randint(1, 3)
        self.breaks = self.chance.choice([0.02, 0.3])  # how likely a connection is to break at a look
        self.actors: list[Iterator[None]] = [self.user() for _ in range(self.users)]
        self.actors += [self.fate(), self.network(), self.callees(), self.callees(), self.clock(), self.retrier()]
        self.busy = self.users

    def run(self) -> None:
        faults = self.chance.randint(50, 600)
        for step in range(20_000):
            if step == faults:
                self.calm = True
                self.repair()
            if self.calm and not self.busy and all(asked.fates for asked in self.all):
                break
            actor = self.chance.choice(self.actors)
            try:
                next(actor)
            except StopIteration:
                self.actors.remove(actor)
        else:
            raise AssertionError(f"calls wait for ever: {[one for one in self.all if not one.fates]}, {self.queue!r}")
        self.check_end()

    def begin(self, actor: Iterator[None]) -> None:
        self.busy += 1
        self.actors.append(self._counted(actor))

    def _counted(self, actor: Iterator[None]) -> Iterator[None]:
        yield from actor
        self.busy -= 1

    # Workers that come and go

    def come(self, name: str) -> None:
        earlier = [life.place for life in self.lives if life.name == name and life.place not in self.doors]
        place = self.chance.choice([*earlier, len(self.lives) + 100])
        life = Life(name, len(self.lives), place, self.make_table())
        self.lives.append(life)
        self.listed[name] = self.doors[place] = life

    def die(self, life: Life) -> None:
        life.lives = False
        if self.doors.get(life.place) is life:
            del self.doors[life.place]

    def fate(self) -> Iterator[None]:
        while True:
            yield
            if self.calm:
                return
            name = self.chance.choice(self.names_used)
            listed = self.listed.get(name)
            what = self.chance.random()
            if what < 0.03 and listed is not None and listed.lives:
                self.die(listed)
            elif what < 0.06 and (listed is None or not listed.lives):
                self.come(name)  # the new life takes the name over
            elif what < 0.09 and listed is not None:
                del self.listed[name]  # removed from the store, dead or alive
                if what < 0.07:
                    self.come(name)
            elif what < 0.10 and self.lives:
                self.die(self.chance.choice(self.lives))

    def repair(self) -> None:
        """Let all workers be there; earlier lives that were removed from the store may live on."""
        for name in self.names_used:
            if name not in self.listed or not self.listed[name].lives:
                self.come(name)

    def see(self) -> None:
        """Look as `Membership` does: names are looked up anew if something has changed."""
        if self.seen != self.listed:
            self.seen = dict(self.listed)
            self.forget_names()

    def forget_names(self) -> None:
        """Forget all names but those of lives that are there."""
        self.names = {to: side for to, side in self.names.items() if side.life in self.listed.values()}

    def forget_lost(self, lost: Side) -> None:
        self.names = {to: side for to, side in self.names.items() if side is not lost}

    # Lookups of names

    def peer(self, to: str, found: list[Side]) -> Iterator[None]:
        """Find the side of a name as `Connections.peer` does, and add it to `found`."""
        names = self.names
        side = names.get(to)
        if side is None:
            yield
            life = self.listed.get(to)
            for _ in range(self.chance.randint(1, 8)):
                yield
            if life is None:
                raise Unknown
            side = self.sides.setdefault(life, Side(life))
            self.note(names, to, side)
        found.append(side)

    def note(self, names: dict[str, Side], to: str, side: Side) -> None:
        names[to] = side

    # Calls

    def user(self) -> Iterator[None]:
        for _ in range(self.chance.randint(1, 4)):
            for _ in range(self.chance.randint(0, 30)):
                yield
            yield from self.one_call()
        self.busy -= 1

    def one_call(self) -> Iterator[None]:
        policy = self.chance.choice(POLICIES)
        until = self.now + 1.0 if self.chance.random() < 0.3 else inf
        bound = None
        to = self.chance.choice(self.names_used)
        if policy == PLAIN and self.lives and self.chance.random() < 0.5:
            bound = self.chance.choice([life for life in self.lives if life.name == to] or [None])
        asked = Asked(to, policy, bound, len(self.all) + 1, until)
        self.all.append(asked)
        yield from self.attempt(asked)

    def attempt(self, asked: Asked) -> Iterator[None]:
        asked.attempts += 1
        found: list[Side] = []
        try:
            yield from self.peer(asked.to, found)
            if asked.bound is not None and found[0].life is not asked.bound:
                raise Unknown
        except Unknown:
            self.failed(asked, Failure.NOT_RUN)
            return
        left = asked.until - self.now if asked.until < inf else 0.0
        if left < 0:
            self.failed(asked, Failure.FINAL)
            return

        def tell(failure: Failure | None) -> None:
            if failure is None:
                self.queue.end(asked, answered=True)
                asked.fates.append("answered")
            else:
                self.failed(asked, failure)

        yield from self.send(found[0], Attempt(asked, found[0].life, tell, left, asked.until, left))

    def failed(self, asked: Asked, failure: Failure) -> None:
        """Handle a failure as `RetriedCall._goes_on` does."""
        if not self.goes_on(asked, failure):
            self.queue.end(asked)
            asked.fates.append(failure.name)
            return
        pause = 0.0
        if failure is Failure.MAY_HAVE_RUN:
            asked.lost = True
            pause = backoff(asked.repeats)
            asked.repeats += 1
        assert self.queue.wait(asked, self.now, pause)

    def goes_on(self, asked: Asked, failure: Failure) -> bool:
        return should_retry(asked.policy, failure, asked.lost)

    def number(self, asked: Asked) -> int:
        return asked.number

    # Retries

    def retrier(self) -> Iterator[None]:
        while True:
            yield
            if self.chance.random() < 0.3:
                self.see()
            for to in self.queue.due(self.now):
                assert isinstance(to, str)
                self.begin(self.attempt_all(to))

    def attempt_all(self, to: str) -> Iterator[None]:
        """Attempt the calls that are due as `Retries._attempt` does."""
        for asked in self.queue.ready(to, self.now):
            if self.queue.begin(asked):
                yield from self.attempt(asked)
                side = self.names.get(to)
                if side is None or side.open is None:
                    break

    # Sending, as in `LazyLink`

    def send(self, side: Side, attempt: Attempt) -> Iterator[None]:
        side.calls.add(attempt)
        while (link := side.open) is not None:
            attempt.link = link
            yield
            if self.write(link, attempt):
                return
            if side.open is link:
                side.open = None
        side.queue.append(attempt)
        if not side.is_connecting:
            side.is_connecting = True
            self.begin(self.connector(side))

    def write(self, link: Connection, attempt: Attempt) -> bool:
        if not link.lives:
            return False
        assert attempt.meant is link.life, f"what was meant for life {attempt.meant.number} came to {link.life.number}"
        link.life.arrived.append(attempt)
        return True

    def connector(self, side: Side) -> Iterator[None]:
        yield
        life = self.door(side.life)
        if life is None or (not self.calm and self.chance.random() < 0.05):
            self.forget_lost(side)
            self.abort(side, side.queue, Failure.NOT_RUN)
            return
        link = Connection(life, side)
        side.connections.append(link)
        while True:
            yield
            batch, side.queue = side.queue, []
            if not batch:
                side.open, side.is_connecting = link, False
                break
            for attempt in batch:
                attempt.link = link
            for at, attempt in enumerate(batch):
                yield
                if not self.write(link, attempt):
                    self.forget_lost(side)
                    self.abort(side, [*batch[at:], *side.queue], Failure.MAY_HAVE_RUN)
                    return
        if not link.lives:
            self.end(link)

    def abort(self, side: Side, unsent: list[Attempt], fate: Failure) -> None:
        side.is_connecting, side.queue = False, []
        self.end_all([attempt for attempt in unsent if side.calls.pop(attempt.id) is not None], fate)

    def door(self, wanted: Life) -> Life | None:
        """Return the life that listens where `wanted` has listened, if it is that one."""
        found = self.doors.get(wanted.place)
        return found if found is wanted else None

    def network(self) -> Iterator[None]:
        while True:
            yield
            for side in list(self.sides.values()):
                for link in side.connections:
                    if link.lives and not self.calm and self.chance.random() < self.breaks:
                        link.whole = False
                    if not link.lives and self.chance.random() < 0.3:
                        self.end(link)

    def end(self, link: Connection) -> None:
        if link in link.side.connections:
            link.side.connections.remove(link)
        if link.side.open is link:
            link.side.open = None
        self.forget_lost(link.side)
        self.end_all(link.side.calls.pop_all(lambda attempt: attempt.link is link), Failure.MAY_HAVE_RUN)

    def end_all(self, attempts: list[Attempt], fate: Failure) -> None:
        for attempt in attempts:
            attempt.tell(fate)

    # Callees

    def callees(self) -> Iterator[None]:
        while True:
            yield
            living = [life for life in self.lives if life.lives and (life.arrived or life.running)]
            if not living:
                continue
            life = self.chance.choice(living)
            if life.arrived and self.chance.random() < 0.6:
                self.take(life, life.arrived.pop(0))
            elif life.running and self.chance.random() < 0.3:
                self.finish(life, *life.running.pop(self.chance.randrange(len(life.running))))

    def take(self, life: Life, attempt: Attempt) -> None:
        """Take an attempt as `run_once` does."""
        asked = attempt.asked
        run = Run(life, [attempt])
        if asked.policy.repeats:
            entry = life.table.enter("me", self.number(asked), attempt.left, self.now)
            assert entry is not None
            if entry.outcome is not None:
                entry.outcome.attempts.append(attempt)
                if entry.outcome.done:
                    self.answer(entry.outcome)
                return
            entry.outcome = run
        asked.runs.append(run)
        life.running.append((attempt, run))

    def finish(self, life: Life, attempt: Attempt, run: Run) -> None:
        run.done = True
        if attempt.asked.policy.repeats:
            life.table.ended("me", self.number(attempt.asked))
        self.answer(run)

    def answer(self, run: Run) -> None:
        attempts, run.attempts = run.attempts, []
        for attempt in attempts:
            link = attempt.link
            assert link is not None
            if link.lives and link.side.calls.pop(attempt.id) is not None:
                attempt.tell(None)
                if attempt.asked.policy.repeats and self.chance.random() < 0.7:
                    run.life.table.settled("me", self.number(attempt.asked))

    # Time

    def clock(self) -> Iterator[None]:
        while True:
            yield
            self.now += self.chance.choice([0.002, 0.02])
            for side in list(self.sides.values()):
                self.end_all(side.calls.pop_expired(self.now), Failure.FINAL)
            for asked, _ in self.queue.expired(self.now):
                assert asked.until <= self.now
                asked.fates.append("late")
            for life in self.lives:
                life.table.expire(self.now)

    # Checks

    def check_end(self) -> None:
        for asked in self.all:
            assert len(asked.fates) == 1, f"{asked} ended {len(asked.fates)} times"
            self.check_runs(asked)
            (how,) = asked.fates
            if asked.policy == PLAIN:
                assert asked.attempts == 1, f"{asked} was made again"
            if asked.until == inf and asked.policy.waits:
                assert how in ("answered", "MAY_HAVE_RUN"), f"{asked} did not wait"
                assert how == "answered" or not asked.policy.repeats, f"{asked} was given up"
            assert how != "late" or asked.until < inf
        assert self.queue.empty
        self.check_names()

    def check_runs(self, asked: Asked) -> None:
        lives = [run.life for run in asked.runs]
        assert len(set(lives)) == len(lives), f"{asked} has run twice in one life"
        assert asked.policy.repeats or len(lives) <= 1, f"{asked} has run {len(lives)} times"
        assert asked.bound is None or all(life is asked.bound for life in lives), f"{asked} has run elsewhere"
        assert asked.fates != ["answered"] or any(run.done for run in asked.runs), f"{asked} was answered by nobody"

    def check_names(self) -> None:
        """Check that each name leads to the life in the store once all has been seen, after one failure at most."""
        self.see()
        for name in self.names_used:
            side = self.names.get(name)
            where: Any = side and side.life
            assert where is None or not where.lives or where is self.listed[name], f"{name} leads to an earlier life"
