"""Use torch's optimizers without importing `torch._dynamo`, which takes seconds.

They import it to exclude their methods from tracing. As long as no other code has imported it, nothing is traced. Until
then torch's wrappers of these methods call the methods themselves, and `step_of` calls the function inside of the
wrapper of `step`. A step that calls another one's wrapper is used unchanged; `may_import` identifies it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

TRACER = "torch._dynamo"
_CACHE = "__dynamo_disable"  # where a wrapper of torch keeps what it calls (torch 2.13: torch/_compile.py)


def import_tracer() -> None:
    importlib.import_module(TRACER)


def may_import(make: Callable[..., Optimizer]) -> bool:
    """Return True if an optimizer made by `make` may import the tracer in spite of this module."""
    if not (isinstance(make, type) and issubclass(make, Optimizer)):
        return True
    steps = {inspect.unwrap(vars(base)["step"]) for base in make.__mro__[:-1] if "step" in vars(base)}
    return len(steps - {Optimizer.step}) > 1


def _defer_import(wrapper: Any) -> None:
    """Make a wrapper of torch call the method that it wraps, until other code has imported the tracer."""
    method = wrapper.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        if TRACER not in sys.modules:
            return method(*args, **kwargs)
        vars(method).pop(_CACHE, None)  # the wrapper fills it
        return wrapper(*args, **kwargs)

    setattr(method, _CACHE, call)


def step_of(optimizer: Optimizer) -> Callable[[], Any]:
    """Return `optimizer.step`, in a form that avoids the import if possible."""
    kind = type(optimizer)
    guarded: Any = getattr(kind.step, "__wrapped__", None)  # inside of the wrapper that runs the hooks
    if not hasattr(kind.step, "hooked") or not _asks(guarded):
        return optimizer.step

    @functools.wraps(guarded.__wrapped__)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if TRACER in sys.modules:
            return guarded(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return guarded.__wrapped__(self, *args, **kwargs)

    return MethodType(Optimizer.profile_hook_step(step), optimizer)


def _asks(function: Any) -> bool:
    """Return True for a wrapper that imports the tracer."""
    return TRACER in getattr(getattr(function, "__code__", None), "co_names", ()) and hasattr(function, "__wrapped__")


for _wrapper in (Optimizer.state_dict, Optimizer.load_state_dict, Optimizer.add_param_group):
    if _asks(_wrapper):
        _defer_import(_wrapper)
