"""Locks for changes of parameters: steps on the same parameters run one after another, others run concurrently."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from telegrad._core.atfork import in_child, renewed
from telegrad._core.worker.fifo_lock import FifoLock

_lock = renewed(threading.Lock())  # guards _guards
_guards: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by parameter
_numbers = itertools.count()
in_child(_guards.clear)  # threads of the parent that hold turns do not exist in a child


class Guard:
    """The lock of parameters that are always changed together."""

    def __init__(self) -> None:
        self.number = next(_numbers)  # lock order: a thread acquires several guards by ascending number
        self.turns = FifoLock()


def guards_of(parameters: Iterable[Tensor]) -> list[Guard]:
    """Return the guards to hold while these parameters are changed. Parameters without a guard get a common new one."""
    with _lock:
        own = Guard()
        found: set[Guard] = {_guards.setdefault(each, own) for each in parameters}  # type: ignore[no-untyped-call]
    return sorted(found, key=lambda guard: guard.number)


def holding(guards: list[Guard]) -> AbstractContextManager[None]:
    """Hold `guards` in a `with` block, where only this thread changes these parameters."""
    return guards[0].turns.taken() if len(guards) == 1 else _holding_all(guards)


@contextmanager
def _holding_all(guards: list[Guard]) -> Iterator[None]:
    with ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard.turns.taken())
        yield
