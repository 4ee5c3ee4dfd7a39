"""A dynamic group whose servers die, leave or are out of reach: the machine of each member, its view, and the stores.

What `telegrad/group/takeover.py` and `membership.py` do around them is done here in a few lines, without threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from telegrad.group import succession
from telegrad.group.directory import LEFT, LOST
from telegrad.group.succession import Act, Look, Orphaned, Seat, Serve, Succession, Tell, Use, Word

TICK = 0.1
SETTLE = 0.5
REMIND = 1.0
MISSED = 2.0


class Store:
    """What one keeps."""

    def __init__(self, seat: Seat, open_at: float) -> None:
        self.seat = seat
        self.open_at = open_at  # for newcomers
        self.listed: dict[str, int] = {}  # ranks by incarnation
        self.gone: dict[str, str] = {}
        self.back: set[str] = set()
        self.moved: Seat | None = None
        self.lives = True


class Node:
    """One member."""

    def __init__(self, name: str, rank: int, store: Store) -> None:
        self.name = name
        self.rank = rank
        self.store = store
        self.machine = Succession(name, name, store.seat)
        self.present: dict[str, int] = {name: rank}
        self.ever: set[str] = {name}
        self.met: set[str] = set()
        self.gone: dict[str, str] = {}
        self.own: Store | None = None  # the one that it serves
        self.strangers: dict[str, int] = {}
        self.reminded = self.missed_at = 0.0

    def knows(self, name: str) -> bool:
        return name in self.present or name in self.strangers


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.count = 0
        self.nodes: dict[str, Node] = {}
        self.ended: dict[str, str] = {}  # how those went who are no more
        self.stores: dict[Seat, Store] = {}
        self.lines: dict[tuple[str, str], list[Word]] = {}
        self.silent: set[str] = set()  # nobody reaches them, nor they anybody
        self.faults = self.random.randint(1, 6)
        self.joins = self.random.randint(0, 4)
        self.calm = False
        kept_outside = self.random.random() < 0.2  # by somebody who is no member
        seat = Seat(1, -1, "", "h", 1) if kept_outside else Seat(1, 0, "n0", "h", 1)
        first = self.first = self.stores[seat] = Store(seat, 0.0)
        for _ in range(self.random.randint(1, 6)):
            self.come(first)
        if not kept_outside:
            self.nodes["n0"].own = first
        for node in self.nodes.values():
            if self.random.random() < 0.8:
                self.look(node)  # else it has not seen yet who came after it

    # What may happen

    def choices(self) -> Iterator[tuple[Callable[..., None], Any]]:
        yield self.wait, TICK
        for line, words in sorted(self.lines.items()):
            if words and not self.silent & set(line):
                yield self.deliver, line
        for node in self.nodes.values():
            yield self.look, node
            yield self.step, node
            for other in sorted(node.present):
                if other in self.ended and self.random.random() < 0.3:
                    yield self.hear_of_end, (node, other)
        if not self.calm:
            yield from self.troubles()

    def troubles(self) -> Iterator[tuple[Callable[..., None], Any]]:
        if self.joins:
            yield self.newcomer, None
        yield from ((self.heal, name) for name in sorted(self.silent))
        if not self.faults:
            return
        for node in self.nodes.values():
            if len(self.nodes) > 1:
                yield self.kill, node
                yield self.leave, node
            if not self.silent:
                yield self.silence, node.name
        outside = [store for store in self.stores.values() if store.seat.id < 0 and store.lives]
        yield from ((self.end_store, store) for store in outside)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def come(self, store: Store) -> None:
        taken = set(store.listed.values())
        rank = next(rank for rank in range(100) if rank not in taken)
        node = Node(f"n{self.count}", rank, store)
        self.count += 1
        store.listed[node.name] = rank
        store.back.add(node.name)
        self.nodes[node.name] = node
        self.look(node)

    def newcomer(self, _: None) -> None:
        open_ = [s for s in self.stores.values() if s.lives and self.is_open(s) and s.moved is None and self.reached(s)]
        if open_:
            self.joins -= 1
            self.come(self.random.choice(open_))

    def is_open(self, store: Store) -> bool:
        return self.now >= store.open_at or all(name in store.back or name in self.ended for name in store.listed)

    def reached(self, store: Store) -> bool:
        return store.seat.incarnation not in self.silent

    def kill(self, node: Node) -> None:
        self.faults -= 1
        self.end(node, LOST)

    def leave(self, node: Node) -> None:
        self.faults -= 1
        if self.reaches(node, node.store):
            node.store.listed.pop(node.name, None)
            node.store.gone[node.name] = LEFT
        self.end(node, LEFT)

    def end(self, node: Node, how: str) -> None:
        del self.nodes[node.name]
        self.ended[node.name] = how
        self.silent.discard(node.name)
        for store in self.stores.values():
            if store.seat.incarnation == node.name:
                store.lives = False
        for line in self.lines:
            if node.name == line[1]:
                self.lines[line] = []

    def end_store(self, store: Store) -> None:
        self.faults -= 1
        store.lives = False

    def silence(self, name: str) -> None:
        self.faults -= 1
        self.silent.add(name)

    def heal(self, name: str) -> None:
        self.silent.discard(name)

    def reaches(self, node: Node, store: Store) -> bool:
        own = store.seat.incarnation == node.name
        return store.lives and (own or not self.silent & {node.name, store.seat.incarnation})

    def hear_of_end(self, what: tuple[Node, str]) -> None:
        """It has knocked at one who is no more."""
        node, other = what
        if node.name in self.silent:
            return
        if self.reaches(node, node.store):
            node.store.listed.pop(other, None)
            node.store.gone.setdefault(other, LOST)
        self.take_out(node, other, self.ended[other])

    def take_out(self, node: Node, other: str, how: str) -> None:
        assert other not in self.nodes, f"{node.name} sees {other} go, which lives"
        node.present.pop(other, None)
        node.gone[other] = how

    # The rim

    def deliver(self, line: tuple[str, str]) -> None:
        word = self.lines[line].pop(0)
        sender, to = line
        node = self.nodes.get(to)
        if node is not None:
            if isinstance(word, Orphaned) and sender in self.nodes:
                node.strangers[sender] = self.nodes[sender].rank
            self.do(node, node.machine.receive(sender, word))
            if isinstance(word, Seat) and node.machine.store.beats(word) and not node.knows(word.incarnation):
                store = self.stores[word]
                if self.reaches(node, store):
                    store.moved = node.machine.store

    def step(self, node: Node) -> None:
        by_rank = sorted(node.present, key=lambda name: (node.present[name], name))
        self.do(node, node.machine.step(self.now, by_rank))
        if node.machine.serves and node.own is not None and self.now >= node.reminded:
            node.reminded = self.now + REMIND
            for other in node.present:
                if other not in node.own.back:
                    self.tell(node, other, node.machine.store)
            if self.reaches(node, self.first) and node.machine.store.beats(self.first.seat):
                self.first.moved = node.machine.store  # it has looked at the place that all were told

    def look(self, node: Node) -> None:
        store = node.store
        if node.machine.orphaned:
            return
        if not self.reaches(node, store):
            node.machine.lost(bool(self.silent) and self.random.random() < 0.5)
            return
        seen = succession.compared(node.present, store.listed, node.met, node.gone)
        for name in seen.gone + [name for name in seen.missing if name in store.gone]:
            self.take_out(node, name, store.gone.get(name, LEFT))
        for name in seen.new:
            assert name not in node.ever, f"{node.name} sees {name} come again"
            node.present[name] = store.listed[name]
            node.ever.add(name)
        for name in seen.ghosts:
            store.listed.pop(name)
            store.gone[name] = node.gone[name]
        node.met = set(store.listed)
        if self.now >= node.missed_at:
            node.missed_at = self.now + MISSED
            for name in seen.missing:
                self.tell(node, name, node.machine.store)
        if store.moved is not None:
            self.do(node, node.machine.receive("", store.moved))

    def do(self, node: Node, acts: list[Act]) -> None:
        for act in acts:
            if isinstance(act, Tell):
                self.tell(node, act.to, act.word)
            elif isinstance(act, Serve):
                self.serve(node, act.term)
            elif isinstance(act, Use):
                self.use(node, act.store)
            else:
                assert isinstance(act, Look)
                self.be_asked(node)

    def be_asked(self, node: Node) -> None:
        if node.machine.orphaned:
            return
        if self.reaches(node, node.store):
            self.do(node, node.machine.answers())
        else:
            node.machine.lost()

    def tell(self, node: Node, to: str, word: Word) -> None:
        if node.knows(to) and to in self.nodes and not (self.silent & {node.name, to} and self.random.random() < 0.5):
            self.lines.setdefault((node.name, to), []).append(word)

    def serve(self, node: Node, term: int) -> None:
        if node.own is not None:
            node.own.lives = False
        seat = Seat(term, node.rank, node.name, "h", self.random.randrange(1000))
        store = self.stores[seat] = Store(seat, self.now + SETTLE)
        store.listed = dict(node.present)
        store.gone = {name: how for name, how in node.gone.items() if how == LOST}
        store.back = {node.name}
        node.store = node.own = store
        node.met = set()
        self.do(node, node.machine.served(seat, [name for name in node.present if name != node.name]))

    def use(self, node: Node, seat: Seat) -> None:
        store = self.stores[seat]
        if not self.reaches(node, store):
            node.machine.lost()
            return
        assert node.name not in store.gone, f"{node.name} was taken for dead"
        store.listed.setdefault(node.name, node.rank)
        store.back.add(node.name)
        for name, how in node.gone.items():
            if how == LOST:
                store.gone[name] = LOST
        if node.own is not None:
            node.own.moved = seat
        if node.store is not store:
            node.met = set()
        node.store = store

    # To the end

    def run(self) -> None:
        for _ in range(self.random.randint(20, 200)):
            action, subject = self.random.choice(list(self.choices()))
            action(subject)
        self.calm = True
        if self.random.random() < 0.7:  # else they are silent for good
            self.silent.clear()
        for _ in range(400):
            if self.wrong() is None:
                return
            for _ in range(10):
                action, subject = self.random.choice(list(self.choices()))
                action(subject)
            for node in list(self.nodes.values()):
                self.look(node)
                self.step(node)
                for other in [other for other in node.present if other in self.ended]:
                    self.hear_of_end((node, other))
            self.now += TICK
        raise AssertionError(self.wrong())

    def wrong(self) -> str | None:
        """What is not as it must be in the end."""
        nodes = [node for node in self.nodes.values() if node.name not in self.silent]
        if not nodes:
            return None
        stores = {node.store.seat for node in nodes}
        if len(stores) > 1:
            return f"several stores are used: {stores}"
        (store,) = (self.stores[seat] for seat in stores)
        if not store.lives or store.moved is not None:
            return f"the store is none: {store.seat}"
        everybody = {node.name for node in nodes}
        if set(store.listed) - self.silent != everybody or not self.reaches(nodes[0], store):
            return f"listed are {sorted(store.listed)}, there are {sorted(everybody)}"
        for node in nodes:
            if set(node.present) - self.silent != everybody or node.machine.orphaned:
                return f"{node.name} sees {sorted(node.present)}, there are {sorted(everybody)}; {node.machine}"
        return None
