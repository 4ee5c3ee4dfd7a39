"""Tests of messages, which arrive once each in any network, and of the names of references in them."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad._core.membership.members import Identity
from telegrad._core.references import (
    ACKNOWLEDGE_WITHIN,
    MOST_REMEMBERED,
    RESEND_AFTER,
    RESEND_AT_MOST,
    Batch,
    ReliableDelivery,
)
from telegrad._core.references.handles import key_of, number


@pytest.fixture
def delivery() -> ReliableDelivery[str]:
    return ReliableDelivery()


def test_letters_to_one_worker_travel_together(delivery: ReliableDelivery[str]) -> None:
    for message in "abc":
        delivery.post("x", message)
    delivery.post("y", "d")
    assert delivery.outgoing(0.0) == [("x", Batch(1, ["a", "b", "c"], [])), ("y", Batch(1, ["d"], []))]
    assert delivery.outgoing(0.0) == []


def test_a_batch_without_a_receipt_is_sent_again_with_growing_pauses(delivery: ReliableDelivery[str]) -> None:
    now, pauses = 0.0, []
    delivery.post("x", "a")
    ((_, first),) = delivery.outgoing(now)
    for _ in range(8):
        pauses.append(delivery.next() - now)
        now = delivery.next()
        assert delivery.outgoing(now) == [("x", first)]
    assert pauses[:3] == [RESEND_AFTER, 2 * RESEND_AFTER, 4 * RESEND_AFTER]
    assert pauses[-1] == RESEND_AT_MOST
    delivery.receive("x", Batch(0, [], [1]), now)
    assert (delivery.next(), delivery.unsettled) == (inf, 0)


def test_a_receipt_travels_with_letters_or_soon_alone(delivery: ReliableDelivery[str]) -> None:
    assert delivery.receive("x", Batch(7, ["a"], []), 1.0) == ["a"]
    assert delivery.next() == 1.0 + ACKNOWLEDGE_WITHIN
    delivery.post("x", "b")
    assert delivery.outgoing(1.0) == [("x", Batch(1, ["b"], [7]))]
    delivery.receive("x", Batch(8, ["c"], [1]), 2.0)
    assert (delivery.outgoing(delivery.next()), delivery.next()) == ([("x", Batch(0, [], [8]))], inf)


def test_a_reopened_connection_is_used_at_once(delivery: ReliableDelivery[str]) -> None:
    delivery.post("x", "a")
    delivery.outgoing(0.0)
    delivery.hurry("x", 0.5)
    assert delivery.outgoing(0.5) == [("x", Batch(1, ["a"], []))]


def test_a_worker_declared_dead_is_asked_again_with_growing_pauses(delivery: ReliableDelivery[str]) -> None:
    now, pauses = 0.0, []
    delivery.post("x", "a")
    delivery.outgoing(now)
    delivery.post("x", "b")
    for _ in range(8):
        delivery.forget("x", now)
        assert delivery.unsettled == 0
        pauses.append(delivery.next() - now)
        now = delivery.next()
        assert delivery.outgoing(now) == [("x", Batch(1, [], []))]
    assert pauses == [RESEND_AFTER * 2**n for n in range(8)]
    delivery.receive("x", Batch(0, [], [1]), now)
    assert delivery.next() == inf


def test_nothing_is_sent_to_a_worker_that_has_left(delivery: ReliableDelivery[str]) -> None:
    delivery.post("x", "a")
    delivery.outgoing(0.0)
    delivery.post("x", "b")
    delivery.drop_worker("x")
    assert (delivery.next(), delivery.outgoing(99.0)) == (inf, [])


def test_the_numbers_of_workers_that_have_left_are_kept_for_a_while(delivery: ReliableDelivery[str]) -> None:
    for turn in range(2):
        delivery.post("x", "a")
        assert delivery.outgoing(0.0) == [("x", Batch(turn + 1, ["a"], []))]
        assert delivery.receive("x", Batch(1, ["b"], []), 0.0) == ["b"] * (not turn)
        delivery.drop_worker("x")
        assert not delivery._lines
    for worker in range(MOST_REMEMBERED + 8):
        delivery.post(f"w{worker}", "a")
        delivery.drop_worker(f"w{worker}")
    assert (len(delivery._lines), len(delivery._dropped)) == (0, MOST_REMEMBERED)


def test_a_receiver_does_not_wait_for_forgotten_numbers() -> None:
    sender: ReliableDelivery[int] = ReliableDelivery()
    receiver: ReliableDelivery[int] = ReliableDelivery()
    for turn in range(5):
        sender.post("r", turn)
        sender.outgoing(turn)
        sender.forget("r", turn)
    sender.hurry("r", 9.0)
    for _, batch in sender.outgoing(9.0):
        assert receiver.receive("s", batch, 9.0) == []
    assert not receiver._lines["s"].ahead


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["deliver", "double", "lose", "post", "wait"]))))
def test_each_letter_arrives_once(events: list[tuple[int, str]]) -> None:
    sender: ReliableDelivery[int] = ReliableDelivery()
    receiver: ReliableDelivery[int] = ReliableDelivery()
    now, posted = 0.0, 0
    received: list[int] = []
    out: list[Batch] = []
    back: list[Batch] = []
    for place, event in events:
        if event == "post":
            sender.post("r", posted)
            posted += 1
        elif event == "wait":
            now += RESEND_AT_MOST
        elif out:
            batch = out[place % len(out)]
            if event != "double":
                out.remove(batch)
            if event != "lose":
                received += receiver.receive("s", batch, now)
        out += [batch for _, batch in sender.outgoing(now)]
        back += [batch for _, batch in receiver.outgoing(now)]
        if back and place % 2:
            sender.receive("r", back.pop(), now)
    while sender.unsettled:
        now += RESEND_AT_MOST
        for _, batch in sender.outgoing(now):
            received += receiver.receive("s", batch, now)
        for _, batch in receiver.outgoing(now + 1):
            sender.receive("r", batch, now)
    assert sorted(received) == list(range(posted))


def test_a_later_worker_of_the_same_name_has_another_key() -> None:
    first, second = Identity("ps", 0, "one"), Identity("ps", 0, "two")
    assert key_of(first) != key_of(second)
    assert key_of(first) == key_of(Identity("ps", 0, "one"))


def test_a_reference_is_shown_by_name_and_number() -> None:
    assert number((key_of(Identity("ps", 0, "one")), 12)) == "ps/12"
    assert number((key_of(Identity("a#b", 0, "one")), 3)) == "a#b/3"  # for any form of name
