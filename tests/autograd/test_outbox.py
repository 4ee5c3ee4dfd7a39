"""Gradients on their way out, with the clock as a rival for what waits; tasks, which one thread at a time runs."""

from __future__ import annotations

import queue
import threading
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad._core.agent.outgoing import notice_to
from telegrad._core.membership.members import Identity
from telegrad._core.wire.messages import HAS_GRAPH, LOW_PRIORITY
from telegrad.autograd.outbox import Outbox
from telegrad.autograd.passes import DeclareDead, Key, PackedShipment, PassReport, PassSpec
from telegrad.autograd.record import AutogradContext, Mailbox
from tests.autograd.rivals import Rival

DRIVER, OTHER = Identity("driver", 0, "a"), Identity("other", 1, "b")
SPEC = PassSpec(1, "driver", 1, False, False, False, ("driver",))


class Agent:
    """Takes note of what is sent, and whether the report went along."""

    name = "me"
    streams = SimpleNamespace(used=(), publish=lambda: None)

    def __init__(self) -> None:
        self.sent: list[tuple[str, bool]] = []

    def notify(self, to: str, message: PackedShipment, *_: Any) -> None:
        self.sent.append((to, message.report is not None))


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def outbox(agent: Any) -> Outbox:
    return Outbox(agent, AutogradContext(1, count(1)), SPEC, True, lambda _: None)


def report() -> PassReport:
    return PassReport(SPEC, 1, [], [], False, [])


def test_the_last_gradients_for_the_driver_take_the_report_along(outbox: Outbox, agent: Agent) -> None:
    assert not outbox.send_with(report)
    outbox.add(OTHER, 1, [torch.ones(1)], False)
    outbox.add(DRIVER, 2, [torch.ones(1)], False)
    assert agent.sent == [("other", False)]
    assert outbox.send_with(report)
    assert agent.sent == [("other", False), ("driver", True)]


def test_where_the_clock_sends_them_first_the_report_is_left_to_the_caller(outbox: Outbox, agent: Agent) -> None:
    outbox.add(DRIVER, 1, [torch.ones(1)], False)
    Rival.at(outbox).act = outbox.send_early
    assert not outbox.send_with(report)
    assert agent.sent == [("driver", False)]


def test_a_thread_that_finds_nothing_to_send_finds_what_has_left(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the report would not tell of what the clock sends at this moment."""
    flushing: list[threading.Thread] = []
    seen: list[list[tuple[Key, str]]] = []
    key = outbox.key

    def look() -> None:
        outbox.flush()
        seen.append(outbox.pop_sent())

    def look_meanwhile(worker: str) -> Key:
        flushing.append(threading.Thread(target=look))
        flushing[0].start()
        flushing[0].join(0.05)
        return key(worker)

    monkeypatch.setattr(outbox, "key", look_meanwhile)
    outbox.add(OTHER, 1, [torch.ones(1)], True)
    outbox.send_early()
    flushing[0].join()
    assert [to for _, to in seen[0]] == ["other"]


def test_a_message_that_waits_for_company_may_have_a_context() -> None:
    context: Any = SimpleNamespace(sent=lambda *_: b"of the context")
    report = PassReport(SPEC, 1, (), (), False, ())
    notice = notice_to(SimpleNamespace(identity=OTHER), report, (), context, True, False)  # type: ignore[arg-type]
    assert notice.flags == LOW_PRIORITY | HAS_GRAPH


TASK, ANOTHER = DeclareDead(SPEC, ("", 1)), DeclareDead(SPEC, ("", 2))


def test_one_thread_runs_tasks_until_it_finds_none() -> None:
    mailbox = Mailbox()
    assert mailbox.put(TASK, False)
    assert not mailbox.put(ANOTHER, False)
    assert mailbox.take() == [TASK, ANOTHER]
    assert not mailbox.put(TASK, True)
    assert mailbox.take() == [TASK]
    assert mailbox.take() == []
    assert mailbox.put(TASK, False)


def test_a_thread_that_waits_is_called_unless_the_caller_runs_the_task() -> None:
    mailbox, calls = Mailbox(), queue.SimpleQueue[bool]()
    mailbox.call(calls)
    assert not mailbox.put(TASK, False)
    assert not mailbox.put(ANOTHER, False)
    assert calls.get_nowait()
    assert calls.empty()
    assert mailbox.take() == [TASK, ANOTHER]
    assert mailbox.take() == []
    assert mailbox.put(TASK, True)
    assert calls.empty()
    assert mailbox.take() == [TASK]
    assert mailbox.take() == []
    mailbox.call(None)
    assert mailbox.put(TASK, False)
