"""A thread that finds no memory before it runs."""

from __future__ import annotations

import threading

import pytest

from telegrad._core import threads


def test_the_start_of_a_thread_that_never_runs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LONGEST_START", 0.1)
    monkeypatch.setattr(threads.Thread, "_bootstrap", lambda _: None)  # as one that ends before it says that it runs
    with pytest.raises(RuntimeError, match="is enough memory left for it"):
        threads.Thread(lambda: None, "one").start()


def test_a_thread_runs() -> None:
    ran = threading.Event()
    thread = threads.Thread(ran.set, "one")
    assert thread.daemon
    thread.start()
    thread.join(10)
    assert ran.is_set()
