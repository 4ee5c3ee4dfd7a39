"""Gradients that are being sent, with the timer as a rival thread; tasks, which one thread at a time runs."""

import queue
import threading
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from telegrad._core.agent import agent as agents
from telegrad._core.membership.members import Identity
from telegrad._core.wire.messages import HAS_GRAPH, LOW_PRIORITY, Message
from telegrad.autograd.contexts import AutogradContext, Mailbox
from telegrad.autograd.passes import DeclareDead, Key, PackedShipment, PassReport, PassSpec
from telegrad.autograd.send_recv import MOST_CARRIED, Outbox
from tests.autograd.rivals import Rival

DRIVER, OTHER = Identity("driver", 0, "a"), Identity("other", 1, "b")
SPEC = PassSpec(1, "driver", 1, False, False, False, ("driver",))


class Agent:
    """Records the sent messages, and the workers whose reports they contain."""

    name = "me"
    streams = SimpleNamespace(used=(), publish=lambda: None)

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[str]]] = []

    def notify(self, to: str, message: PackedShipment, *_: Any) -> None:
        self.sent.append((to, [worker for worker, *_ in message.reports]))


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def outbox(agent: Any) -> Outbox:
    return Outbox(agent, AutogradContext(1, count(1)), SPEC, True, lambda _: None)


ONES = [torch.ones(1)]


def report(worker: str = "me") -> PassReport:
    return PassReport(SPEC, worker, 1, [], [], False, [])


def shipment(*reports: PassReport) -> PackedShipment:
    return PackedShipment(SPEC, ("other", 1), [], [each[1:] for each in reports])


def test_the_last_gradients_of_a_step_contain_the_report(outbox: Outbox, agent: Agent) -> None:
    assert outbox.finish(report) == [report()]
    outbox.add(DRIVER, 1, ONES, False, False)
    assert agent.sent == [("driver", [])]
    outbox.add(OTHER, 2, ONES, False, True)
    outbox.flush()
    assert agent.sent == [("driver", [])]
    assert not outbox.finish(report)
    assert agent.sent == [("driver", []), ("other", ["me"])]


def test_reports_of_other_workers_are_sent_with_the_own_one(outbox: Outbox, agent: Agent) -> None:
    assert not outbox.carry(shipment(report("one"), report("two")))
    outbox.add(OTHER, 1, ONES, False, True)
    assert not outbox.finish(report)
    assert agent.sent == [("other", ["one", "two", "me"])]
    assert not outbox.carry(shipment(report("one")))
    assert outbox.finish(report) == [report("one"), report()]


def test_many_reports_are_sent_to_the_driver_at_once(outbox: Outbox) -> None:
    few = [report(str(number)) for number in range(MOST_CARRIED)]
    assert not outbox.carry(shipment(*few))
    assert outbox.carry(shipment(report())) == [*few, report()]


def test_a_slow_worker_keeps_no_report(outbox: Outbox, agent: Agent) -> None:
    outbox.carry(shipment(report("one")))
    assert (outbox.send_early(), outbox.carry(shipment(report("two")))) == ([report("one")], [report("two")])
    outbox.add(OTHER, 1, ONES, False, True)
    assert agent.sent == [("other", [])]


def test_if_the_timer_sends_the_gradients_the_caller_sends_the_reports(outbox: Outbox, agent: Agent) -> None:
    outbox.add(DRIVER, 1, ONES, False, True)
    Rival.at(outbox).act = outbox.send_early
    assert outbox.finish(report) == [report()]
    assert agent.sent == [("driver", [])]


def test_a_thread_with_nothing_to_send_finds_the_sent_gradients(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its report would miss gradients that the timer sends at this moment."""
    flushing: list[threading.Thread] = []
    seen: list[list[tuple[Key, str]]] = []
    key = outbox.key

    def look() -> None:
        outbox.flush()
        seen.append(outbox.sent)

    def look_meanwhile(worker: str) -> Key:
        flushing.append(threading.Thread(target=look))
        flushing[0].start()
        flushing[0].join(0.05)
        return key(worker)

    monkeypatch.setattr(outbox, "key", look_meanwhile)
    outbox.add(OTHER, 1, ONES, True, False)
    outbox.send_early()
    flushing[0].join()
    assert [to for _, to in seen[0]] == ["other"]


def test_a_low_priority_message_may_have_a_context() -> None:
    context: Any = SimpleNamespace(sent=lambda *_: b"of the context")
    sent: list[Message] = []
    peer = SimpleNamespace(identity=OTHER, notify=lambda message, _: sent.append(message))
    own: Any = SimpleNamespace(_connections=SimpleNamespace(names={"other": peer}), _timer=Mock())
    agents.Agent.notify(own, "other", report(), context=context, patient=True)
    assert sent[0].flags == LOW_PRIORITY | HAS_GRAPH


TASK, ANOTHER = DeclareDead(SPEC, ("", 1)), DeclareDead(SPEC, ("", 2))


def test_a_thread_runs_tasks_until_the_mailbox_is_empty() -> None:
    mailbox = Mailbox()
    assert mailbox.put(TASK, False)
    assert not mailbox.put(ANOTHER, False)
    assert mailbox.take() == [TASK, ANOTHER]
    assert not mailbox.put(TASK, True)
    assert (mailbox.take(), mailbox.take()) == ([TASK], [])
    assert mailbox.put(TASK, False)


def test_a_waiting_thread_is_called_unless_the_caller_runs_the_task() -> None:
    mailbox, calls = Mailbox(), queue.SimpleQueue[bool]()
    mailbox.call(calls)
    assert not mailbox.put(TASK, False)
    assert not mailbox.put(ANOTHER, False)
    assert calls.get_nowait()
    assert calls.empty()
    assert (mailbox.take(), mailbox.take()) == ([TASK, ANOTHER], [])
    assert mailbox.put(TASK, True)
    assert calls.empty()
    assert (mailbox.take(), mailbox.take()) == ([TASK], [])
    mailbox.call(None)
    assert mailbox.put(TASK, False)
