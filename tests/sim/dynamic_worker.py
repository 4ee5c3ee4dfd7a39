"""A worker of a simulated dynamic group: a process with the real group and membership, whose threads are steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad._core.membership.members import Identity, Member
from telegrad._core.membership.membership import Membership
from telegrad._core.membership.registry import Change, Claim, Ended, LifeOver
from telegrad._core.stores.directory import DirectoryLost, LeaseLost
from telegrad.errors import PeerError, PeerLost, ShutDown, WorkerTaken
from tests.sim.dynamic_directory import Link
from tests.sim.dynamic_invariants import TTL
from tests.sim.fibers import Fibers

if TYPE_CHECKING:
    from tests.sim.dynamic_world import World

VALUES = ("x", "y")

fibers = Fibers()


class Thread:
    """A replacement for a thread that calls a step again and again; the world calls it here."""

    begun = False

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        pass

    def want(self) -> None:
        pass

    def join(self, patience: float) -> None:
        pass


class Stopped(threading.Event):
    """An event that is waited for in simulated time."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def wait(self, timeout: float | None = None) -> bool:
        self._worker.pause(timeout or 0.0)
        return self.is_set()


def run_here(_: str, run: Callable[..., None], *args: Any, patience: float = 0.0) -> None:
    """Run a function on the fiber itself, in place of a thread that runs it once."""
    run(*args)


class Post:
    """The part of the worker's connections that a membership needs."""

    closed, idle, started = False, True, 0

    def __init__(self, worker: Worker) -> None:
        self.lost: list[Callable[[Identity, PeerError], None]] = []
        self.reached: list[Callable[[Identity], None]] = []
        self.cut_off: set[str] = set()  # lives that are refused
        self._worker = worker

    @property
    def stands_for(self) -> float:
        return self._worker.stands_for()

    def on(self, message: type, handler: Any) -> None:
        pass

    def notify(self, to: str | int, message: tuple[Any, ...]) -> None:
        """Connect to a worker, so that this worker will hear of its end."""
        found = self._worker.find(to)
        if found is not None:
            self._worker.connected.add(found)
            if not found.is_alive:
                self._worker.world.after(1.0, self._worker.hear_of_end, found)

    def warn_lost(self, who: Identity, why: str) -> None:
        pass

    def note_return(self, who: Identity) -> None:
        pass

    def forget_names(self, but: Collection[str]) -> None:
        pass

    def cut(self, who: Identity, reason: PeerError) -> None:
        self.cut_off.add(who.incarnation)


class Worker:
    """A process, and its life in the group."""

    def __init__(self, world: World, number: int, name: str, rank: int, rate: float) -> None:
        self.world, self.number = world, number
        self.life = f"{name or 'role'}#{number}"
        self.me = Member(name, rank, self.life, "", "host", "", ("127.0.0.1", number), role="" if name else "r")
        self.is_alive = True
        self.is_stopped = self.has_joined = self.has_left = self.was_over = False
        self.postponed: list[Callable[[], None]] = []  # acts for the time when this process goes on
        self.died_at = self.stands_since = 0.0
        self.claims: dict[str, Claim] = {}  # the claims that this worker got and has not given up
        self.given_up: set[int] = set()  # the tokens of claims that may still stand
        self.tokens: dict[str, int] = {}  # the newest token of each value that this worker has seen
        self.connected: set[Worker] = set()
        self.since = 0  # the revision at which this worker has joined
        self._rate, self._offset = rate, world.random.uniform(0.0, 1e6)
        self._settles = False

    def __repr__(self) -> str:
        return self.life

    def clock(self) -> float:
        return self._offset + self.world.now * self._rate

    def stands_for(self) -> float:
        return self.world.now - self.stands_since if self.stands_since else 0.0

    def start(self, act: Callable[[], None]) -> None:
        """Run an act once this process runs, unless it has died."""
        if self.is_stopped:
            self.postponed.append(partial(self.start, act))
        elif self.is_alive:
            fibers.start(act, self)

    def go_on(self) -> None:
        """Do the acts that were postponed while this process was stopped."""
        self.is_stopped = False
        postponed, self.postponed = self.postponed, []
        for each in postponed:
            self.world.after(0.0, each)

    # Joining, as `join.py` does

    def join(self) -> None:
        world = self.world
        while True:
            since = {key: len(lives) - 1 for key, lives in world.server.holders.items()}
            self.group = world.kinds.group(Link(world, self), TTL, clock=self.clock)
            self.group.registry = world.kinds.registry(self.group.directory, self.clock)
            self.group._stopped = Stopped(self)
            try:
                self.me = self.group.join(self.me, self.probe)
                break
            except (DirectoryLost, LeaseLost) as error:
                world.note(f"{self} tries again to join: {error!r}")
                self.group.leave()
                if world.is_calm and world.random.random() < 0.2:
                    self.die()
                self.pause(world.random.uniform(0.0, 1.0))
            except LifeOver as error:
                world.note(f"{self} may have joined: {error}")
                world.count("LifeOver")
                self.group.leave()
                self.die()
                return
            except WorkerTaken as error:
                world.note(f"{self} is refused: {error}")
                world.count("refused")
                world.check_refusal(self, since)
                self.group.leave()
                self.die()
                return
        self._begin()

    def _begin(self) -> None:
        world, group = self.world, self.group
        self.has_joined, self.since = True, group._epoch
        world.note(f"{self} has joined as {self.me}, epoch {group._epoch}")
        world.count("joined")
        world.check_epoch(self)
        self.post = Post(self)
        self.membership = Membership(self.post, self.me, group, lambda: None)
        self.membership.begin()
        group.on_claim = partial(world.check_known, self)
        group._on_change = partial(self._hear, group._on_change)
        world.after(0.0, self.renew)
        world.after(0.0, self.watch)
        world.after(world.random.uniform(0.0, 4.0), self.use)

    def _hear(self, tell: Callable[[Change], None], change: Change) -> None:
        self.world.note(f"{self} hears: {change}")
        if isinstance(change, Ended):
            self.world.check_decided(self, change)
        tell(change)

    def pause(self, seconds: float) -> None:
        self.world.after(seconds, self.world.resume, fibers.check(), self)
        fibers.suspend()

    def probe(self, member: Member) -> bool | None:
        """Find out if a worker is alive; this is slow, and wrong in some worlds."""
        self.pause(self.world.random.choice((0.0, 0.0, 0.5, 2.0)))
        return self.world.probe(self, member)

    # Steps

    def _again(self, step: Callable[[], float], again: Callable[[], None]) -> None:
        if self.group.over or self.has_left:
            return

        def act() -> None:
            wait = step()
            self.world.check()
            self.world.after(wait / self._rate, again)

        self.start(act)

    def renew(self) -> None:
        self._again(self.group.renew_if_due, self.renew)

    def watch(self) -> None:
        self._again(self.group.watch_once, self.watch)

    def settle(self) -> None:
        """Check the workers that are suspected, as long as there are some."""

        def act() -> None:
            pause = self.membership._check_suspects()
            self._settles = pause is not None
            if pause is not None:
                self.world.after(pause, self.settle)

        self._settles = True
        self.start(act)

    def hear_of_end(self, other: Worker) -> None:
        """Handle the end of a connection to another worker."""
        self.connected.discard(other)
        if not self.is_alive or self.has_left or self.membership._closed:
            return
        reason = ShutDown("it left") if other.has_left else PeerLost("the connection broke")
        for heard in self.post.lost:
            heard(other.me.identity, reason)
        if not self._settles:
            self.settle()

    def use(self) -> None:
        """Claim, release, refresh or leave."""
        if self.is_alive and not self.has_left and not self.world.is_calm:
            acts = [*4 * [self.claim], self.release, self.refresh]
            if self.world.random.random() < 0.1 or self.group.over:
                acts = [self.leave]
            self.start(self.world.random.choice(acts))
            self.world.after(self.world.random.uniform(0.0, 4.0), self.use)

    def claim(self) -> None:
        name = self.world.random.choice(VALUES)
        with contextlib.suppress(DirectoryLost, LeaseLost):
            claim = self.group.claim(name)
            if claim.token in self.given_up:
                self.group.registry.release(name, claim)
            elif claim.life == self.life and self.group.owns(name, claim):
                self.world.note(f"{self} owns {name}, token {claim.token}")
                self.world.count("claimed")
                self.world.check_token(self, name, claim.token)
                self.claims[name] = claim
                self.world.check()

    def release(self) -> None:
        if self.claims:
            name, claim = self.claims.popitem()
            self.given_up.add(claim.token)
            self.world.count("released")
            while not self.group.over:
                with contextlib.suppress(DirectoryLost):
                    self.group.registry.release(name, claim)
                    return
                self.pause(self.world.random.uniform(0.0, 3.0))

    def refresh(self) -> None:
        with contextlib.suppress(DirectoryLost):
            self.group.refresh()

    def leave(self) -> None:
        self.world.note(f"{self} leaves")
        self.world.count("left")
        self.has_left = True
        self.membership.close()
        self.group.leave()
        self.die()

    def die(self) -> None:
        self.is_alive, self.died_at = False, self.world.now
        for other in self.world.workers:
            if self in other.connected:
                self.world.after(self.world.delay(), other.hear_of_end, self)

    def find(self, to: str | int) -> Worker | None:
        """Return the worker that has a name or a rank, as far as this one knows."""
        found = next((each for each in self.group.members() if to in (each.name, each.id)), None)
        return self.world.lives[found.incarnation] if found is not None else None
