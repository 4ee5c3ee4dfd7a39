"""How many calls run at once, and what becomes of those that find no slot."""

from __future__ import annotations

from telegrad.agent.slots import STALLED_AFTER, Slots


def full(count: int) -> Slots[str]:
    slots: Slots[str] = Slots(count)
    for number in range(count):
        assert slots.take(f"running {number}")
    return slots


def test_who_finds_no_slot_waits_and_comes_in_order() -> None:
    slots = full(2)
    assert not slots.take("a")
    assert not slots.take("b")
    assert slots.next() is None
    slots.end()
    assert slots.next() == "a"
    assert slots.next() is None
    slots.end()
    slots.end()
    assert slots.next() == "b"
    assert slots.next() is None
    assert slots.busy == 1


def test_a_call_that_waits_gives_its_slot_to_another() -> None:
    slots = full(1)
    slots.take("a")
    assert slots.free() == []
    slots.pause()
    assert slots.free() == ["a"]
    assert slots.take("a")
    slots.resume()  # there are two for a while
    assert slots.busy == 2
    assert not slots.take("b")
    slots.end()
    assert slots.free() == []
    slots.end()
    assert slots.free() == ["b"]


def test_where_all_that_run_only_sleep_one_more_is_let_in_until_a_call_ends() -> None:
    slots = full(1)
    slots.take("a")
    assert not slots.lend(1.0, 0.5)
    assert not slots.lend(1.0 + STALLED_AFTER, 0.5)
    assert slots.lend(1.1 + STALLED_AFTER, 0.5)
    assert slots.free() == ["a"]
    assert slots.take("a")
    slots.end()
    slots.end()
    assert slots.take("b")
    assert not slots.take("c")


def test_no_slot_is_lent_while_calls_work_or_end_or_where_nobody_knows() -> None:
    slots = full(2)
    slots.take("a")
    assert not slots.lend(1.0, 0.0)
    assert not slots.lend(2.0, 0.9)  # they have used the processor
    slots.end()
    assert not slots.lend(3.0, 0.9)  # one has ended
    assert not slots.lend(4.0, None)


def test_its_state_can_be_seen() -> None:
    slots = full(1)
    slots.take("a")
    assert repr(slots) == "<Slots: 1 of 1 busy, 1 wait>"
