"""The right to read goes from owner to owner; see also tests/sim/test_reading.py."""

from __future__ import annotations

import threading

import pytest

from telegrad._core.transport.reading import ReadOwner, ReadRight


class Connection:
    """Notes what the poller is told, and its end."""

    def __init__(self, expects: bool = False) -> None:
        self.armed: list[bool] = []
        self.expects = expects
        self.finished = 0
        self.reading = ReadRight(threading.Lock(), self.armed.append, lambda: self.expects, self.finish)

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize(("expects", "owner"), [(True, ReadOwner.LEADER), (False, ReadOwner.NOBODY)])
def test_a_waiter_leaves_it_to_the_leader_where_more_is_expected(expects: bool, owner: ReadOwner) -> None:
    connection = Connection(expects)
    assert connection.reading.take()
    assert not connection.reading.take()
    assert not connection.reading.begin()
    connection.reading.give_back()
    assert connection.reading.owner is owner
    assert connection.armed == [True] * expects


@pytest.mark.parametrize("owner", ReadOwner)
def test_who_reads_finishes_and_else_who_ends_it(owner: ReadOwner) -> None:
    connection = Connection()
    reading = connection.reading
    if owner is ReadOwner.LEADER:
        reading.watch()
    elif owner is not ReadOwner.NOBODY:
        assert reading.take()
        if owner is ReadOwner.LANE:
            reading.pass_on()
    reading.end()
    reads = owner in (ReadOwner.WAITER, ReadOwner.LANE)
    assert connection.finished == (not reads)
    if reads:
        reading.give_back()
    assert connection.finished == 1
    assert not reading.take()
    reading.watch()
    assert reading.owner is ReadOwner.NOBODY
    assert connection.armed in ([], [True, False])
