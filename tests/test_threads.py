"""Threads that are started when they are first wanted."""

from __future__ import annotations

import threading

import pytest

from telegrad.threads import Background
from tests.cluster import PATIENCE, in_threads


def test_a_thread_that_many_want_is_started_once():
    runs, gate = [], threading.Event()
    thread = Background("wanted", lambda: (runs.append(threading.current_thread().name), gate.wait(PATIENCE)))
    thread.join(0)  # nobody has wanted it
    in_threads(*[thread.want] * 8)
    gate.set()
    thread.join(PATIENCE)
    assert runs == ["wanted"]


def test_a_thread_that_could_not_be_started_is_started_for_the_next(monkeypatch):
    runs = []
    thread = Background("wanted", lambda: runs.append(True))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            thread.want()
    thread.want()
    thread.join(PATIENCE)
    assert runs == [True]


def test_a_thread_does_not_wait_for_itself():
    ended = threading.Event()
    thread = Background("wanted", lambda: (thread.join(PATIENCE), ended.set()))
    thread.want()
    assert ended.wait(PATIENCE)
