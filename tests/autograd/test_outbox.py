"""Gradients on their way out, with the clock as a rival for what waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad._core.agent.notices import notice_to
from telegrad._core.membership.members import Identity
from telegrad._core.wire.messages import HAS_GRAPH, LOW_PRIORITY
from telegrad.autograd.engine.outbox import Outbox, PackedShipment, unpacked
from telegrad.autograd.engine.passes import Key, Ledger, PassSpec, Report, Shipment
from telegrad.autograd.engine.record import AutogradContext
from tests.autograd.rivals import Rival

DRIVER, OTHER = Identity("driver", 0, "a"), Identity("other", 1, "b")
SPEC = PassSpec(1, "driver", 1, False, False, False, ("driver",))


class Agent:
    """Takes note of what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, tuple[Shipment, Report | None]]] = []
        self.streams = SimpleNamespace(used=(), publish=lambda: None)

    def notify(
        self,
        to: str,
        message: PackedShipment,
        incarnation: str = "",
        tensors: Sequence[torch.Tensor] = (),
        context: None = None,
    ) -> None:
        self.sent.append((to, unpacked(message._replace(tensors=tensors))))


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def outbox(agent: Any) -> Outbox:
    return Outbox(agent, AutogradContext(1, count(1)), Ledger(SPEC, "me"), True, lambda _: None)


def report() -> Report:
    return Report(SPEC, 1, [], [], False, [])


def reports_sent(agent: Agent) -> list[str]:
    return [to for to, (_, report) in agent.sent if report is not None]


def test_the_last_gradients_for_the_driver_take_the_report_along(outbox: Outbox, agent: Agent) -> None:
    outbox.add(OTHER, 1, [torch.ones(1)], False)
    outbox.add(DRIVER, 2, [torch.ones(1)], False)
    assert [to for to, _ in agent.sent] == ["other"]
    assert outbox.send_with(report)
    assert [to for to, _ in agent.sent] == ["other", "driver"]
    assert reports_sent(agent) == ["driver"]


def test_where_the_clock_sends_them_first_the_report_is_left_to_the_caller(outbox: Outbox, agent: Agent) -> None:
    outbox.add(DRIVER, 1, [torch.ones(1)], False)
    Rival.at(outbox).act = outbox.send_early
    assert not outbox.send_with(report)
    assert [to for to, _ in agent.sent] == ["driver"]
    assert reports_sent(agent) == []


def test_without_anything_for_the_driver_there_is_nothing_to_take_it_along(outbox: Outbox, agent: Agent) -> None:
    assert not outbox.send_with(report)
    assert agent.sent == []


def test_who_finds_nothing_to_send_finds_what_has_left_in_the_ledger(outbox: Outbox, agent: Agent) -> None:
    """Else the report would not tell of what the clock sends at this moment."""
    ledger = outbox._ledger
    flushing: list[threading.Thread] = []
    seen: list[list[tuple[Key, str]]] = []
    ship = ledger.ship

    def look() -> None:
        outbox.flush()
        seen.append(ledger.take())

    def look_meanwhile(worker: str, gradients: Sequence[tuple[int, Sequence[Any]]]) -> Shipment:
        flushing.append(threading.Thread(target=look))
        flushing[0].start()
        flushing[0].join(0.05)
        return ship(worker, gradients)

    ledger.ship = look_meanwhile
    outbox.add(OTHER, 1, [torch.ones(1)], True)
    outbox.send_early()
    flushing[0].join()
    assert [to for _, to in seen[0]] == ["other"]


def test_a_message_that_waits_for_company_may_have_a_context() -> None:
    context: Any = SimpleNamespace(sent=lambda *_: b"of the context")
    report = Report(SPEC, 1, (), (), False, ())
    notice = notice_to(SimpleNamespace(identity=OTHER), report, (), context, True, False)  # type: ignore[arg-type]
    assert notice.flags == LOW_PRIORITY | HAS_GRAPH
