"""Tests of the members as one worker sees them: news from the directory and from connections, in either order."""

import contextlib
import logging
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.membership.leaving import MessageQueue
from telegrad._core.membership.members import Identity
from telegrad._core.membership.membership import CallbackThread
from telegrad._core.membership.registry import LEFT, LOST, MemberJoined, Registered
from telegrad._core.membership.suspects import Suspect
from telegrad._core.rpc import cluster
from telegrad._core.stores.directory import DirectoryLost
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CallTimeout, LeftEarly, LimitReached, PeerError, PeerLost, PeerSilent, TelegradError
from tests.cluster import PATIENCE, agents, in_background, wait_until


@pytest.mark.parametrize(("reason", "is_suspected"), [(PeerSilent("stopped"), False), (PeerLost("died"), True)])
def test_a_worker_that_was_silent_before_it_was_seen_is_not_taken_for_dead(
    reason: PeerError, is_suspected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agents(1, dynamic=True) as (worker,):
        membership = worker.membership
        monkeypatch.setattr(membership, "_check_suspects", lambda: None)
        other = worker.me._replace(name="other", id=7, incarnation="life of other")
        membership._on_lost(other.identity, reason)
        membership._apply(MemberJoined(Registered(other, 1)))
        assert [suspect.who for suspect in membership._suspects] == [other] * is_suspected


def ends_of(worker: Worker) -> queue.SimpleQueue[str]:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    worker.membership.wait_for(2, PATIENCE)
    worker.membership.on_leave(lambda _, how: told.put(how))
    return told


def test_a_member_that_left_is_not_lost_if_the_directory_reports_it_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The member has closed its listener before the directory reports to the others that it has left."""
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    with agents(2, dynamic=True) as (worker, other):
        registry, told = worker.directory.registry, ends_of(worker)
        declare = registry.declare_lost
        monkeypatch.setattr(registry, "declare_lost", lambda life, why: asked.put(declare(life, why)))
        with worker.directory._applying:  # the watch waits
            other.end("")
            worker.membership._on_lost(other.me.identity, PeerLost("its connection broke"))
            assert not asked.get(timeout=PATIENCE)  # the directory had removed the member already
            assert other.me in worker.membership.present()
            assert told.empty()
        assert told.get(timeout=PATIENCE) == LEFT
        wait_until(lambda: other.me not in worker.membership.present())
    assert not [each.message for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_wait_for_workers_does_not_count_one_that_is_perhaps_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(2, dynamic=True) as (worker, other):
        worker.agent.call_async("w1", len, ("",), {}).wait()
        other.agent.call_async("w0", len, ("",), {}).wait()
        with monkeypatch.context() as held:
            held.setattr(worker.membership, "_check_suspects", lambda: 0.01)  # is not probed yet
            worker.membership._on_lost(other.me.identity, PeerLost("its connection broke"))
            for wanted in (2, ["w1"]):
                with pytest.raises(CallTimeout, match=r"not 2|w1"):
                    worker.membership.wait_for(wanted, 0.02)
        assert len(worker.membership.wait_for(2, PATIENCE)) == 2  # it has answered


def test_a_worker_does_not_take_the_others_for_dead_before_it_learns_of_its_own_loss() -> None:
    """It was stopped for longer than its lease lasts, and reads its connections before the directory."""
    with agents(2, dynamic=True) as (worker, other):
        reasons: list[str] = []
        other.agent.call_async("w0", len, ("",), {}).wait()
        other.agent.lost.append(lambda _, why: reasons.append(str(why)))
        with other.directory._applying:  # its watch waits
            worker.directory.registry.declare_lost(other.me.incarnation, "a test")
            wait_until(lambda: reasons)
            with pytest.raises(PeerLost):  # a new connection
                other.agent.call_async("w0", len, ("",), {}).wait()
            wait_until(lambda: len(reasons) > 1)
        assert all("this worker gave no sign of life" in why for why in reasons), reasons


def test_a_worker_that_is_declared_lost_while_init_rpc_returns_is_not_a_worker_any_more() -> None:
    with agents(1, dynamic=True) as (worker,):

        def begin() -> Worker:
            with contextlib.suppress(DirectoryLost):  # it is closed as soon as the watch reports the loss
                worker.directory.registry.declare_lost(worker.me.incarnation, "a test")
            wait_until(lambda: worker.agent.closed)
            return worker

        with pytest.raises(PeerLost, match=r"'w0' was declared lost \(a test\)"):
            cluster.enter(begin, TelegradOptions())
        assert current.worker is None


def test_a_lost_worker_that_greets_by_a_connection_that_held_is_taken_back() -> None:
    with agents(2) as (worker, other):
        other.agent.call_async("w0", len, ("",), {}).wait()
        with worker.membership._changed:
            worker.membership._take_out(other.me, PeerSilent("stopped"))
        assert worker.membership.present() == [worker.me]
        other.membership.greet()
        wait_until(lambda: other.me in worker.membership.present())


def test_a_lost_worker_that_answers_before_its_loss_is_reported_is_in_the_group() -> None:
    with agents(2) as (worker, other):
        membership, report = worker.membership, worker.membership.on_dead

        def report_late(who: Identity, why: PeerError) -> None:
            membership._on_reached(who)
            report(who, why)

        membership.on_dead = report_late
        membership._find_dead(Suspect(other.me, PeerSilent("stopped"), time.monotonic(), 0.0), "silence")
        assert membership.present() == [worker.me, other.me]
        assert not worker.leaving._barrier.lost_ones  # type: ignore[attr-defined]


may_end = threading.Event()


def wait_until_it_may_end() -> None:
    assert may_end.wait(PATIENCE)


@pytest.mark.parametrize("ends", ["declared lost", "program"])
def test_a_member_is_lost_if_its_connection_reports_before_the_directory(ends: str) -> None:
    with agents(2, dynamic=True) as (worker, other):
        may_end.clear()
        told = ends_of(worker)
        reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        worker.membership.on_lost(lambda _, why: reasons.put(str(why)))
        call = worker.agent.call_async("w1", wait_until_it_may_end, (), {})
        wait_until(lambda: not other.agent.idle)
        with worker.directory._applying:  # the watch waits
            if ends == "program":
                other.end_with_the_program()
            else:
                worker.directory.registry.declare_lost(other.me.incarnation, "a test")
            with pytest.raises(LeftEarly, match=r"declared lost|its program ended"):
                call.wait()
            assert told.empty()
        may_end.set()
        assert told.get(timeout=PATIENCE) == LOST
        assert ("a test" if ends == "declared lost" else "ended without rpc") in reasons.get(timeout=PATIENCE)


def test_a_worker_that_ends_with_its_program_is_not_told_of_its_own_loss(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agents(2, dynamic=True) as (_, other):
        may_end.clear()
        call, close = other.agent.call_async("w0", wait_until_it_may_end, (), {}), other.agent.close
        # The other worker hears of the end, and closes the connection, before this one does.
        monkeypatch.setattr(other.agent, "close", lambda *args: [wait_until(call.done), close(*args)])  # type: ignore[func-returns-value]
        other.end_with_the_program()
        may_end.set()
        with pytest.raises(PeerLost, match="no sign of life"):
            call.wait()
        told = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert told == ["telegrad: worker 'w1' was lost: its program ended without rpc.shutdown()"]


@pytest.mark.parametrize(
    ("is_known", "error"),
    [(True, None), (False, DirectoryLost("etcd did not answer")), (False, LimitReached("the directory is full"))],
)
def test_a_dead_member_is_removed_if_the_directory_cannot_record_that(
    is_known: bool, error: TelegradError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is known to be lost before, or a request shows it only then."""

    with agents(2, dynamic=True) as (worker, other):
        told = ends_of(worker)
        with worker.directory._applying, monkeypatch.context() as patched:
            patched.setattr(worker.directory, "is_lost", is_known)
            patched.setattr(worker.directory.registry, "declare_lost", Mock(side_effect=error))
            other.end("a test", lost=True)
            worker.membership._on_lost(other.me.identity, PeerLost("its connection broke"))
            assert told.get(timeout=PATIENCE) == LOST
            assert worker.membership.present() == [worker.me]
        assert told.empty()


def test_messages_are_sent_in_the_order_in_which_they_were_added() -> None:
    """A thread that is sending already also sends the messages that another thread adds meanwhile."""
    sent: list[tuple[str]] = []
    begun, goes_on = threading.Event(), threading.Event()

    class Post:
        def notify(self, to: int, message: tuple[str]) -> None:
            begun.set()
            assert goes_on.wait(PATIENCE)
            sent.append(message)
            if len(sent) == 1:
                raise PeerLost("it has gone")

    messages = MessageQueue(Post())  # type: ignore[arg-type]
    messages.add([(1, ("first",)), (2, ("second",))])
    with in_background(messages.send):
        assert begun.wait(PATIENCE)
        messages.add([(1, ("third",))])
        messages.send()
        assert sent == []
        goes_on.set()
    assert sent == [("first",), ("second",), ("third",)]


# Callbacks


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_callbacks_go_on_after_a_failure(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    heard = queue.SimpleQueue[str]()

    def fail(_: Any) -> None:
        raise error

    teller, member = CallbackThread(lambda: None), SimpleNamespace(name="w1")
    teller.thread.want()
    teller.tell(fail, member)
    teller.tell(lambda each: heard.put(each.name), member)
    assert heard.get(timeout=PATIENCE) == "w1"
    teller.close()
    assert f"a callback of on_join, on_leave or on_lost failed for {member}" in caplog.text
