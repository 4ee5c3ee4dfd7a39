"""Tests of a worker's lease in the directory of its group: renewed in time, lost during a join, ended by a hang."""

import pathlib
import queue
import threading
import time

import pytest

from telegrad._core.membership.dynamic import DynamicGroup, ttl_of
from telegrad._core.membership.registry import LOST, Change, LifeOver, MemberGone
from telegrad._core.stores.directory import ABSENT, DirectoryLost, Events, Lease, LeaseLost, Swap, check_ttl
from tests.cluster import PATIENCE, agents, wait_until
from tests.directory.naive import NaiveClient, NaiveEngine
from tests.group.members import alive, member

TTL = 0.6  # seconds
ROOT = pathlib.Path(__file__).parents[2]


class SlowWatch(NaiveClient):
    """A directory whose answers to watches do not arrive until it is closed."""

    def __init__(self) -> None:
        super().__init__(NaiveEngine(), 10.0)
        self.renewed: list[float] = []
        self.refuses = False
        self._over = threading.Event()

    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        self._over.wait()
        raise DirectoryLost("it was closed")

    def renew(self, lease: Lease) -> Lease:
        if self.refuses:
            raise LeaseLost("it has ended")
        self.renewed.append(time.monotonic())
        return super().renew(lease)

    def close(self) -> None:
        self._over.set()
        super().close()


class Forgetful(NaiveClient):
    """A client that gets no answer to the publication of a member."""

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        swap = super().swap(key, value, expected, lease)
        if key.startswith("live/member/"):
            raise DirectoryLost("the connection broke")
        return swap


def joined(directory: SlowWatch) -> tuple[DynamicGroup, list[Change]]:
    group, changes = DynamicGroup(directory, TTL), list[Change]()
    group.join(member("a", 0), alive)
    group.begin(changes.append)
    return group, changes


def test_a_lease_is_renewed_while_a_watch_waits() -> None:
    directory = SlowWatch()
    group, _ = joined(directory)
    wait_until(lambda: len(directory.renewed) >= 6)
    assert directory.renewed[5] - directory.renewed[0] > TTL
    assert group.holds
    group.leave()


def test_a_lease_that_has_ended_ends_the_life_while_a_watch_waits() -> None:
    directory = SlowWatch()
    group, changes = joined(directory)
    directory.refuses = True
    wait_until(lambda: changes)
    assert "was declared lost" in group.over
    assert not group.holds
    assert changes == [
        MemberGone("life of a", LOST, "the directory has ended its lease, which was not renewed in time")
    ]
    group.leave()


def test_a_worker_that_may_have_joined_and_lost_its_lease_does_not_join() -> None:
    """The joins in `sim/test_dynamic.py` have all orders of events."""
    group = DynamicGroup(Forgetful(NaiveEngine(), 0.2), TTL)
    with pytest.raises(LifeOver, match=r"worker 'a' may have joined and then lost its lease.*Start it again"):
        group.join(member("a"), alive)


@pytest.mark.parametrize(
    ("silence", "ttl"), [(0, 86_400.0), (0.01, 0.05), (10.0, 10.0), (86_401.0, 86_400.0), (1e9, 86_400.0)]
)
def test_a_lease_is_never_shorter_or_longer_than_documented(silence: float, ttl: float) -> None:
    assert ttl_of(silence) == ttl
    check_ttl(ttl)
    page = (ROOT / "docs/directory.md").read_text()
    assert "A lease is never shorter\nthan 0.05 s, nor longer than a day, whatever `silence` is." in page


# A worker that answers no call any more


def test_a_worker_that_hangs_is_declared_lost_and_learns_of_it() -> None:
    group, told = DynamicGroup(NaiveEngine().client(), TTL), queue.SimpleQueue[Change]()
    me = group.join(member("w0", 0), alive)
    group.begin(told.put, lambda: 2 * TTL)
    change = told.get(timeout=PATIENCE)
    assert isinstance(change, MemberGone)
    assert change[:2] == (me.incarnation, LOST)
    assert not group.holds
    assert "was declared lost" in group.over
    group.leave()


def test_a_worker_whose_threads_wait_for_calls_does_not_hang() -> None:
    with agents(2) as workers:
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + 0.2)
        assert workers[0].agent.stands_for == 0.0
