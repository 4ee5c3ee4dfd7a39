"""Tests of the wait in `shutdown`: a worker sleeps until something changes, and does not wait for dead workers."""

from __future__ import annotations

import contextlib
import logging
import operator
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad._core.membership import leaving as parting
from telegrad._core.membership.leaving import LeavingTogether
from telegrad._core.membership.membership import Greeting
from telegrad._core.membership.shutdown_barrier import Ask, Entered, Leave, Message, Quiet
from telegrad._core.membership.suspects import Suspect
from telegrad._core.progress import FIRST
from telegrad._core.worker.worker import Worker
from telegrad.errors import PeerError, PeerLost, PeerUnreachable, ShutDown
from tests.cluster import PATIENCE, agents, free_port

begun, may_end = threading.Event(), threading.Event()


class Slept(threading.Event):
    """An event that records the timeout of each wait."""

    def __init__(self) -> None:
        super().__init__()
        self.times: queue.SimpleQueue[float] = queue.SimpleQueue()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.times.put(timeout)
        return super().wait(timeout)


@pytest.fixture
def group() -> Iterator[list[Worker]]:
    with agents(2) as made:
        for worker in made:
            worker.parting._changed = Slept()
        yield made


def times(worker: Worker) -> queue.SimpleQueue[float]:
    """Return the timeouts with which a worker waits in shutdown."""
    changed = worker.parting._changed
    assert isinstance(changed, Slept)
    return changed.times


def leaving(worker: Worker) -> threading.Thread:
    thread = threading.Thread(target=worker.shutdown, args=(True, 0))
    thread.start()
    return thread


def assert_ends(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("server", [0, 1], ids=["leads", "is led"])
def test_a_server_that_waits_in_shutdown_sleeps_while_it_serves(group: list[Worker], server: int) -> None:
    waits, other = leaving(group[server]), group[1 - server]
    slept = times(group[server])
    assert slept.get(timeout=PATIENCE) == pytest.approx(FIRST, abs=1)  # until it logs the missing worker
    for _ in range(100):
        assert other.agent.call(server, operator.add, (1, 2), None) == 3
    assert slept.empty()
    other.shutdown(True, PATIENCE)
    assert_ends(waits)


def work() -> None:
    begun.set()
    assert may_end.wait(PATIENCE)


def test_a_worker_asked_during_a_call_polls_until_the_call_ends(group: list[Worker]) -> None:
    begun.clear()
    may_end.clear()
    call = group[1].agent.call_async(0, work, None, None)
    assert begun.wait(PATIENCE)
    both = [leaving(worker) for worker in group]
    for worker in group:
        while times(worker).get(timeout=PATIENCE) > 1:
            pass  # it was not asked yet
    may_end.set()
    for each in both:
        assert_ends(each)
    call.wait()


def test_letters_leave_in_the_order_in_which_they_were_decided(
    group: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a slow thread greets a worker that has left, and its silence looks like a death."""
    leader, other = group
    sent: list[Message] = []
    greets, goes_on = threading.Event(), threading.Event()

    def notify(_: Any, message: Any) -> None:
        if isinstance(message, Entered):
            greets.set()
            assert goes_on.wait(PATIENCE)
        sent.append(message)

    monkeypatch.setattr(leader.agent, "notify", notify)
    slow = threading.Thread(target=leader.parting._begin)
    slow.start()
    assert greets.wait(PATIENCE)
    assert isinstance(leader.parting, LeavingTogether)
    leader.parting._on_message(other.me.identity, Entered())
    goes_on.set()
    assert_ends(slow)
    assert sent == [Entered(), Ask(1)]


def test_a_connection_made_while_its_worker_leaves_reports_the_shutdown(
    group: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, leaves = group
    made, goes_on = threading.Event(), threading.Event()
    heard: queue.SimpleQueue[PeerError] = queue.SimpleQueue()
    reach = leaves.agent._connections._reach

    def slow_reach(target: Any) -> Any:
        channel = reach(target)
        made.set()
        assert goes_on.wait(PATIENCE)
        return channel

    monkeypatch.setattr(leaves.agent._connections, "_reach", slow_reach)
    stays.agent.lost.append(lambda _, reason: heard.put(reason))
    leaves.agent.notify("w0", Greeting())
    assert made.wait(PATIENCE)
    leaves.end("")
    goes_on.set()
    assert isinstance(heard.get(timeout=PATIENCE), ShutDown)


def test_a_worker_that_left_in_order_is_not_lost(group: list[Worker], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "telegrad")
    stays, leaves = group
    who = leaves.me.identity
    doubt = Suspect(leaves.me, PeerUnreachable("it does not listen any more"), 0.0, 0.0)
    stays.agent._connections.tell_lost(who, ShutDown("worker 'w1' shut down"))  # while it is looked for
    assert stays.membership._settle(doubt, False) == []
    stays.agent._connections.tell_lost(who, PeerLost("another connection to it ended"))
    assert [worker.name for worker in stays.membership.present()] == ["w0"]
    assert not caplog.records


def broken_off() -> PeerUnreachable:
    """Return the error of a connection that is reset in its handshake."""
    error = PeerUnreachable("worker broke off the handshake")
    error.__cause__ = ConnectionResetError("reset")
    return error


@pytest.mark.parametrize(("sender", "kind"), [(0, Ask), (0, Leave), (1, Entered), (1, Quiet)])
def test_a_letter_whose_connection_is_reset_is_sent_again(
    group: list[Worker], monkeypatch: pytest.MonkeyPatch, sender: int, kind: type
) -> None:
    """Neither worker leaves without the other, though the first handshake breaks off."""
    agent, to = group[sender].agent, group[1 - sender].me.identity
    notify, lost = agent.notify, list[Message]()

    def fail_once(receiver: Any, message: Message) -> None:
        if type(message) is kind and not lost:
            lost.append(message)
            agent._connections.tell_lost(to, broken_off())
        else:
            notify(receiver, message)

    monkeypatch.setattr(agent, "notify", fail_once)
    both = [leaving(worker) for worker in group]
    for each in both:
        assert_ends(each)
    assert lost
    for worker in group:
        assert isinstance(worker.parting, LeavingTogether)
        assert worker.parting._farewell.lost_ones == set()


@pytest.mark.parametrize(
    "is_silent",
    [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="fills a queue of Linux's"))],
)
def test_a_worker_found_dead_after_a_broken_handshake_is_not_waited_for(group: list[Worker], is_silent: bool) -> None:
    stays, dead = group
    with contextlib.ExitStack() as stack:
        address = "127.0.0.1", free_port()
        if is_silent:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            address = server.getsockname()
            stack.enter_context(socket.create_connection(address))  # the queue is full: further packets are dropped
        stays.membership._present[dead.me.incarnation] = dead.me._replace(tcp=address)
        waits = leaving(stays)
        times(stays).get(timeout=PATIENCE)
        stays.agent._connections.tell_lost(dead.me.identity, broken_off())
        assert_ends(waits)
    with pytest.raises(PeerLost, match=r"'w1' was lost .*broke off the handshake"):
        stays.parting.check([dead.me])


def test_a_dead_worker_whose_address_answers_is_not_waited_for(
    group: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy accepts connections to the worker, and closes them."""
    monkeypatch.setattr(parting, "BROKEN", 0.0)
    stays, dead = group
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        stays.membership._present[dead.me.incarnation] = dead.me._replace(tcp=proxy.getsockname())
        waits = leaving(stays)
        times(stays).get(timeout=PATIENCE)
        stays.agent._connections.tell_lost(dead.me.identity, broken_off())
        assert isinstance(stays.parting, LeavingTogether)
        assert stays.parting._farewell.lost_ones == set(), "once is no death"
        stays.agent._connections.tell_lost(dead.me.identity, broken_off())
        assert_ends(waits)


def test_repeated_broken_handshakes_are_a_single_doubt(group: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each answer to a knock leads to another attempt, and each attempt to more knocks."""
    stays, other = group
    monkeypatch.setattr(stays.membership, "_settle_doubts", lambda: None)
    for _ in range(3):
        stays.membership._on_lost(other.me.identity, broken_off())
    assert len(stays.membership._doubts) == 1
    stays.membership._on_lost(other.me.identity, PeerLost("its connection broke"))  # it may have died since
    assert len(stays.membership._doubts) == 2
