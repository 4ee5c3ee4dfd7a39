"""What the layers below tell whoever looks on.

A layer that has something to tell does so by

    if (note := instruments.note) is not None:
        note((instruments.RAN, begun, perf_counter(), caller, number, name, failure))

which costs one look where nobody listens. An event is a tuple: its kind, two times of `perf_counter` (the same, where
it has no length), and what its kind says below. It holds numbers and short texts only, and nothing of users' values,
since it outlives them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from telegrad._core.atfork import in_child, renewed

Event = tuple[Any, ...]
Listener = Callable[[Event], Any]

# kind, begun, ended, and then:
CALLED = "called"  # peer, number of the call, function, bytes of tensors, failure ("" or the name of its kind)
RAN = "ran"  # caller, number of the call, function, failure
CONNECTED = "connected"  # peer, how ("unix", "tcp")
LOST = "lost"  # peer, why
JOINED = "joined"  # own name, rank, size of the group or None
LEFT = "left"  # how
MADE = "made"  # a handle of a reference: the value's owner, the reference's number
FREED = "freed"  # such a handle ended: the number
PASSED = "passed"  # a backward pass that this worker drove: context, number, failure
TOOK_PART = "took part"  # this worker's tasks of a pass: context, driver, number
STAGED = "staged"  # an action of a pipeline's stage: batch, kind of action, stage, micro-batch
STEPPED = "stepped"  # an optimizer's share: context, name of the optimizer

note: Listener | None = None
alarms: list[Callable[[str], Any]] = []  # called with a reason when something went wrong that a person may ask about

_lock = renewed(threading.Lock())  # guards _listeners, and changes of `note`
_listeners: list[Listener] = []


def add(listener: Listener) -> None:
    """Have `listener(event)` called for each event, on the thread where it happens; it must be quick and not raise."""
    with _lock:
        _listeners.append(listener)
        _settle()


def remove(listener: Listener) -> None:
    """No longer."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
            _settle()


def alarm(reason: str) -> None:
    """Something went wrong, on some worker of this process."""
    for told in tuple(alarms):
        told(reason)


def _settle() -> None:
    global note
    listeners = tuple(_listeners)
    if len(listeners) < 2:
        note = listeners[0] if listeners else None
        return

    def tell_all(event: Event) -> None:
        for listener in listeners:
            listener(event)

    note = tell_all


@in_child
def _forget_alarms() -> None:
    """They are of the parent's workers."""
    alarms.clear()
