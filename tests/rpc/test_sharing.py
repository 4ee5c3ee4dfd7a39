"""Who does which item."""

from __future__ import annotations

from telegrad.rpc.sharing import Sharing


def test_the_first_gets_the_first_and_whoever_is_through_the_next() -> None:
    sharing = Sharing(5, 2)
    assert sharing.begin() == [(0, 0), (1, 1)]
    assert sharing.ended(1, False) == (2, [])
    assert sharing.ended(1, False) == (3, [])
    assert sharing.ended(0, False) == (4, [])
    assert sharing.ended(1, False) == sharing.ended(0, False) == (None, [])


def test_who_is_gone_gets_none_and_the_others_do_the_rest() -> None:
    sharing = Sharing(4, 2)
    sharing.begin()
    assert sharing.ended(0, True) == (None, [])
    assert sharing.ended(1, False) == (2, [])
    assert sharing.ended(1, False) == (3, [])


def test_what_nobody_is_left_to_do() -> None:
    sharing = Sharing(5, 2)
    sharing.begin()
    assert sharing.ended(0, True) == (None, [])
    assert sharing.ended(1, True) == (None, [2, 3, 4])


def test_fewer_items_than_workers() -> None:
    sharing = Sharing(1, 3)
    assert sharing.begin() == [(0, 0)]
    assert sharing.ended(0, True) == (None, [])
