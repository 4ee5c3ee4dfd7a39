"""Tests of servers that are killed, restarted, and stopped while clients work."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from telegrad._core.stores.directory import ABSENT, Directory, DirectoryLost, Event
from tests.cluster import takes_less_than
from tests.directory.harness import (
    LONG,
    PATIENCE,
    SOON,
    Engine,
    Fixtures,
    Make,
    check_acts,
    contend,
    is_gone,
    read,
    wait_for,
    written,
)
from tests.directory.programs import Replica

PATIENT = 1.0  # seconds for which these clients wait if no server shall answer


def until_answered(ask: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            ask()
            return
        except DirectoryLost:
            assert time.monotonic() < ends


def fail(engine: Engine, how: str, seconds: float) -> None:
    """Let the server be away for a while."""
    engine.kill() if how == "kill" else engine.pause()
    threading.Event().wait(seconds)
    engine.start() if how == "kill" else engine.resume()


def count(client: Directory, key: str, until: threading.Event) -> int:
    """Count up at a key that has one writer, by one for each write, despite errors; return the last number."""
    number, revision = 0, ABSENT
    while not until.is_set():
        number += 1
        value, is_first = b"%d" % number, True
        while True:
            try:
                swap = client.swap(key, value, revision)
                entry = swap.entry
                assert swap.done or not is_first or (entry and entry.value) != value, "a compare-and-set was sent twice"
            except DirectoryLost:
                is_first = False
                try:
                    entry = read(client, key)
                except DirectoryLost:
                    continue
            if entry and entry.value == value:
                break
            # The value was not written yet: the entry has the value that was written before.
            assert (int(entry.value) if entry else 0) == number - 1, "a write was lost, or was done twice"
            assert (entry.revision if entry else ABSENT) == revision
        assert entry.revision > revision
        revision = entry.revision
    return number


class Faults(Fixtures):
    """Tests of a server that fails. Each test leaves it running."""

    @pytest.fixture(autouse=True)
    def _runs_again(self, engine: Engine, make: Make) -> Iterator[None]:
        yield
        until_answered(lambda: make().list("runs"))

    @pytest.fixture
    def killed(self, engine: Engine) -> Iterator[Callable[[], None]]:
        """Yield a function that kills the server, which is restarted at the end of the test."""
        down: list[bool] = []

        def kill() -> None:
            engine.kill()
            down.append(True)

        yield kill
        if down:
            engine.start()

    @pytest.fixture
    def paused(self, engine: Engine) -> Iterator[None]:
        engine.pause()
        yield
        engine.resume()

    @pytest.mark.parametrize("how", ["killed", "paused"])
    def test_a_server_that_does_not_answer_is_lost(
        self, make: Make, place: str, request: pytest.FixtureRequest, how: str
    ) -> None:
        client = make(PATIENT)
        lease, since = client.grant(LONG), client.list(place).revision
        fault = request.getfixturevalue(how)
        if how == "killed":
            fault()
        acts: list[Callable[[], object]] = [
            lambda: client.swap(f"{place}a", b""),
            lambda: client.list(place),
            lambda: client.grant(LONG),
            lambda: client.renew(lease),
            lambda: client.revoke(lease),
            lambda: client.watch(place, since, 0.5),
        ]
        with takes_less_than(PATIENT + 0.5 + 2 * SOON), ThreadPoolExecutor(len(acts)) as pool:
            # Each act has its own thread, so that each has its whole patience.
            errors = [each.exception(PATIENCE) for each in [pool.submit(act) for act in acts]]
        assert [type(error) for error in errors] == [DirectoryLost] * len(acts)
        assert min(len(str(error)) for error in errors) > 20

    def test_a_close_ends_calls_that_wait_for_a_lost_server(
        self, make: Make, place: str, killed: Callable[[], None]
    ) -> None:
        client = make(PATIENCE)
        since = client.list(place).revision
        killed()
        with ThreadPoolExecutor(2) as pool:
            watching, listing = pool.submit(client.watch, place, since, PATIENCE), pool.submit(client.list, place)
            with pytest.raises(TimeoutError):  # both have found out that no server answers
                listing.result(0.3)
            client.close()
            assert isinstance(watching.exception(2 * SOON), DirectoryLost)
            assert isinstance(listing.exception(2 * SOON), DirectoryLost)

    def test_a_stopped_server_goes_on(self, make: Make, place: str, engine: Engine) -> None:
        client = make(PATIENCE)
        lease = client.grant(LONG)
        with ThreadPoolExecutor(1) as pool:
            engine.pause()
            try:
                swapping = pool.submit(client.swap, f"{place}a", b"1", ABSENT, lease)
                with pytest.raises(TimeoutError):  # the request lies in the server's socket
                    swapping.result(0.3)
            finally:
                engine.resume()
            try:
                entry = written(swapping.result(PATIENCE))
            except DirectoryLost:  # an engine may report it as soon as a connection breaks
                return
        assert read(client, f"{place}a") == entry
        client.renew(lease)

    def test_a_restarted_server_has_its_state(self, make: Make, place: str, engine: Engine) -> None:
        client = make()
        lease = client.grant(LONG)
        kept = written(client.swap(f"{place}a", b"1", lease=lease))
        gone = written(client.swap(f"{place}b", b"1"))
        client.swap(f"{place}b", None, gone.revision)
        before = client.list(place)
        for _ in range(2):
            engine.kill()
            engine.start()
            until_answered(lambda: client.list(place))
            listing = client.list(place)
            assert listing.entries == (kept,)
            assert listing.revision >= before.revision
            until_answered(lambda: client.renew(lease))
            before = listing
        again = written(client.swap(f"{place}b", b"1"))
        assert again.created == again.revision > before.revision
        client.revoke(lease)
        assert client.list(place).entries == (again,)

    def test_a_lease_also_ends_after_a_restart_of_its_server(self, make: Make, place: str, engine: Engine) -> None:
        client = make()
        lease = client.grant(engine.ttl)
        entry = written(client.swap(f"{place}a", b"1", lease=lease))
        engine.kill()
        engine.start()
        until_answered(lambda: client.list(place))
        found: list[Event] = []
        until_answered(
            lambda: found.extend(wait_for(client, place, entry.revision, is_gone, lease.ttl + engine.slack + 5))
        )
        assert found[-1].key == f"{place}a"
        assert time.monotonic() >= lease.ends

    def test_a_watch_goes_on_after_a_restart(self, make: Make, place: str, engine: Engine) -> None:
        watcher, writer = make(), make()
        since = watcher.list(place).revision
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(wait_for, watcher, place, since, lambda event: True, PATIENCE)
            watcher.watch(place, since, 0.1)
            engine.kill()
            engine.start()
            until_answered(lambda: writer.list(place))
            entry = written(writer.swap(f"{place}a", b""))
            try:
                events = following.result(PATIENCE)
            except DirectoryLost:  # an engine may report it as soon as a connection breaks
                events = wait_for(watcher, place, since, lambda event: True, SOON)
        assert events == [Event(entry.revision, f"{place}a", entry)]

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("outages", [3, pytest.param(25, marks=pytest.mark.nightly)])
    @pytest.mark.parametrize("how", ["kill", "pause"])
    def test_each_write_is_done_once_while_the_server_fails(
        self, make: Make, place: str, engine: Engine, how: str, outages: int
    ) -> None:
        """Writers that read again after DirectoryLost count without a gap; a watcher sees each number once."""
        clients = [make(2.0) for _ in range(3)]
        watcher, chance, stop = make(), random.Random(1), threading.Event()
        replica = Replica(watcher, place)
        with ThreadPoolExecutor(4) as pool:
            following = pool.submit(replica.follow, f"{place}end", 250.0)
            try:
                counting = [pool.submit(count, client, f"{place}{n}", stop) for n, client in enumerate(clients)]
                for _ in range(outages):
                    stop.wait(chance.uniform(0.1, 0.4))  # time to work
                    fail(engine, how, chance.uniform(0.0, 0.3))
                    until_answered(lambda: watcher.list(place))
            finally:
                stop.set()
            numbers = [each.result(PATIENCE) for each in counting]
            until_answered(lambda: watcher.swap(f"{place}end", b""))
            following.result(PATIENCE)
        for n, number in enumerate(numbers):
            seen = [int(entry.value) for entry in replica.written if entry.key == f"{place}{n}"]
            assert seen == list(range(1, number + 1))

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("how", ["kill", pytest.param("pause", marks=pytest.mark.nightly)])
    def test_owners_do_not_act_at_once_while_the_server_fails(
        self, make: Make, place: str, engine: Engine, how: str
    ) -> None:
        chance, until = random.Random(1), threading.Event()
        with ThreadPoolExecutor(4) as pool:
            owning = [pool.submit(contend, make(2.0), f"{place}a", engine.ttl, n, until) for n in range(4)]
            try:
                for _ in range(4):
                    until.wait(2 * engine.ttl)  # time to work
                    fail(engine, how, chance.uniform(0.0, 2 * engine.ttl))
                    until_answered(lambda: make().list(place))
            finally:
                until.set()
            acts = [act for each in owning for act in each.result(PATIENCE)]
        assert len(acts) > 3
        check_acts(acts)
