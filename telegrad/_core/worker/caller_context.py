"""The thread-local context of code that starts an operation which other threads continue."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from telegrad._core.calls import call_context

T = TypeVar("T")


class CallerContext:
    """The context variables, grad mode and autocast of the thread that creates this object."""

    __slots__ = ("_autocast", "_inference", "_records", "_variables")

    def __init__(self) -> None:
        self._variables = copy_context()
        self._records = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = call_context.described_autocast()

    def run(self, act: Callable[..., T], *args: Any) -> T:
        """Return `act(*args)`, called in that context. Any thread may do so, also several at once."""
        with (
            torch.inference_mode(self._inference),
            torch.set_grad_enabled(self._records),
            call_context.under_autocast(self._autocast),
        ):
            return self._variables.copy().run(act, *args)
