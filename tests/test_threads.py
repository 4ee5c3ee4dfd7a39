"""Threads that are started when they are first wanted."""

from __future__ import annotations

import threading

import pytest

from telegrad.threads import Background
from tests.cluster import PATIENCE, in_threads


def test_a_thread_that_many_want_is_started_once() -> None:
    runs: list[str] = []
    gate = threading.Event()

    def run() -> None:
        runs.append(threading.current_thread().name)
        gate.wait(PATIENCE)

    thread = Background("wanted", run)
    thread.join(0)  # nobody has wanted it
    in_threads(*[thread.want] * 8)
    gate.set()
    thread.join(PATIENCE)
    assert runs == ["wanted"]


def test_a_thread_that_could_not_be_started_is_started_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    thread = Background("wanted", lambda: runs.append(True))

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            thread.want()
    thread.want()
    thread.join(PATIENCE)
    assert runs == [True]


def test_a_thread_does_not_wait_for_itself() -> None:
    ended = threading.Event()

    def run() -> None:
        thread.join(PATIENCE)
        ended.set()

    thread = Background("wanted", run)
    thread.want()
    assert ended.wait(PATIENCE)
