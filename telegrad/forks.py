"""What a process that was forked from a worker inherits, and must not use.

A forked child has the memory of its parent and none of its threads. The parent's agent has closed descriptors there,
and perhaps locks that no thread will ever release: a call by way of it would raise a foreign error, or wait for ever.
So the child gives the agent, and all through which it is reached, a class whose every attribute raises NotInitialized.
References, streams, optimizers and whatever else a program holds need no check of their own: each of their uses loads
an attribute of one of these objects. Futures, which know no agent once a callback has made them, compare `depth`.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from telegrad.errors import NotInitialized

ADVICE = (
    "A process that a worker starts, as a DataLoader with num_workers does, is not that worker: call from the worker "
    "itself, or have the process join a dynamic group under a name of its own"
)

depth = 0  # how many forks lie between this process and the one that was started; only a fork changes it
_classes: dict[type, type] = {}  # of what was disabled, by the class it had


def refuse(*_: object) -> NoReturn:
    """Raise that this process is not the worker whose objects it has."""
    raise NotInitialized(f"this process was forked from a worker, and is in no group. {ADVICE}")


def check(made_at: int) -> None:
    """Raise NotInitialized for something that was made at another depth: whoever would end it is in the parent."""
    if made_at != depth:
        refuse()


def disable(thing: Any) -> None:
    """In a forked child: have each use of `thing` raise NotInitialized, whatever holds it."""
    kind = type(thing)
    if is_inherited(thing) or not kind.__module__.startswith("telegrad.") or isinstance(thing, tuple | type):
        return
    if kind not in _classes:
        namespace = {
            "__slots__": (),
            "__module__": kind.__module__,
            "__getattribute__": _find,
            "__setattr__": refuse,
            "__repr__": lambda _: f"<{kind.__name__} of the process that this one was forked from>",
            "__eq__": object.__eq__,
            "__hash__": object.__hash__,
            "__del__": lambda _: None,
            _MARK: True,
        }
        meta: Any = type(kind)
        _classes[kind] = meta(kind.__name__, (kind,), namespace)
    thing.__class__ = _classes[kind]


def disable_all(owner: Any) -> None:
    """Likewise for `owner` and what its attributes hold."""
    if hasattr(owner, "__dict__"):
        for thing in list(vars(owner).values()):
            disable(thing)
    disable(owner)


def is_inherited(thing: object) -> bool:
    """Whether it was disabled: its end, too, is the parent's to see to."""
    return _MARK in type(thing).__dict__


_MARK = "_telegrad_inherited"


def _find(thing: object, name: str) -> Any:
    if name in ("__class__", "__dict__", "__weakref__"):  # isinstance() asks for them
        return object.__getattribute__(thing, name)
    refuse()


def _count() -> None:
    global depth
    depth += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)
