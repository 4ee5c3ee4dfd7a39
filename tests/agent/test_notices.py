"""Tests of control messages of extensions that one worker has, and another has not."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest

from telegrad import errors
from tests.cluster import agents, wait_until


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
