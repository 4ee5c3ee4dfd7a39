"""Detects writes to tensors while the call that sends them is in flight.

Large tensors are sent from their own memory, at a time that depends on the transport. Programs must not write to them
meanwhile, on any transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad._core.calls.call_names import user_name
from telegrad._core.texts import ProgramLine, hint, users_line
from telegrad._core.wire.packing import SMALL

_empty = torch.empty(0, device="cpu")
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class MutationCheck:
    """The tensors of one call, with their version counters at its start."""

    __slots__ = ("_counters", "_line")

    def __init__(self, tensors: Sequence[Tensor], waits: bool) -> None:
        """`waits`: the calling thread itself runs the check."""
        self._line: ProgramLine | None = None if waits else users_line()
        self._counters = [_counter_of(each) for each in tensors if _is_watched(each)]

    def check(self, asked: Any, worker: str) -> None:
        shape = next((shape for counter, before, shape in self._counters if counter._version != before), None)
        if shape is not None:
            hint(
                "changed underway",
                f"a tensor of shape {tuple(shape)} was modified while the call of {user_name(asked)} that sends it "
                f"to worker {worker!r} was in flight: the worker may receive the old values, the new ones, or a mix. "
                "Modify it once the call's future is done, or send tensor.clone()",
                self._line,
            )


def _is_watched(tensor: Tensor) -> bool:
    """Return True if the tensor is sent from its own memory and torch counts writes to it."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return plain and tensor.nbytes >= SMALL and not tensor.is_meta and not tensor.is_inference()


def _counter_of(tensor: Tensor) -> tuple[Tensor, int, torch.Size]:
    """Return a tensor that shares the version counter but not the memory, the version, and the shape."""
    counter = tensor.detach()
    counter.data = _empty if tensor.is_cpu else _empty.to(tensor.device)
    return counter, counter._version, tensor.shape
