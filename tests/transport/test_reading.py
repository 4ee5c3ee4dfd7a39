"""One owner at a time has the right to read; see also tests/sim/test_reading.py."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad._core.transport.reading import ReadOwner, ReadRight

WITHOUT_LANES: Any = SimpleNamespace(awaits_lanes=False)  # a reader of frames


class Connection:
    """Records the calls of the poller and the end of the connection."""

    def __init__(self, expects: bool = False) -> None:
        self.armed: list[bool] = []
        self.expects, self.finished = expects, 0
        self.reading = ReadRight(
            threading.Lock(), self.armed.append, lambda: self.expects, self.finish, WITHOUT_LANES, bool
        )

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize(("expects", "owner"), [(True, ReadOwner.LEADER), (False, ReadOwner.NOBODY)])
def test_a_waiter_passes_reading_to_the_leader_if_more_is_expected(expects: bool, owner: ReadOwner) -> None:
    connection = Connection(expects)
    assert connection.reading.take()
    assert not connection.reading.take()
    assert not connection.reading.begin()
    connection.reading.give_back()
    assert connection.reading.owner is owner
    assert connection.armed == [True] * expects


@pytest.mark.parametrize("owner", ReadOwner)
def test_a_connection_is_finished_by_its_reader_or_else_by_end(owner: ReadOwner) -> None:
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


def test_a_held_leader_does_not_read_but_a_waiter_does() -> None:
    connection = Connection(expects=True)
    reading = connection.reading
    reading.watch()
    reading.hold(True)
    assert not reading.begin()
    assert reading.take()
    reading.hold(False)
    reading.hold(True)  # changes nothing now: the waiter owns the right
    assert connection.armed == [True, False, False]
    reading.give_back()
    assert connection.armed[3:] in ([], [False])
    reading.hold(False)
    assert connection.armed[-1]
    assert reading.begin()
    reading.end()
    reading.hold(True)
    assert connection.finished == 0
    reading.give_back()
    assert connection.finished == 1
