"""Who may change parameters: steps that touch the same ones take turns, others do not."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from telegrad.rpc.turns import Turns

_lock = threading.Lock()  # guards _guards
_guards: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by parameter
_numbers = itertools.count()


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


@contextlib.contextmanager
def holding(guards: list[Guard]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard.turns.taken())
        yield
