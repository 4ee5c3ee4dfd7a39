"""The tasks of one context, which one thread at a time runs."""

from __future__ import annotations

import queue

from telegrad.autograd.passes import DeclareDead, PassSpec
from telegrad.autograd.record import Mailbox

SPEC = PassSpec(1, "driver", 1, False, False, False, ("driver",))
TASK, OTHER = DeclareDead(SPEC, ("", 1)), DeclareDead(SPEC, ("", 2))


def test_one_thread_runs_tasks_until_it_finds_none() -> None:
    mailbox = Mailbox()
    assert mailbox.put(TASK, False)
    assert not mailbox.put(OTHER, False)
    assert mailbox.take() == [TASK, OTHER]
    assert not mailbox.put(TASK, True)
    assert mailbox.take() == [TASK]
    assert mailbox.take() == []
    assert mailbox.put(TASK, False)


def test_a_thread_that_waits_is_called_unless_the_caller_runs_the_task() -> None:
    mailbox, calls = Mailbox(), queue.SimpleQueue[bool]()
    mailbox.call(calls)
    assert not mailbox.put(TASK, False)
    assert not mailbox.put(OTHER, False)
    assert calls.get_nowait()
    assert calls.empty()
    assert mailbox.take() == [TASK, OTHER]
    assert mailbox.take() == []
    assert mailbox.put(TASK, True)
    assert calls.empty()
    assert mailbox.take() == [TASK]
    assert mailbox.take() == []
    mailbox.call(None)
    assert mailbox.put(TASK, False)
