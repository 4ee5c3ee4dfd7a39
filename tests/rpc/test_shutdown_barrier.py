"""Tests of the wait in `shutdown`: a worker sleeps until something changes, and does not wait for dead workers."""

import contextlib
import logging
import operator
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import telegrad.rpc as rpc
from telegrad._core import texts
from telegrad._core.membership import leaving
from telegrad._core.membership.leaving import LeavingTogether
from telegrad._core.membership.membership import Greeting
from telegrad._core.membership.shutdown_barrier import Ask, Entered, Leave, Message, Quiet
from telegrad._core.membership.suspects import Suspect
from telegrad._core.texts import FIRST
from telegrad._core.worker.current import Worker
from telegrad.errors import PeerError, PeerLost, PeerUnreachable, ShutDown, TelegradError
from tests.cluster import PATIENCE, agents, free_port, wait_until
from tests.cluster import group as processes_of_group

begun, may_end = threading.Event(), threading.Event()


class Slept(threading.Condition):
    """A condition that records the timeout of each wait."""

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
            worker.leaving._changed = Slept()
        yield made


def times(worker: Worker) -> queue.SimpleQueue[float]:
    """Return the timeouts with which a worker waits in shutdown."""
    changed = worker.leaving._changed
    assert isinstance(changed, Slept)
    return changed.times


def begin_to_leave(worker: Worker) -> threading.Thread:
    thread = threading.Thread(target=worker.shutdown, args=(True, 0))
    thread.start()
    return thread


def assert_ends(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


def together(worker: Worker) -> LeavingTogether:
    assert isinstance(worker.leaving, LeavingTogether)
    return worker.leaving


@pytest.mark.parametrize("server", [0, 1], ids=["leads", "is led"])
def test_a_server_that_waits_in_shutdown_sleeps_while_it_serves(group: list[Worker], server: int) -> None:
    waits, other = begin_to_leave(group[server]), group[1 - server]
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
    both = [begin_to_leave(worker) for worker in group]
    for worker in group:
        while times(worker).get(timeout=PATIENCE) > 1:
            pass  # it was not asked yet
    may_end.set()
    assert_ends(*both)
    call.wait()


def test_a_worker_that_goes_on_calling_during_shutdown_counts_its_calls(
    group: list[Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(texts, "FIRST", 0.5)
    caplog.set_level(logging.INFO, "telegrad")
    stop = threading.Event()
    begun.clear()
    may_end.clear()
    held = group[1].agent.call_async(0, work, None, None)  # else the barrier may end between two calls of the loop
    assert begun.wait(PATIENCE)

    def call_in_a_loop() -> None:
        while not stop.is_set():
            group[1].agent.call(0, operator.add, (1, 2), None)

    calling = threading.Thread(target=call_in_a_loop)
    calling.start()
    both = [begin_to_leave(worker) for worker in group]
    try:
        wait_until(lambda: "worker 'w1' itself has begun calls meanwhile (" in caplog.text)
    finally:
        stop.set()
        may_end.set()
    assert_ends(calling, *both)
    held.wait()


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
    slow = threading.Thread(target=leader.leaving._begin)
    slow.start()
    assert greets.wait(PATIENCE)
    together(leader)._on_message(other.me.identity, Entered())
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
    suspect = Suspect(leaves.me, PeerUnreachable("it does not listen any more"), 0.0, 0.0)
    stays.agent._connections.tell_lost(who, ShutDown("worker 'w1' shut down"))  # while it is looked for
    assert stays.membership._settle(suspect, False) == []
    stays.agent._connections.tell_lost(who, PeerLost("another connection to it ended"))
    assert [worker.name for worker in stays.membership.present()] == ["w0"]
    assert not caplog.records


def connect(worker: Worker, to: Worker) -> None:
    """Connect two workers. Otherwise the barrier does, and a removed worker would be back once that is done."""
    worker.agent.call(to.me.name, abs, (1,), None)


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
    both = [begin_to_leave(worker) for worker in group]
    assert_ends(*both)
    assert lost
    assert [together(worker)._barrier.lost_ones for worker in group] == [set()] * 2


@pytest.mark.parametrize(
    "is_silent",
    [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="fills a queue of Linux's"))],
)
def test_a_worker_found_dead_after_a_broken_handshake_is_not_waited_for(
    group: list[Worker], monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    stays, dead = group
    connect(stays, dead)
    monkeypatch.setattr(dead.agent, "notify", lambda *_: None)  # an answer would show that it lives
    with contextlib.ExitStack() as stack:
        address = "127.0.0.1", free_port()
        if is_silent:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            address = server.getsockname()
            stack.enter_context(socket.create_connection(address))  # the queue is full: further packets are dropped
        stays.membership._present[dead.me.incarnation] = dead.me._replace(tcp=address)
        waits = begin_to_leave(stays)
        times(stays).get(timeout=PATIENCE)
        stays.agent._connections.tell_lost(dead.me.identity, broken_off())
        assert_ends(waits)
    with pytest.raises(PeerLost, match=r"'w1' was lost .*broke off the handshake"):
        stays.leaving.check([dead.me])


def test_a_dead_worker_whose_address_answers_is_not_waited_for(
    group: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy accepts connections to the worker, and closes them."""
    monkeypatch.setattr(leaving, "BROKEN", 0.0)
    stays, dead = group
    connect(stays, dead)
    monkeypatch.setattr(dead.agent, "notify", lambda *_: None)  # an answer would show that it lives
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        stays.membership._present[dead.me.incarnation] = dead.me._replace(tcp=proxy.getsockname())
        waits = begin_to_leave(stays)
        times(stays).get(timeout=PATIENCE)
        stays.agent._connections.tell_lost(dead.me.identity, broken_off())
        assert together(stays)._barrier.lost_ones == set(), "once is no death"
        stays.agent._connections.tell_lost(dead.me.identity, broken_off())
        assert_ends(waits)


def test_handshakes_that_fail_now_and_then_are_no_death(group: list[Worker]) -> None:
    """A worker that has not called shutdown answers, too."""
    leader, other = group
    waits = begin_to_leave(other)
    times(other).get(timeout=PATIENCE)
    other.agent._connections.tell_lost(leader.me.identity, broken_off())
    wait_until(lambda: not together(other)._broken)
    leader.shutdown(True, PATIENCE)
    assert_ends(waits)


def test_a_living_worker_that_seemed_dead_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "BROKEN", -1.0)
    with agents(3) as made:
        leader, other, third = made
        waits = [begin_to_leave(other), begin_to_leave(third)]
        wait_until(lambda: together(other)._barrier.inside)
        other.agent._connections.tell_lost(leader.me.identity, broken_off())
        waits.append(begin_to_leave(leader))
        assert_ends(*waits)
        assert [together(worker)._barrier.lost_ones for worker in made] == [set()] * 3


def break_all(duration: float) -> None:
    """Break the TCP connections of this process, also those that begin, for some seconds."""
    ends = time.monotonic() + duration
    while time.monotonic() < ends:
        for name in os.listdir("/proc/self/fd"):
            # `fromfd` does not look at what it duplicates; `getpeername` raises for other files than sockets.
            with contextlib.suppress(OSError), socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as sock:
                if isinstance(sock.getpeername(), tuple):  # no Unix socket
                    sock.shutdown(socket.SHUT_RDWR)
        threading.Event().wait(0.03)


def begin_to_break(duration: float) -> None:
    threading.Timer(0.3, break_all, (duration,)).start()  # the call that runs this is answered first


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("_", range(5))
def test_processes_whose_connections_broke_in_shutdown_end(_: int) -> None:
    with processes_of_group(3, transport="tcp") as made:
        for process in made[1:]:
            process.begin(rpc.shutdown, True, 60)
        for duration in (0.1, 2.5):
            made[0].run(call_others, begin_to_break, duration)
            made[0].run(call_for, 3.0)
        made[0].run(rpc.shutdown, True, 60)
        for process in made[1:]:
            process.end()


def call_others(function: Any, *args: Any) -> None:
    for name in ("worker1", "worker2"):
        rpc.rpc_sync(name, function, args)


def call_for(duration: float) -> None:
    """Call the others, which call each other, so that connections are made again all the time."""
    ends = time.monotonic() + duration
    while time.monotonic() < ends:
        for name, other in (("worker1", "worker2"), ("worker2", "worker1")):
            with contextlib.suppress(TelegradError):
                rpc.rpc_sync(name, rpc.rpc_sync, (other, operator.neg, (1,)), timeout=5)


def test_repeated_broken_handshakes_are_a_single_suspect(group: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each answer to a knock leads to another attempt, and each attempt to more knocks."""
    stays, other = group
    monkeypatch.setattr(stays.membership, "_check_suspects", lambda: None)
    for _ in range(3):
        stays.membership._on_lost(other.me.identity, broken_off())
    assert len(stays.membership._suspects) == 1
    stays.membership._on_lost(other.me.identity, PeerLost("its connection broke"))  # it may have died since
    assert len(stays.membership._suspects) == 2
