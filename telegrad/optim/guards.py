"""Who may change parameters: steps that touch the same ones take turns, others do not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from telegrad._core.atfork import in_child, renewed
from telegrad._core.worker.turns import Turns

_lock = renewed(threading.Lock())  # guards _guards
_guards: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by parameter
_numbers = itertools.count()
in_child(_guards.clear)  # the turns that threads of the parent have never end


class Guard:
    """The turns of parameters that are always changed together."""

    def __init__(self) -> None:
        self.number = next(_numbers)  # whoever takes several takes them in this order
        self.turns = Turns()


def guards_of(parameters: Iterable[Tensor]) -> list[Guard]:
    """What to hold while these are changed; one for all that nobody has asked for before."""
    with _lock:
        own = Guard()
        found: set[Guard] = {_guards.setdefault(each, own) for each in parameters}  # type: ignore[no-untyped-call]
    return sorted(found, key=lambda guard: guard.number)


def holding(guards: list[Guard]) -> AbstractContextManager[None]:
    """`with holding(guards):` what runs inside is the only one to change these parameters."""
    return guards[0].turns.taken() if len(guards) == 1 else _holding_all(guards)


@contextmanager
def _holding_all(guards: list[Guard]) -> Iterator[None]:
    with ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard.turns.taken())
        yield
