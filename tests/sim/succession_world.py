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

    def __init__(self, seat: Seat, open_at: float, at_home: bool) -> None:
        self.seat = seat
        self.at_home = at_home  # at the place that all were told; one at a time
        self.open_at = open_at  # for newcomers
        self.listed: dict[str, int] = {}  # ranks by incarnation
        self.gone: dict[str, str] = {}
        self.back: set[str] = set()
        self.moved: Seat | None = None
        self.lives = True


class Node:
    """One member."""

    def __init__(self, name: str, rank: int, store: Store, here: bool) -> None:
        self.name = name
        self.rank = rank
        self.here = here  # on the host of that place
        self.store = store
        self.machine = Succession(name, name, store.seat)
        self.present: dict[str, int] = {name: rank}
        self.ever: set[str] = {name}
        self.met: set[str] = set()
        self.gone: dict[str, str] = {}
        self.own: list[Store] = []  # those that it has served; the last is the one that it serves, if it does
        self.strangers: dict[str, int] = {}
        self.reminded = self.missed_at = 0.0

    def knows(self, name: str) -> bool:
        return name in self.present or name in self.strangers


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.count = 0
        self.hosts = self.random.choice((1, 1, 2))
        self.nodes: dict[str, Node] = {}
        self.ended: dict[str, str] = {}  # how those went who are no more
        self.stores: dict[Seat, Store] = {}
        self.lines: dict[tuple[str, str], list[Word]] = {}
        self.silent: set[str] = set()  # nobody reaches them, nor they anybody
        self.at_home: set[str] = set()  # who is, or was, on the host of the place that all were told
        self.faults = self.random.randint(1, 6)
        self.joins = self.random.randint(0, 4)
        self.calm = False
        kept_outside = self.random.random() < 0.2  # by somebody who is no member
        seat = Seat(1, -1, "", "h", 1) if kept_outside else Seat(1, 0, "n0", "h", 1)
        first = self.stores[seat] = Store(seat, 0.0, at_home=True)
        for _ in range(self.random.randint(1, 6)):
            self.come(first)
        if not kept_outside:
            self.nodes["n0"].own.append(first)
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
        node = Node(f"n{self.count}", rank, store, here=self.random.random() < 1 / self.hosts or not self.count)
        self.count += 1
        if node.here:
            self.at_home.add(node.name)
        store.listed[node.name] = rank
        store.back.add(node.name)
        self.nodes[node.name] = node
        self.look(node)

    def newcomer(self, _: None) -> None:
        store = self.home()
        while store is not None and store.moved is not None and self.reached(store):
            store = self.stores[store.moved]
        if store is not None and store.lives and self.is_open(store) and self.reached(store):
            self.joins -= 1
            self.come(store)

    def home(self) -> Store | None:
        """Who comes looks there; who is silent has the port nevertheless."""
        return next((store for store in self.stores.values() if store.at_home and store.lives), None)

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
        order = sorted(node.present, key=lambda name: (name not in self.at_home, node.present[name], name))
        self.do(node, node.machine.step(self.now, order))
        if not node.machine.orphaned and self.home() is None and self.is_to_move(node, order):
            self.look(node)
            self.do(node, node.machine.move())
        if node.machine.serves and node.own and self.now >= node.reminded:
            node.reminded = self.now + REMIND
            for other in node.present:
                if other not in node.own[-1].back:
                    self.tell(node, other, node.machine.store)
            self.look_at_home(node)

    def is_to_move(self, node: Node, order: list[str]) -> bool:
        server = node.machine.store.incarnation
        served_here = server in node.present and server in self.at_home
        return node.here and (server == node.name if served_here else order[0] == node.name)

    def look_at_home(self, node: Node) -> None:
        home = self.home()
        if home is None or not self.reaches(node, home) or home.seat == node.machine.store:
            return
        seat = home.moved or home.seat
        if seat.beats(node.machine.store):
            self.do(node, node.machine.receive("", seat))
        else:
            home.moved = node.machine.store

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
        if node.machine.orphaned:
            for own in node.own:
                own.lives = False
        at_home = node.here and self.home() is None
        seat = Seat(term, node.rank, node.name, "h", 1 if at_home else self.random.randrange(2, 1000))
        for own in node.own:
            own.moved = seat
        store = self.stores[seat] = Store(seat, self.now + SETTLE, at_home)
        store.listed = dict(node.present)
        store.gone = {name: how for name, how in node.gone.items() if how == LOST}
        store.back = {node.name}
        node.store = store
        node.own.append(store)
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
        for own in node.own:
            own.moved = seat
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
        self.settle()
        servers = {node.store.seat.incarnation for node in self.nodes.values()} & self.nodes.keys()
        if not self.silent and len(servers) == 1 and len(self.nodes) > 1 and self.random.random() < 0.5:
            self.silent = servers
            self.settle()
            for name in sorted(servers):
                self.end(self.nodes[name], LOST)
            self.settle()

    def settle(self) -> None:
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
        home = self.home()
        if home is None and any(node.here for node in nodes):
            return f"who comes finds nobody: the store is {store.seat}"
        if home is not None and self.reached(home) and (home.moved or home.seat) != store.seat:
            return f"who comes finds {home.moved or home.seat}: the store is {store.seat}"
        return None
