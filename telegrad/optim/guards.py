"""Locks for changes of parameters: steps on the same parameters run one after another, others run concurrently."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from telegrad._core.atfork import in_child, renewed
from telegrad._core.worker.fifo_lock import FifoLock

_lock = renewed(threading.Lock())  # guards _guards
_guards: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # a lock for each parameter; often many have the same
in_child(_guards.clear)  # threads of the parent that hold locks do not exist in a child


def guards_of(parameters: Iterable[Tensor]) -> list[FifoLock]:
    """Return the locks to hold while these parameters are changed. Parameters without a lock get a common new one."""
    with _lock:
        own = FifoLock()
        found: set[FifoLock] = {_guards.setdefault(each, own) for each in parameters}  # type: ignore[no-untyped-call]
    return sorted(found, key=id)  # lock order


def holding(guards: list[FifoLock]) -> AbstractContextManager[None]:
    """Hold `guards` in a `with` block, where only this thread changes these parameters."""
    return guards[0].taken() if len(guards) == 1 else _holding_all(guards)


@contextmanager
def _holding_all(guards: list[FifoLock]) -> Iterator[None]:
    with ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard.taken())
        yield
