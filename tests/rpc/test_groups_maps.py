"""Tests of maps with calls that are played: their ends at any moment, cancels, and items that cannot be sent."""

import sys

import pytest

from telegrad import errors
from telegrad._core.worker.current import Worker
from telegrad.groups import group_calls
from telegrad.groups.group_calls import MapFuture, ResultSlot


class EndsWhenCancelled:
    """A call that ends without an error at the moment when it is cancelled."""

    def __init__(self, slot: ResultSlot) -> None:
        self._slot = slot

    def cancel(self) -> bool:
        self._slot.set_result(None)
        return False


class StopsWhenCancelled(EndsWhenCancelled):
    def cancel(self) -> bool:
        self._slot.set_exception(errors.CallCancelled("cancelled"))
        return True


def test_a_call_that_ends_during_the_cancel_of_a_map_brings_no_next_item(team: list[Worker]) -> None:
    given = []

    def call(slot: ResultSlot, _: int) -> None:
        given.append(slot.key)
        slot.call = EndsWhenCancelled(slot)

    future = MapFuture(team[0].agent, 0, ["w1"], 3, "f", call).begin()
    assert future.cancel()
    assert given == [0]
    assert {key: type(error) for key, error in future.errors().items()} == dict.fromkeys([1, 2], errors.CallCancelled)


def test_an_item_that_is_handed_out_during_the_cancel_of_a_map_is_cancelled(team: list[Worker]) -> None:
    given: list[ResultSlot] = []

    def call(slot: ResultSlot, _: int) -> None:
        if given:
            future.cancel()  # as another thread, before the call of this item is known
        given.append(slot)
        slot.call = StopsWhenCancelled(slot)

    future = MapFuture(team[0].agent, 0, ["w1"], 3, "f", call).begin()
    given[0].set_result(None)
    assert future.done()
    assert (set(future.errors()), len(given)) == ({1, 2}, 2)


def test_many_items_that_cannot_be_sent_do_not_recurse(team: list[Worker]) -> None:
    def call(slot: ResultSlot, _: int) -> None:
        if slot.key:
            raise errors.CannotEncode("a lock")
        first.append(slot)

    first: list[ResultSlot] = []
    items = 2 * sys.getrecursionlimit()
    future = MapFuture(team[0].agent, 0, ["w1"], items, "f", call).begin()
    first[0].set_result(None)
    assert future.done()
    assert len(future.errors()) == items - 1


def test_an_interrupt_while_a_map_hands_on_an_item_loses_no_item(
    team: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_calls, "raised_by_handler", lambda error: isinstance(error, KeyboardInterrupt))
    first: list[ResultSlot] = []

    def call(slot: ResultSlot, _: int) -> None:
        if slot.key:
            raise KeyboardInterrupt
        first.append(slot)

    future = MapFuture(team[0].agent, 0, ["w1"], 3, "f", call).begin()
    with pytest.raises(KeyboardInterrupt):
        first[0].set_result(None)
    assert future.done()
    assert len(future._come) == 3
