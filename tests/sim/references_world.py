"""A cluster of reference machines under a seeded scheduler: see test_references.py."""

import random
from collections import Counter
from math import inf
from typing import Any

from telegrad._core.references import Batch, Id, ReliableDelivery
from telegrad._core.references.reference_protocol import ControlMessage, References

ABSENT, PRESENT, FREED = "absent", "present", "freed"
HOPELESS = "hopeless"  # an error took the place of the value


def name_of(key: str) -> str:
    """Return the name of a worker without the number of its life."""
    return key.partition("#")[0]


class Worker:
    """A machine, its post, and the handles that its program holds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.machine = References(name)
        self.delivery: ReliableDelivery[ControlMessage] = ReliableDelivery()
        self.handles: list[Id] = []  # references, once for each handle
        self.fetching: list[Id] = []  # references whose values the worker waits for, with a handle each
        self.asked: list[tuple[Id, str]] = []  # (ref, user): fetches that wait here for a value


class World:
    """Workers, the messages between them, and the faults of both."""

    def __init__(
        self, seed: int, faults: bool, crashes: bool, mistakes: bool, size: int | None, returns: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.returns = returns  # a worker that has died comes back under its name
        size = size or self.random.choice([3, 3, 3, 4, 4, 5, 7, 10, 50])
        self.workers = {f"w{n}#1": Worker(f"w{n}#1") for n in range(size)}
        self.lives = {name_of(key): [key] for key in self.workers}  # by name, the keys of all, in order
        self.crashes = self.random.randint(1, max(1, size // 3)) if crashes else 0
        self.mistakes = mistakes  # living workers are declared dead
        self.dead: set[str] = set()
        self.messages: list[Any] = []  # (sender, to, kind, ref, fork, owner): the program's own
        self.batches: list[tuple[str, str, Batch]] = []  # (sender, to, batch)
        self.news: list[
            tuple[str, str, str]
        ] = []  # (event, about whom, for whom): broken connections and deaths that were not noticed yet
        self.broken: set[tuple[str, str]] = set()  # pairs whose connection broke: messages on their way may be refused
        self.doubtful: set[Id] = set()  # references that a worker gave up by mistake
        self.mistakes_made: set[tuple[str, str]] = set()  # (by whom, about whom)
        self.values: dict[Id, str] = {}  # at the owner
        self.owners: dict[Id, str] = {}
        self.now = 0.0
        self.sent: Counter[str] = Counter()
        self.passes = 0

    # The program

    def own(self, worker: Worker) -> None:
        ref = worker.machine.own()
        self.values[ref], self.owners[ref] = PRESENT, worker.name
        worker.handles.append(ref)

    def create(self, worker: Worker) -> None:
        owner = self.other(worker)
        ref, fork = worker.machine.create(owner)
        self.values[ref], self.owners[ref] = ABSENT, owner
        worker.handles.append(ref)
        self.send(worker.name, owner, "create", ref, fork, owner)

    def share(self, worker: Worker) -> None:
        ref = self.random.choice(worker.handles)
        if worker.machine.fault(ref):
            return
        to = self.random.choice([*self.alive(), worker.name])
        fork = worker.machine.fork(ref, to)
        self.passes += 1
        self.send(worker.name, to, "pass", ref, fork, self.owners[ref])
        if self.random.random() < 0.5:
            self.drop(worker, ref)  # at once, while the message is on its way

    def fetch(self, worker: Worker) -> None:
        """Ask the owner for a value, and hold the handle until the answer comes."""
        ref = self.random.choice(worker.handles)
        owner = self.owners[ref]
        if worker.machine.fault(ref) or owner == worker.name:
            return
        worker.handles.remove(ref)
        worker.fetching.append(ref)
        self.send(worker.name, owner, "fetch", ref, None, owner)

    def drop(self, worker: Worker, ref: Id | None = None) -> None:
        if ref is None:
            ref = self.random.choice(worker.handles)
        worker.handles.remove(ref)
        worker.machine.drop(ref)

    def send(self, sender: str, to: str, *message: str | Id | None) -> None:
        if to in self.dead:
            self.hear(("death", to, sender))
        self.messages.append((sender, to, *message))

    # The network

    def deliver(self, place: int) -> None:
        sender, to, what, ref, fork, owner = self.messages.pop(place)
        worker = self.reached(to)
        if worker is None:
            if what == "fetch":
                self.fetched(self.workers[sender], ref)
            return
        assert worker.name == to, f"what was for {to} came to {worker.name}"
        self.heard_from(worker, sender)
        machine = worker.machine
        if what == "create":
            if machine.expect(ref, fork, sender):
                assert self.values[ref] in (ABSENT, PRESENT), (ref, self.values[ref])
                self.values[ref] = PRESENT
                if sender in self.dead:
                    self.hear(("death", sender, to))
            self.messages.append((to, sender, "answer", ref, fork, owner))
        elif what == "answer":
            machine.created(ref, fork, sender)
        elif what == "fetch":
            if machine.seek(ref):
                assert self.values[ref] != FREED or self.may_be_lost(ref, sender, to), f"{ref} was fetched freed"
                worker.asked.append((ref, sender))
            else:
                assert self.values[ref] == HOPELESS or self.may_be_lost(ref, sender, to), f"{ref} is refused"
                self.send(to, sender, "value", ref, None, owner)
        elif what == "value":
            self.fetched(worker, ref)
        else:
            if not machine.arrive(ref, fork, owner, sender):
                worker.handles.append(ref)
                if self.random.random() < 0.3:
                    self.drop(worker, ref)

    def may_be_lost(self, ref: Id, sender: str, to: str) -> bool:
        return bool(self.dead) or (sender, to) in self.broken or self.is_doubtful(ref)

    def is_doubtful(self, ref: Id) -> bool:
        """Return True if `ref` was given up by mistake, or its creator declared dead: it may be lost, not leak."""
        return ref in self.doubtful or (self.owners[ref], ref[0]) in self.mistakes_made

    def fetched(self, worker: Worker, ref: Id) -> None:
        if ref in worker.fetching:
            worker.fetching.remove(ref)
            worker.handles.append(ref)

    def answer_fetches(self, worker: Worker) -> None:
        """Send values that have come, or never will, to the workers that asked for them."""
        for ref, user in list(worker.asked):
            if self.values[ref] != ABSENT:
                worker.asked.remove((ref, user))
                self.send(worker.name, user, "value", ref, None, worker.name)

    def deliver_batch(self, place: int) -> None:
        sender, to, batch = self.batches[place]
        if not self.faults or self.random.random() > 0.1:
            self.batches.pop(place)  # otherwise doubled
        worker = self.reached(to)
        if worker is None:
            return
        assert worker.name == to, f"a message to {to} came to {worker.name}"
        self.heard_from(worker, sender)
        for message in worker.delivery.receive(sender, batch, self.now):
            worker.machine.receive(sender, message)

    def heard_from(self, worker: Worker, sender: str) -> None:
        if worker.machine.alive(sender):
            worker.delivery.hurry(sender, self.now)
            if sender in self.dead:
                self.hear(("death", sender, worker.name))

    def lose_batch(self, place: int) -> None:
        self.batches.pop(place)

    def break_connection(self, a: str, b: str) -> None:
        """Lose some messages between two workers, each of which hears of it later."""
        self.broken |= {(a, b), (b, a)}
        kept = []
        for message in self.messages:
            sender, to, what, *reference = message
            if {sender, to} == {a, b} and self.random.random() < 0.5:
                if what == "create":
                    self.values[reference[0]] = HOPELESS
                if what in ("create", "answer"):
                    creator = to if what == "answer" else sender
                    if creator not in self.dead:
                        self.news.append(("stillborn", reference, creator))
            else:
                kept.append(message)
        self.messages = kept
        for user, owner in ((a, b), (b, a)):  # calls that were on their way fail
            for ref in [ref for ref in self.workers[user].fetching if self.owners[ref] == owner]:
                self.fetched(self.workers[user], ref)
        self.news += [("break", a, b), ("break", b, a)]

    def crash(self, name: str) -> None:
        self.crashes -= 1
        self.dead.add(name)
        for _ in range(len(self.messages)):
            message = self.messages.pop(0)
            if name not in message[:2] or (message[0] == name and self.random.random() < 0.5):
                self.messages.append(message)
        for ref, owner in self.owners.items():
            if owner == name:
                self.values[ref] = FREED
        for worker in self.workers.values():
            for ref in [ref for ref in worker.fetching if self.owners[ref] == name]:
                self.fetched(worker, ref)
        for other in self.alive():
            self.news.append(("death", name, other))

    def reached(self, to: str) -> Worker | None:
        """Return the worker that gets messages for a life: no later life of the same name."""
        return None if to in self.dead else self.workers[to]

    def come_back(self, key: str) -> None:
        """Let a worker that has died start anew, without any memory."""
        lives = self.lives[name_of(key)]
        anew = self.new_key(lives)
        lives.append(anew)
        self.workers[anew] = Worker(anew)

    def new_key(self, lives: list[str]) -> str:
        return f"{name_of(lives[0])}#{len(lives) + 1}"

    def send_letters(self, worker: Worker, to: str, batch: Batch) -> None:
        """Send as `ReferenceTable._send` does: a sender that finds another life under the name knows of the death."""
        if to in self.dead and self.lives[name_of(to)][-1] != to and self.random.random() < 0.5:
            self.drop_worker(worker, to)
            worker.delivery.drop_worker(to)
        else:
            self.batches.append((worker.name, to, batch))

    def mistake(self, worker: Worker, about: str) -> None:
        """Let a worker declare a living one dead."""
        self.broken |= {(worker.name, about), (about, worker.name)}
        self.mistakes_made.add((worker.name, about))
        machine = worker.machine
        self.doubtful |= {ref for ref, owned in machine.owned.items() if about in owned.forks.values()}
        for ref, share in machine.shares.items():
            if about in (share.owner, *(share.children or {}).values()):
                self.doubtful.add(ref)
        self.drop_worker(worker, about)

    def drop_worker(self, worker: Worker, about: str) -> None:
        worker.machine.dead(about)
        worker.delivery.forget(about, self.now)

    def mistaken(self) -> bool:
        """Return True if a living worker is still declared dead by another."""
        living = set(self.alive())
        return any(self.workers[name].machine._dead.keys() & living for name in living)

    def hear(self, news: tuple[str, str, str]) -> None:
        if news not in self.news:
            self.news.append(news)

    def notice(self, place: int) -> None:
        event, about, who = self.news.pop(place)
        if who in self.dead:
            return
        worker = self.workers[who]
        if event == "stillborn":
            worker.machine.stillborn(*about)
        elif about in self.dead:
            self.drop_worker(worker, about)
        else:
            worker.machine.ask(about)
            worker.delivery.hurry(about, self.now)

    # The scheduler

    def alive(self) -> list[str]:
        return [name for name in self.workers if name not in self.dead]

    def gone(self) -> list[str]:
        """Return the workers that have died and are not back."""
        return [lives[-1] for lives in self.lives.values() if lives[-1] in self.dead]

    def other(self, worker: Worker) -> str:
        return self.random.choice([name for name in self.alive() if name != worker.name])

    def post(self) -> None:
        """Collect the messages of the machines."""
        for worker in self.workers.values():
            machine = worker.machine
            if worker.name in self.dead:
                continue
            for to, message in machine.messages:
                self.sent[message.kind] += 1
                assert to != worker.name, f"{worker.name} writes to itself: {message}"
                worker.delivery.post(to, message)
                if to in self.dead:
                    self.hear(("death", to, worker.name))
            machine.messages.clear()
            for ref in machine.hopeless:
                self.values[ref] = HOPELESS
            machine.hopeless.clear()
            for ref in machine.freed:
                if self.owners[ref] == worker.name and self.values[ref] == PRESENT:
                    self.values[ref] = FREED
            machine.freed.clear()
            self.answer_fetches(worker)
            for to, batch in worker.delivery.outgoing(self.now):
                self.send_letters(worker, to, batch)

    def step(self, growing: bool) -> None:
        """Do one random event."""
        chance = self.random.random()
        worker = self.workers[self.random.choice(self.alive())]
        if growing and chance < 0.12:
            self.own(worker)
        elif growing and chance < 0.24 and len(self.alive()) > 1:
            self.create(worker)
        elif growing and chance < 0.45 and worker.handles:
            self.share(worker)
        elif growing and chance < 0.50 and worker.handles:
            self.fetch(worker)
        elif growing and chance < 0.57 and worker.handles:
            self.drop(worker)
        elif growing and self.faults and chance < 0.59 and len(self.alive()) > 1:
            self.break_connection(worker.name, self.other(worker))
        elif growing and self.crashes and chance < 0.60 and len(self.alive()) > 2:
            self.crash(worker.name)
        elif growing and self.returns and chance < 0.61 and (gone := self.gone()):
            self.come_back(self.random.choice(gone))
        elif growing and self.mistakes and chance < 0.62 and len(self.alive()) > 1:
            self.mistake(worker, self.other(worker))
        elif growing and self.faults and chance < 0.65 and self.batches:
            self.lose_batch(self.random.randrange(len(self.batches)))
        else:
            self.advance()
        self.post()
        self.check()

    def advance(self) -> None:
        """Deliver something that is on its way; if nothing is, let time pass."""
        queues = [
            (queue, act)
            for queue, act in (
                (self.messages, self.deliver),
                (self.batches, self.deliver_batch),
                (self.news, self.notice),
            )
            if queue
        ]
        if queues:
            queue, act = self.random.choice(queues)
            act(self.random.randrange(len(queue)))
        else:
            due = min(self.workers[name].delivery.next() for name in self.alive())
            self.now = max(self.now, due if due < inf else 0.0) + 1e-3

    def unsettled(self) -> bool | list[Any]:
        return (
            self.messages
            or self.batches
            or self.news
            or any(self.workers[name].delivery.unsettled for name in self.alive())
            or self.mistaken()
        )

    def settle(self) -> None:
        """Let everything arrive."""
        self.faults = False
        self.post()
        for _ in range(200_000):
            if not self.unsettled():
                return
            self.step(growing=False)
        raise AssertionError("it never comes to rest")

    # Checks

    def check(self) -> None:
        """Check that no value is deleted while a fork lives or is on its way."""
        if self.dead:
            return  # the children of a dead middleman learn of it a little later: see `check_rest`
        for worker in self.workers.values():
            for ref in [*worker.handles, *worker.fetching]:
                if not self.is_doubtful(ref):
                    assert self.values[ref] != FREED or worker.machine.fault(ref), f"{worker.name} holds {ref}, freed"
        for sender, to, what, ref, *_ in self.messages:
            if what == "pass" and not self.may_be_lost(ref, sender, to):
                assert self.values[ref] != FREED, f"{ref} is freed, and on its way to {to}"

    def check_rest(self) -> None:
        """Check, once all is quiet, that each holder of a usable reference finds its value."""
        for name in self.alive():
            worker = self.workers[name]
            holders = [holder for owned in worker.machine.owned.values() for holder in owned.forks.values()]
            assert worker.machine.holders.counts == Counter(holders)
            assert not worker.fetching, f"{name} waits for {worker.fetching} in vain"
            for ref in worker.handles:
                if self.owners[ref] != name and not worker.machine.fault(ref):
                    assert self.values[ref] in (PRESENT, HOPELESS), f"{name} holds {ref}: {self.values[ref]}"
                    assert worker.machine.shares[ref].confirmed

    def drop_all(self) -> None:
        for name in self.alive():
            for _ in range(len(self.workers[name].handles)):
                self.drop(self.workers[name])

    def check_empty(self) -> None:
        """Check that nothing is left anywhere once all handles are gone."""
        for name in self.alive():
            machine = self.workers[name].machine
            assert not machine.shares, f"{name} still has shares: {machine.shares}"
            assert not machine.owned, f"{name} still owns: {machine.owned}"


def run(
    seed: int,
    faults: bool = True,
    crashes: bool = True,
    mistakes: bool = True,
    events: int = 120,
    size: int | None = None,
    returns: bool = False,
    make: type[World] = World,
) -> World:
    """Run one schedule, from an empty cluster to an empty one."""
    world = make(seed, faults, crashes, mistakes, size, returns)
    for _ in range(events):
        world.step(growing=True)
    world.settle()
    world.check_rest()
    world.drop_all()
    world.settle()
    world.check_empty()
    return world
