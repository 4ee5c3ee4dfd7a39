"""The threads of a worker begin and end."""

from __future__ import annotations

import threading

import pytest

from telegrad.agent.reactor import Reactor
from tests.cluster import PATIENCE


def test_it_may_be_closed_while_a_thread_of_it_is_about_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start, late, closed = threading.Thread.start, threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def start_late(thread: threading.Thread) -> None:
        threads.append(thread)
        late.set()
        assert closed.wait(PATIENCE)
        start(thread)

    reactor = Reactor(1, 1, lambda: None, lambda: None)
    starting = threading.Thread(target=reactor.start)
    monkeypatch.setattr(threading.Thread, "start", start_late)
    start(starting)
    assert late.wait(PATIENCE)
    reactor.close()
    closed.set()
    for thread in [starting, *threads]:
        thread.join(PATIENCE)
        assert not thread.is_alive()
