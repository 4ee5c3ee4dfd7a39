"""Gradients on their way out, with the clock as a rival for what waits."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from telegrad.autograd.outbox import Outbox, unwrap
from telegrad.autograd.passes import Ledger, Order, Report
from telegrad.group.members import Identity

DRIVER, OTHER = Identity("driver", 0, "a"), Identity("other", 1, "b")
ORDER = Order(1, "driver", 1, False, False, False, ("driver",))


class Agent:
    """Takes note of what is sent."""

    def __init__(self) -> None:
        self.sent = []
        self.streams = SimpleNamespace(publish=lambda: None, adopt=lambda *_: None)

    def notify(self, to, message, incarnation="", tensors=(), context=None):
        self.sent.append((to, unwrap(message._replace(tensors=tensors))))


class Rival:
    """The outbox's lock; before it is taken next, another thread gets ahead."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.act = lambda: None

    def __enter__(self):
        act, self.act = self.act, lambda: None
        act()
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


@pytest.fixture
def agent():
    return Agent()


@pytest.fixture
def outbox(agent):
    def failed(_, error):
        raise error

    made = Outbox(agent, None, Ledger(ORDER, "me"), lambda _: None, failed)
    made._lock = Rival()
    made.brief = True
    return made


def report():
    return Report(ORDER, 1, [], [], False, [])


def reports_sent(agent):
    return [to for to, (_, report) in agent.sent if report is not None]


def test_the_last_gradients_for_the_driver_take_the_report_along(outbox, agent):
    outbox.add(OTHER, 1, [torch.ones(1)], False)
    outbox.add(DRIVER, 2, [torch.ones(1)], False)
    assert [to for to, _ in agent.sent] == ["other"]
    assert outbox.send_with(report)
    assert [to for to, _ in agent.sent] == ["other", "driver"]
    assert reports_sent(agent) == ["driver"]


def test_where_the_clock_sends_them_first_the_report_is_left_to_the_caller(outbox, agent):
    outbox.add(DRIVER, 1, [torch.ones(1)], False)
    outbox._lock.act = outbox.send_early
    assert not outbox.send_with(report)
    assert [to for to, _ in agent.sent] == ["driver"]
    assert reports_sent(agent) == []


def test_without_anything_for_the_driver_there_is_nothing_to_take_it_along(outbox, agent):
    assert not outbox.send_with(report)
    assert agent.sent == []
