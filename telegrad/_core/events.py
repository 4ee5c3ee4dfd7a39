"""Events that the layers below report to listeners.

A layer reports an event by

    if (note := events.note) is not None:
        note((events.RAN, begun, perf_counter(), caller, number, name, failure))

which costs one attribute load if there is no listener. The variable is needed: another thread may remove the last
listener between two loads. An event is a tuple: its kind, two times of `perf_counter`
(equal for an event without a duration), and the fields listed below for its kind. An event holds only numbers and short
texts, never users' values, because it outlives them.
"""

import threading
from collections.abc import Callable
from typing import Any

from telegrad._core.forks import in_child, renewed

Event = tuple[Any, ...]
Listener = Callable[[Event], Any]

# Fields after the kind, the begin and the end:
CALLED = "called"  # peer, number of the call, function, bytes of tensors, failure ("" or the name of its kind)
RAN = "ran"  # caller, number of the call, function, failure
CONNECTED = "connected"  # peer, how ("unix", "tcp")
LOST = "lost"  # peer, why
JOINED = "joined"  # own name, rank, size of the group or None
LEFT = "left"  # how
MADE = "made"  # handle of a reference: the value's owner, the reference's number
FREED = "freed"  # the handle was released: the number
BACKWARD_PASS = "passed"  # a backward pass that this worker drove: context, number, failure
BACKWARD_TASKS = "took part"  # this worker's tasks in a backward pass: context, driver, number
STAGED = "staged"  # action of a pipeline stage: batch, kind of action, stage, micro-batch
STEPPED = "stepped"  # step of a worker's part of an optimizer: context, name of the optimizer
NOTED = "noted"  # recorded by an extension: a title, and a short text

note: Listener | None = None
alarms: list[Callable[[str], Any]] = []  # called with a reason when something failed that users may ask about
in_child(alarms.clear)  # they belong to the parent's workers

_lock = renewed(threading.Lock())  # guards _listeners, and changes of `note`
_listeners: list[Listener] = []


def add(listener: Listener) -> None:
    """Call `listener(event)` for each event, on the thread that reports it. It must be quick and must not raise."""
    with _lock:
        _listeners.append(listener)
        _settle()


def remove(listener: Listener) -> None:
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
            _settle()


def alarm(reason: str) -> None:
    """Call the functions in `alarms` with the reason of a failure of some worker of this process."""
    for told in tuple(alarms):
        told(reason)


def _settle() -> None:
    # `note` is replaced as a whole, and reads a copy of the list. So a thread that reports an event calls all listeners
    # of one moment, and needs no lock. A listener may still be called shortly after its removal.
    global note
    listeners = tuple(_listeners)
    if len(listeners) < 2:
        note = listeners[0] if listeners else None
        return

    def tell_all(event: Event) -> None:
        for listener in listeners:
            listener(event)

    note = tell_all
