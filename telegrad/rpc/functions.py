"""Decorators that say how the callee runs a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from telegrad.agent.server import ASYNC_MARK
from telegrad.rpc.batching import batch
from telegrad.wire.functions import home_of_script

__all__ = ["async_execution", "batch"]

F = TypeVar("F", bound=Callable[..., object])


def async_execution(fn: F) -> F:
    """Mark a function that returns a `torch.futures.Future`: the caller gets its value once it is done.

    The callee's thread is free meanwhile. With `@staticmethod` or `@classmethod` this decorator is the inner one, with
    `@torch.jit.script` the outer one.
    """

    @functools.wraps(fn)
    def marked(*args: object, **kwargs: object) -> object:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):  # which has its name elsewhere
        marked.__module__, marked.__qualname__ = home_of_script(fn)
    setattr(marked, ASYNC_MARK, True)
    return marked  # type: ignore[return-value]
