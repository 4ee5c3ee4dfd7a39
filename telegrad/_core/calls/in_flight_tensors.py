"""Notices tensors that are written to before the call that sends them is done.

What is large leaves from the tensor's own memory, sooner or later: it depends on the transport, so the same is asked
of a program on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad._core.calls.call_names import user_name
from telegrad._core.hints import Line, hint, users_line
from telegrad._core.wire.packing import SMALL

_empty = torch.empty(0, device="cpu")
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class Underway:
    """The tensors of one call, as they were when it began."""

    __slots__ = ("_counters", "_line")

    def __init__(self, tensors: Sequence[Tensor], waits: bool) -> None:
        """`waits`: the thread that calls will check it, too."""
        self._line: Line | None = None if waits else users_line()
        self._counters = [_counter_of(each) for each in tensors if _is_watched(each)]

    def check(self, asked: Any, worker: str) -> None:
        """The call is done: warn where one was changed meanwhile."""
        shape = next((shape for counter, before, shape in self._counters if counter._version != before), None)
        if shape is not None:
            hint(
                "changed underway",
                f"a tensor of shape {tuple(shape)} was written to while the call of {user_name(asked)} that sends it "
                f"to worker {worker!r} was under way: what arrives there may be the old values, the new ones, or some "
                "of each. Write to it once the call's future is done, or send tensor.clone()",
                self._line,
            )


def _is_watched(tensor: Tensor) -> bool:
    """Whether it is carried from its own memory, and torch counts what is written to it."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return plain and tensor.nbytes >= SMALL and not tensor.is_meta and not tensor.is_inference()


def _counter_of(tensor: Tensor) -> tuple[Tensor, int, torch.Size]:
    """A tensor that shares the counter of writes, but not the memory; the count; and the shape."""
    counter = tensor.detach()
    counter.data = _empty if tensor.is_cpu else _empty.to(tensor.device)
    return counter, counter._version, tensor.shape
