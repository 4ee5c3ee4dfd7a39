"""Tests of a simulated peer: each call ends once in any order of events, and wrong code is found."""

import contextlib
import operator
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from telegrad._core.agent import peer
from telegrad._core.agent.peer import BATCH, LazyLink, Peer
from telegrad._core.agent.pending_call import SEARCH_PAUSE, CallTable, PendingCall
from telegrad._core.wire.messages import CALL, CANCEL, NOTICE, Message
from telegrad.errors import PeerError
from tests.seeds import by_day_and_night, run_each
from tests.sim import calls_world
from tests.sim.calls_world import World

SEEDS = 600
AT_NIGHT = 20_000


def run(seeds: range) -> None:
    run_each(seeds, lambda seed: World(seed).run())


@by_day_and_night(range(SEEDS), range(SEEDS, SEEDS + AT_NIGHT))
def test_each_call_ends_once(seeds: range) -> None:
    run(seeds)


def fail_the_calls_of_any_link(peer: Peer, link: Any, reason: PeerError) -> None:
    for call in list(peer.calls.in_flight.values()):
        if call.link is not None:
            peer.fail([call], call.connection_lost_error(reason))
    link_closed(peer, link, reason)


def send_again(peer: Peer, link: Any, reason: PeerError) -> None:
    again: list[Any] = [call for call in peer.calls.in_flight.values() if call.link is link]
    peer.connection.link = None
    for call in again:
        peer.connection.send(call.message, call)
    link_closed(peer, link, reason)


def open_before_the_queue_is_empty(lazy: LazyLink, link: Any) -> Any:
    batch = next_batch(lazy, link)
    lazy.link = link
    return batch


def forget_the_queue(lazy: LazyLink, *_: Any, **__: Any) -> bool:
    lazy._is_connecting, lazy._queue = False, []
    return False


def add_without_deadline(table: CallTable, call: Any) -> bool:
    add(table, call)
    table.next_due = inf
    return False


def tell_and_then_note(call: PendingCall) -> None:
    if call.link is not None:
        with contextlib.suppress(PeerError):
            call.link.send(Message(CANCEL, call.id))
    call.abandoned = True


def tell_only_over_an_open_link(call: PendingCall) -> None:
    call.abandoned = True
    if call.link is not None and call.link is call.peer.connection.link:
        with contextlib.suppress(PeerError):
            call.link.send(Message(CANCEL, call.id))


link_closed, next_batch, add = Peer.link_closed, LazyLink._next_batch, CallTable.add
WRONG: list[tuple[Any, str, Callable[..., Any]]] = [
    (Peer, "link_closed", fail_the_calls_of_any_link),
    (Peer, "link_closed", send_again),
    (LazyLink, "_next_batch", open_before_the_queue_is_empty),
    (LazyLink, "_abort", forget_the_queue),
    (CallTable, "pop", lambda table, id_: table.in_flight.pop(id_, None)),  # the weight is not given back
    (CallTable, "add", add_without_deadline),
    (peer, "_is_obsolete", lambda _, call: call is not None and call.abandoned),  # references do not arrive
    (peer, "_is_obsolete", lambda *_: False),
    (PendingCall, "send_cancel", tell_and_then_note),
    (PendingCall, "send_cancel", tell_only_over_an_open_link),
    (calls_world, "set_apart", list),
]


@pytest.mark.parametrize(("target", "name", "wrong"), WRONG, ids=[f"{wrong.__name__}" for _, _, wrong in WRONG])
def test_wrong_code_is_found(target: Any, name: str, wrong: Callable[..., Any]) -> None:
    with patch.object(target, name, wrong), pytest.raises(AssertionError, match="SEED"):
        run(range(SEEDS))


# Single cases


def call(weight: int = 0, deadline: float = inf, is_timed: bool = True) -> Any:
    return SimpleNamespace(id=0, weight=weight, deadline=deadline, outcome=object() if is_timed else None)


def test_a_table_is_full_by_number_or_by_weight() -> None:
    table: CallTable = CallTable(3, 100)
    for _ in range(3):
        table.add(call())
    assert table.is_full
    table.pop(1)
    table.pop(1)
    assert not table.is_full
    table.pop(2)
    table.add(call(weight=100))
    assert table.is_full
    assert [each.id for each in table.pop_all(lambda each: each.weight > 0)] == [4]
    assert not table.is_full


def test_calls_expire_in_time_and_the_table_is_searched_only_then() -> None:
    table: CallTable = CallTable(100, 100)
    slow, quick, soon = call(deadline=60.0), call(deadline=1.0), call(deadline=1.001)
    assert [table.add(each) for each in (slow, quick, soon)] == [True, True, False]
    assert not table.add(call(deadline=0.5, is_timed=False))  # a thread waits for this call
    assert (table.pop_expired(0.9), table.next_due) == ([], 1.0)
    assert (table.pop_expired(1.0), table.next_due) == ([quick], 1.0 + SEARCH_PAUSE)
    table.pop(soon.id)
    assert (table.pop_expired(2.0), table.next_due) == ([], 60.0)  # `next_due` is a lower bound
    assert (table.pop_expired(61.0), table.next_due) == ([slow], inf)


@pytest.fixture
def world() -> World:
    """Return a world in which no act is suspended, and nothing fails."""
    world = World(0)
    world.chance = SimpleNamespace(random=lambda: 1.0)  # type: ignore[assignment]
    return world


def test_control_messages_wait_if_no_thread_can_be_started(world: World) -> None:
    call = calls_world.Call(world.peer, operator.neg, 0)
    call.message = Message(CALL, 0, 0, b"0 1")
    world.calls.append(call)
    world.notices[b"0 0"] = False
    with patch.object(peer, "run_in_thread", side_effect=RuntimeError("no thread")):
        world.peer.notify(Message(NOTICE, 0, 0, b"0 0"), False)
    assert not world.losses
    with patch.object(peer, "run_in_thread", lambda _, run: run()):
        world.peer.call(call, call.message)
    assert world.notices[b"0 0"]
    assert list(world.links[0].served) == [call.id]


def test_many_calls_are_sent_in_batches(world: World) -> None:
    sent: list[bool] = []
    world.peer.connection.link = SimpleNamespace(send=lambda _, later: sent.append(later))  # type: ignore[assignment]
    for _ in range(3 * BATCH):
        world.peer.call(PendingCall(world.peer, None, 0, SimpleNamespace()), Message(CALL))
    assert sent == [*BATCH * [False], *2 * [*(BATCH - 1) * [True], False]]
