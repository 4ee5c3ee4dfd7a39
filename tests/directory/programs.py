"""Programs made from seeds: one thread compared with the naive model, and several threads with complete watches."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from telegrad._core.stores.directory import (
    ABSENT,
    Directory,
    DirectoryLost,
    Entry,
    Event,
    Events,
    Lease,
    LeaseLost,
    Swap,
)
from tests.directory.harness import LONG, PATIENCE, Engine, Fixtures, Make, check_acts, contend
from tests.directory.naive import Naive

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 60))]
NAMES = ("a", "a/b", "b", "ba")


class Beside:
    """An engine and the model, which get the same calls; their results must agree."""

    def __init__(self, client: Directory, place: str, seed: int) -> None:
        self.client, self.place, self.random = client, place, random.Random(seed)
        self.model = Naive()
        self.leases: list[tuple[Lease, int]] = []  # (lease of the engine, lease of the model)
        self.revisions = {ABSENT: ABSENT}  # revisions of the engine, by those of the model
        self.since = client.list(place).revision
        self.seen: Events = []

    def step(self) -> None:
        act = self.random.choices(
            (self.swap, self.grant, self.revoke, self.renew, self.list, self.watch), (12, *5 * [1])
        )
        act[0]()

    def swap(self) -> None:
        name = self.random.choice(NAMES)
        found = self.model.entries.get(name)
        right = found.revision if found else ABSENT
        expected = self.random.choice([right, right, ABSENT, *self.revisions])
        value = None if self.random.random() < 0.3 else self.random.randbytes(self.random.randrange(4))
        lease, known = (
            self.random.choice(self.leases) if value and self.leases and self.random.random() < 0.5 else (None, 0)
        )
        modelled = self.model.swap(name, value, expected, known)
        try:
            swap = self.client.swap(self.place + name, value, self.revisions[expected], lease)
        except LeaseLost:
            assert modelled is None
            return
        if modelled is None:  # both refusals are right; nothing was written
            assert expected != right
            modelled = Swap(False, found)
        assert swap.done == modelled.done
        self.compare(swap.entry, modelled.entry)

    def compare(self, entry: Entry | None, modelled: Entry | None) -> None:
        if entry is None or modelled is None:
            assert entry is modelled
            return
        for real, model in ((entry.revision, modelled.revision), (entry.created, modelled.created)):
            if model not in self.revisions:
                assert real > max(self.revisions.values())
            assert self.revisions.setdefault(model, real) == real
        assert (entry.key, entry.value) == (self.place + modelled.key, modelled.value)
        assert entry.lease == {known: lease.id for lease, known in self.leases}.get(modelled.lease, 0)

    def grant(self) -> None:
        self.leases.append((self.client.grant(LONG), self.model.grant(LONG, 0.0)))

    def revoke(self) -> None:
        if self.leases:
            lease, known = self.random.choice(self.leases)
            self.client.revoke(lease)
            self.model.revoke(known)

    def renew(self) -> None:
        if not self.leases:
            return
        lease, known = self.random.choice(self.leases)
        if self.model.renew(known, 0.0):
            assert self.client.renew(lease).id == lease.id
        else:
            with pytest.raises(LeaseLost):
                self.client.renew(lease)

    def list(self) -> None:
        prefix = self.random.choice(["", *NAMES])
        listing, modelled = self.client.list(self.place + prefix), self.model.list(prefix)
        assert len(listing.entries) == len(modelled.entries)
        for entry, model in zip(listing.entries, modelled.entries, strict=True):
            self.compare(entry, model)

    def watch(self) -> None:
        """Read all changes so far."""
        ends = time.monotonic() + PATIENCE
        while len(self.seen) < len(self.model.events) and time.monotonic() < ends:
            self.since, events = self.client.watch(self.place, self.since, PATIENCE)
            self.seen += events
        assert len(self.seen) == len(self.model.events)

        assert [event.revision for event in self.seen] == sorted(event.revision for event in self.seen)
        # The keys of one lease may be deleted in any order: only then has the model several changes at one revision.
        ordered = self.model.events
        start = 0
        while start < len(ordered):
            end = start + sum(event.revision == ordered[start].revision for event in ordered)
            real = sorted(self.seen[start:end], key=lambda event: event.key)
            for event, model in zip(real, ordered[start:end], strict=True):
                assert event.key == self.place + model.key
                self.compare(event.entry, model.entry)
                assert event.entry is None or event.entry.revision == event.revision
            start = end


class Replica:
    """The knowledge of a watcher: the entries of a list, and each change since."""

    def __init__(self, client: Directory, place: str) -> None:
        self.client, self.place = client, place
        listing = client.list(place)
        self.entries = {entry.key: entry for entry in listing.entries}
        self.since = self.revision = self.started = listing.revision
        self.written: list[Entry] = []

    def follow(self, last: str, limit: float = PATIENCE) -> "Replica":
        ends = time.monotonic() + limit
        while last not in self.entries:
            assert time.monotonic() < ends
            try:
                self.since, events = self.client.watch(self.place, self.since, PATIENCE)
            except DirectoryLost:  # some tests kill the server
                continue
            for event in events:
                self.apply(event)
            assert self.revision <= self.since
        return self

    def apply(self, event: Event) -> None:
        assert event.revision >= self.revision
        self.revision = event.revision
        before = self.entries.pop(event.key, None)
        if event.entry is None:
            assert before is not None, "deleted twice"
            return
        assert (event.entry.key, event.entry.revision) == (event.key, event.revision)
        assert event.entry.created == (before.created if before else event.revision)
        assert before is None or before.revision < event.revision
        self.entries[event.key] = event.entry
        self.written.append(event.entry)


def write(client: Directory, place: str, seed: int, count: int) -> list[Entry]:
    """Write, delete, grant and revoke at random; return the written entries."""
    chance = random.Random(seed)
    known: dict[str, int] = {}
    lease, entries = client.grant(LONG), []
    for n in range(count):
        key = f"{place}{chance.randrange(5)}"
        kind = chance.random()
        if kind < 0.07:
            client.revoke(lease)
            lease = client.grant(LONG)
        value = None if kind < 0.25 else b"%d-%d" % (seed, n)
        swap = client.swap(key, value, known.get(key, ABSENT), lease if value and kind < 0.6 else None)
        known[key] = swap.entry.revision if swap.entry else ABSENT
        if swap.done and swap.entry:
            entries.append(swap.entry)
    client.revoke(lease)
    return entries


class Programs(Fixtures):
    """Tests of programs made from a seed."""

    @pytest.mark.parametrize("seed", SEEDS)
    def test_a_client_gets_the_results_of_the_model(self, client: Directory, place: str, seed: int) -> None:
        beside = Beside(client, place, seed)
        for _ in range(120):
            beside.step()
        beside.list()
        beside.watch()

    @pytest.mark.parametrize("seed", SEEDS)
    def test_watches_miss_nothing(self, make: Make, place: str, seed: int) -> None:
        clients = [make() for _ in range(6)]

        def follow(client: Directory) -> Replica:
            return Replica(client, place).follow(f"{place}end")

        with ThreadPoolExecutor(len(clients)) as pool:
            following = [pool.submit(follow, clients[0])]
            writing = [pool.submit(write, clients[n], place, seed * 10 + n, 40) for n in (1, 2, 3)]
            following += [pool.submit(follow, clients[n]) for n in (4, 5)]
            entries = [entry for each in writing for entry in each.result(PATIENCE)]
            clients[1].swap(f"{place}end", b"")
            replicas = [each.result(PATIENCE) for each in following]
        left = clients[0].list(place).entries
        for replica in replicas:
            assert tuple(sorted(replica.entries.values())) == left
            assert len(set(replica.written)) == len(replica.written)
            assert {entry for entry in entries if entry.revision > replica.started} <= set(replica.written)

    @pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
    def test_owners_do_not_act_at_once(self, make: Make, place: str, engine: Engine, seed: int) -> None:
        until = threading.Event()
        with ThreadPoolExecutor(4) as pool:
            owning = [pool.submit(contend, make(), f"{place}a", engine.ttl, 10 * seed + n, until) for n in range(4)]
            until.wait(8 * engine.ttl)  # time to work
            until.set()
            acts = [act for each in owning for act in each.result(PATIENCE)]
        assert len(acts) > 3
        check_acts(acts)
