"""The tasks of one context: who is at it."""

from __future__ import annotations

import queue
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.autograd.engine.passes import DeclareDead, PassSpec
from telegrad.autograd.engine.record import AutogradContext
from telegrad.autograd.mailbox import Mailbox
from telegrad.autograd.pass_parts import LocalParts

SPEC = PassSpec(1, "driver", 1, False, False, False, ("driver",))
TASK, OTHER = DeclareDead(SPEC, ("", 1)), DeclareDead(SPEC, ("", 2))


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox(AutogradContext(1, count(1)))


def test_one_thread_is_at_it_until_it_finds_nothing(mailbox: Mailbox) -> None:
    assert mailbox.put(TASK, False)
    assert not mailbox.put(OTHER, False)
    assert mailbox.take() == [TASK, OTHER]
    assert not mailbox.put(TASK, True)
    assert mailbox.take() == [TASK]
    assert mailbox.take() == []
    assert mailbox.put(TASK, False)


def test_a_thread_that_waits_to_be_called_is_called_where_nobody_is_at_it(mailbox: Mailbox) -> None:
    calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
    mailbox.call(calls)
    assert not mailbox.put(TASK, False)
    assert not mailbox.put(OTHER, False)
    assert calls.get_nowait()
    assert calls.empty()
    assert mailbox.take() == [TASK, OTHER]
    assert mailbox.take() == []
    mailbox.call(None)
    assert mailbox.put(TASK, False)


def test_who_does_it_here_needs_no_call(mailbox: Mailbox) -> None:
    calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
    mailbox.call(calls)
    assert mailbox.put(TASK, True)
    assert calls.empty()


def test_a_mailbox_tells_its_state(mailbox: Mailbox) -> None:
    mailbox.put(TASK, False)
    assert "1 tasks, a thread is at it" in repr(mailbox)


def test_a_context_that_ends_as_a_task_comes_leaves_no_mailbox() -> None:
    agent: Any = SimpleNamespace(name="me", on=lambda *_: None)
    unused: Any = None
    parts = LocalParts(agent, unused, unused, unused, unused)
    context = AutogradContext(1, count(1))
    context.close()
    parts.end(context.id)
    assert parts._open(context).put(TASK, True)
    assert not parts._mailboxes
