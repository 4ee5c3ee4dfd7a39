"""A feed of versions under a seeded scheduler: hosts, slow readers, late ones, deaths, and connections that break.

    W1  whole       a version that a reader takes has only pieces of its own number, even if the reader got only the
                    changes since another version
    W2  forward     the numbers that a reader takes grow
    W3  every       a reader of every version misses none, as long as it is no more than `KEEP` behind
    W4  free        the publisher never waits, and keeps no more than it must
    W5  arrival     once all is quiet, each living reader can have the newest version
    W6  end         then no party keeps any other version
    W7  moment      no reader has to look for that, if both ends of each connection heard of its end
    W8  own         the changes that a user makes in a version that it has taken are never passed on

A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest tests/sim/test_weights.py` replays it alone.
"""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from telegrad.weights.protocols import PATIENCE, PublisherProtocol, SubscriberProtocol
from telegrad.weights.transfer import (
    Closed,
    EndpointAddress,
    JoinAgain,
    Unsubscribe,
    VersionInfo,
    VersionOpened,
    WeightPiece,
)
from tests.seeds import by_day_and_night, run_each

KEEP = 3
WRITTEN = -1  # in place of the number of a version: its user has written there
PUBLISHER = EndpointAddress("learner", "learner", 0)

Content = dict[int, int]  # for each piece, the number of the version that its bytes belong to


class Reader:
    """A subscriber with its user, and the bytes that it has."""

    def __init__(self, party: EndpointAddress, host: str, every: bool) -> None:
        self.party = party
        self.host = host
        self.every = every
        self.machine = SubscriberProtocol(PUBLISHER)
        self.memory: dict[int, Content] = {}
        self.lent: set[int] = set()  # versions whose bytes its user has, and changes
        self.taken = 0


class World:
    """A publisher and its readers; messages are in order per pair of workers, until a connection breaks."""

    def __init__(self, seed: int, faults: bool) -> None:
        self.random = chance = random.Random(seed)
        self.feed = PublisherProtocol(PUBLISHER, "host0", KEEP)
        self.memory: dict[int, Content] = {}
        self.readers: dict[EndpointAddress, Reader] = {}
        self.lines: dict[tuple[str, str], list[tuple[EndpointAddress, EndpointAddress, Any, Content | None]]] = {}
        self.losses: list[tuple[str, str]] = []  # (for whom, the other end of the connection that has ended)
        self.joins: list[EndpointAddress] = []  # readers that will ask to be admitted
        self.hosts = chance.randint(1, 4)
        self.to_come = chance.randint(1, 6)
        self.versions = chance.randint(1, 6)
        self.faults = chance.randint(1, 5) if faults else 0
        self.layout = 1
        self.one_sided = False  # a party was not told of an end, and may keep an unwanted version until the next one
        self.log: list[str] = []

    # Events

    def choices(self) -> Iterator[tuple[Any, ...]]:
        if self.to_come:
            yield (self.come,)
        if self.versions:
            yield (self.publish,)
        for line, waiting in self.lines.items():
            if waiting:
                yield self.deliver, line
        yield from ((self.hear, loss) for loss in self.losses)
        yield from ((self.join, party) for party in self.joins)
        for reader in self.readers.values():
            yield self.use, reader
        if self.faults and self.readers:
            yield (self.break_connection,)
            yield (self.refuse,)
            yield (self.die,)
            yield (self.leave,)

    def come(self) -> None:
        self.to_come -= 1
        name = f"w{self.to_come}"
        host = f"host{self.random.randrange(self.hosts)}"
        for number in range(1, self.random.choice((2, 2, 3))):
            party = EndpointAddress(name, name, number)
            self.readers[party] = Reader(party, host, every=self.random.random() < 0.4)
            self.joins.append(party)

    def publish(self) -> None:
        self.versions -= 1
        self.layout += self.random.random() < 0.3
        pieces = self.random.randint(0, 9)
        number = self.feed.store.newest + 1
        self.memory[number] = dict.fromkeys(range(pieces), number)
        self.send(PUBLISHER, self.feed.publish(VersionInfo(self.layout, b"layout %d" % self.layout, pieces, 1)))
        assert self.feed.store.is_complete(number), "W4"
        self.check_kept()

    def check_kept(self) -> None:
        assert len(self.feed.store.info) <= KEEP + len(self.feed.taken), f"W4: {list(self.feed.store.info)} are kept"

    def use(self, reader: Reader, waits: bool = False) -> None:
        """Let a reader's user check for a version, or wait for it."""
        machine = reader.machine
        if reader.every:
            least = max(reader.taken + 1, machine.store.oldest)
            number = least if machine.store.is_complete(least) else 0
        else:
            least = reader.taken + 1
            number = machine.store.newest_complete()
            number = number if number >= least else 0
        if not number:
            patient = waits or reader.every or self.random.random() < 0.7
            self.send(reader.party, machine.want(least, reader.every, patient), reader)
            return
        assert set(reader.memory[number].values()) <= {number}, f"W1: {reader.memory[number]} as {number}"
        assert len(reader.memory[number]) == machine.store.info[number].pieces, "W1"
        assert machine.store.info[number].description == b"layout %d" % machine.store.info[number].layout
        assert number > reader.taken, "W2"
        if reader.every and reader.taken and number != reader.taken + 1:
            assert self.feed.store.newest - KEEP >= reader.taken, f"W3: {reader.taken}, then {number}"
        if number in reader.lent:
            reader.memory[number] = dict.fromkeys(reader.memory[number], WRITTEN)
        reader.taken = number
        self.send(reader.party, machine.taken(number, reader.every), reader)

    def break_connection(self) -> None:
        self.faults -= 1
        names = ["learner", *{party.worker for party in self.readers}]
        if len(names) > 1:
            self.cut(*self.random.sample(sorted(names), 2))

    def cut(self, one: str, other: str) -> None:
        """Lose the messages of one direction, or of both; both ends will hear of it."""
        lines = [(one, other), (other, one)]
        for line in lines if self.random.random() < 0.7 else lines[:1]:
            self.lines[line] = []
        self.losses += lines

    def refuse(self) -> None:
        """Lose the messages of one direction before they are sent; only their sender hears of that."""
        self.faults -= 1
        line = self.random.choice([line for line, waiting in self.lines.items() if waiting] or [("learner", "nobody")])
        self.lines[line] = []
        self.losses.append(line)
        self.one_sided = True

    def die(self) -> None:
        self.faults -= 1
        worker = self.random.choice(sorted(self.readers)).worker
        self.log.append(f"{worker} dies")
        for party in [party for party in self.readers if party.worker == worker]:
            del self.readers[party]
        self.joins = [party for party in self.joins if party.worker != worker]
        self.losses = [loss for loss in self.losses if loss[0] != worker]
        for line in self.lines:
            if worker in line:
                self.lines[line] = []
        self.losses += [(other, worker) for other in self.living()]

    def leave(self) -> None:
        self.faults -= 1
        reader = self.readers.pop(self.random.choice(sorted(self.readers)))
        self.joins = [party for party in self.joins if party != reader.party]
        self.log.append(f"{reader.party} leaves")
        self.send(reader.party, reader.machine.leave(), reader)

    def living(self) -> set[str]:
        return {"learner", *(party.worker for party in self.readers)}

    # The transport

    def send(
        self, sender: EndpointAddress, out: list[tuple[EndpointAddress, Any]], reader: Reader | None = None
    ) -> None:
        """Send with the bytes of the messages, as the real transport does, and drop those of unused versions."""
        stock, store = (self.memory, self.feed.store) if reader is None else (reader.memory, reader.machine.store)
        for to, message in out:
            self.log.append(f"{sender.worker}.{sender.number} -> {to.worker}.{to.number}: {message}")
            content = None
            if isinstance(message, VersionOpened) and message.whole:
                content = dict(stock[message.number])
                assert WRITTEN not in content.values(), "W8"
            elif isinstance(message, WeightPiece):
                assert set(stock[message.number]) >= {message.piece}, "W1"
                content = {message.piece: stock[message.number][message.piece]}
                assert WRITTEN not in content.values(), "W8"
                if self.random.random() < 0.5:
                    message = message._replace(base=0)  # the changes are not known here
            if to.worker in self.living():
                self.lines.setdefault((sender.worker, to.worker), []).append((sender, to, message, content))
            elif (sender.worker, to.worker) not in self.losses:
                self.losses.append((sender.worker, to.worker))
        for number in [number for number in stock if number not in store.info]:
            del stock[number]

    def deliver(self, line: tuple[str, str]) -> None:
        sender, to, message, content = self.lines[line].pop(0)
        if to == PUBLISHER:
            self.send(PUBLISHER, self.feed.receive(sender, message))
            self.check_kept()
        elif to in self.readers:
            self.take(self.readers[to], sender, message, content)
        elif not isinstance(message, Unsubscribe | JoinAgain):
            self.lines.setdefault((to.worker, sender.worker), []).append((to, sender, Unsubscribe(), None))

    def take(self, reader: Reader, sender: EndpointAddress, message: Any, content: Content | None) -> None:
        machine = reader.machine
        if isinstance(message, JoinAgain) and sender == PUBLISHER:
            if reader.party not in self.joins:
                self.joins.append(reader.party)
            return
        if isinstance(message, WeightPiece) and machine.expects(message):
            assert content is not None
            base = reader.memory.get(message.base, {0: WRITTEN})
            if message.base and (WRITTEN in base.values() or self.random.random() < 0.05):
                self.send(reader.party, machine.distrust(message.number), reader)
                return
            assert not message.base or machine.store.is_complete(message.base), "W1: from one that is not whole"
            reader.memory[message.number] |= content
        if isinstance(message, VersionOpened) and message.number not in machine.store.info:
            reader.memory[message.number] = content or {}
            (reader.lent.add if message.whole else reader.lent.discard)(message.number)
        assert not isinstance(message, Closed)
        self.send(reader.party, machine.receive(sender, message), reader)

    def hear(self, loss: tuple[str, str]) -> None:
        self.losses.remove(loss)
        who, of = loss
        self.log.append(f"{who} hears of the end of a connection with {of}")
        if who == "learner":
            self.send(PUBLISHER, self.feed.lost(of))
        for reader in [reader for party, reader in self.readers.items() if party.worker == who]:
            if of == "learner" and reader.party not in self.joins:
                self.joins.append(reader.party)
            self.send(reader.party, reader.machine.lost(of), reader)

    def join(self, party: EndpointAddress) -> None:
        self.joins.remove(party)
        reader = self.readers[party]
        self.send(PUBLISHER, self.feed.join(party, reader.host, reader.taken, reader.every))

    # The whole schedule

    def run(self) -> None:
        for _ in range(self.random.randint(10, 150)):
            options = [*self.choices()]
            if options:
                action, *subject = self.random.choice(options)
                action(*subject)
        self.faults = self.to_come = 0
        if not self.feed.store.newest:
            self.versions = max(self.versions, 1)
        while self.versions:
            self.publish()
        self.settle()
        newest = self.feed.store.newest
        for reader in self.readers.values():
            assert reader.taken == newest, f"W5: {reader.party} has {reader.taken} of {newest}"
            # a lent version is dropped if others rely on this reader for a while; its user has it
            assert set(reader.memory) <= {newest} or self.one_sided, f"W6: {reader.party} keeps {list(reader.memory)}"
        assert set(self.memory) == {newest} or self.one_sided, f"W6: the publisher keeps {list(self.memory)}"

    def settle(self) -> None:
        """Run until nothing happens any more, however long each reader waits."""
        quiet = 0
        for _ in range(5_000):
            options = [choice for choice in self.choices() if choice[0] != self.use]
            if options:
                action, *subject = self.random.choice(options)
                action(*subject)
            late = [reader for reader in self.readers.values() if reader.taken < self.feed.store.newest]
            if not options and not late:
                quiet += 1
                if quiet > PATIENCE + 1:
                    return
            for reader in late:
                if not options or self.random.random() < 0.2:
                    self.use(reader, waits=True)
            if not options and not any(self.lines.values()):
                late = [reader for reader in late if reader.taken < self.feed.store.newest]
                assert self.one_sided or not late, f"W7: {late[0].party} waits in vain"
                self.send(PUBLISHER, self.feed.on_tick())
                for reader in self.readers.values():
                    self.send(reader.party, reader.machine.on_tick(), reader)
        raise AssertionError(f"W5: no end: {[(reader.party, reader.taken) for reader in self.readers.values()]}")


def run(seed: int, faults: bool) -> None:
    world = World(seed, faults)
    try:
        world.run()
    except Exception as error:
        story = "\n".join(world.log[-60:])
        raise AssertionError(f"{type(error).__name__}: {error}\n{story}") from error


@by_day_and_night(range(200), range(200, 100_000))
def test_readers_get_whole_versions(seeds: range) -> None:
    run_each(seeds, partial(run, faults=True))


def test_a_closed_publisher_tells_subscribers_that_join_again() -> None:
    feed, (near, far) = PublisherProtocol(PUBLISHER, "host0", KEEP), [EndpointAddress(n, n, 1) for n in ("a", "b")]
    feed.join(near, "host0", 2, False)
    assert not feed.chain.leaves_the_host
    feed.join(far, "host1", 1, False)
    assert feed.chain.leaves_the_host
    assert feed.behind(2) == [far]
    assert feed.close() == [(near, Closed()), (far, Closed())]
    assert feed.join(far, "host1", 1, False) == [(far, Closed())]


def test_readers_get_whole_versions_if_all_is_well() -> None:
    run_each(range(200), partial(run, faults=False))
