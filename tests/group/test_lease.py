"""A worker's lease in the directory of its group: it is renewed in time, also while a watch waits for its answer."""

from __future__ import annotations

import pathlib
import threading
import time

import pytest

from telegrad._core.directory.directory import DirectoryLost, Events, Lease, LeaseLost, check_ttl
from telegrad._core.joining.join import ttl_of
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import LOST, Change, MemberGone
from tests.cluster import wait_until
from tests.directory.naive import NaiveClient, NaiveEngine

TTL = 0.6  # seconds
ROOT = pathlib.Path(__file__).parents[2]


class SlowWatch(NaiveClient):
    """A directory whose answers to watches are lost, until it is closed."""

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


def joined(directory: SlowWatch) -> tuple[DynamicGroup, list[Change]]:
    group, changes = DynamicGroup(directory, TTL), list[Change]()
    group.join(Member("a", 0, "life of a", "program", "host", "", ("127.0.0.1", 1)), lambda _: True)
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


@pytest.mark.parametrize(
    ("silence", "ttl"), [(0, 86_400.0), (0.01, 0.05), (10.0, 10.0), (86_401.0, 86_400.0), (1e9, 86_400.0)]
)
def test_a_lease_is_never_shorter_or_longer_than_documented(silence: float, ttl: float) -> None:
    assert ttl_of(silence) == ttl
    check_ttl(ttl)
    page = (ROOT / "docs/directory.md").read_text()
    assert "A lease is never shorter\nthan 0.05 s, nor longer than a day, whatever `silence` is." in page
