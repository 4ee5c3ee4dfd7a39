"""Tests of control messages of extensions that one worker has, and another has not."""

import time
from typing import NamedTuple

import pytest

from telegrad import errors
from telegrad._core.transport.link import Link
from telegrad._core.wire.messages import Message
from tests.cluster import agents, wait_until
from tests.rpc.test_publishing import Crowd


class Ping(NamedTuple):
    number: int


class Pong(NamedTuple):
    number: int


def test_a_worker_without_the_extension_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with agents(2) as (one, other):
        got: list[int] = []
        other.agent.on(Pong, lambda _, message: got.append(message.number))
        for number in range(5):
            one.agent.notify("w1", Ping(number))
        one.agent.notify("w1", Pong(7))
        wait_until(lambda: got == [7])
    assert caplog.text.count("worker 'w0' sends messages 'Ping'") == 1
    assert "Traceback" not in caplog.text


def test_two_classes_of_one_name_are_refused() -> None:
    with agents(1) as (one,):
        one.agent.on(Ping, lambda _, message: None)
        other: type = type("Ping", (), {})
        with pytest.raises(errors.UsageError, match=r"Ping has the same name as another class"):
            one.agent.on(other, lambda _, message: None)


def test_a_tick_that_fails_does_not_prevent_others() -> None:
    with agents(1) as (one,):
        called: list[float] = []

        def tick(now: float) -> float:
            called.append(now)
            return now + 1

        one.agent.ticking += [lambda now: 1 / 0, tick]
        one.agent.wake_at(time.monotonic())
        wait_until(lambda: called)


def test_nothing_is_kept_for_workers_that_have_left(crowd: Crowd) -> None:
    agent = crowd.workers["w0"].agent
    before = agent._connections._peers.keys() - set()
    for number in range(3):
        visitor = crowd.add("visitor")
        assert agent.call("visitor", abs, (-number,), None) == number
        identity = agent.identify("visitor")
        visitor.end("")
        del crowd.workers["visitor"]
        wait_until(lambda: agent.wake_at(time.monotonic()) or agent._connections._peers.keys() <= before)
        with pytest.raises(errors.PeerLost, match="'visitor' is no longer in the group"):
            agent.call(identity, abs, (1,), None)
    assert agent.started >= 3


def test_messages_after_the_report_of_a_loss_are_lost_with_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends with the first message, and the thread that connects drops the second."""
    with agents(2, transport="tcp") as (one, _):
        known: list[str] = []
        one.agent.lost.append(lambda _, why: known.append(f"reported: {why}"))
        true = Link.send

        def send(link: Link, message: Message, later: bool = False) -> bool:
            monkeypatch.setattr(Link, "send", true)
            link.close(errors.PeerLost("cut"))
            one.agent.notify("w1", Ping(2))
            known.append("sent")
            return link.send(message, later)

        monkeypatch.setattr(Link, "send", send)
        one.agent.notify("w1", Ping(1))
        wait_until(lambda: known == ["reported: cut", "sent", "reported: cut"])
