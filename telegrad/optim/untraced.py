"""Use torch's optimizers without importing `torch._dynamo`, which takes seconds.

They import it to exclude their methods from tracing. As long as no other code has imported it, nothing is traced. Then
this module calls the functions inside of those wrappers (`__wrapped__`). Optimizers whose own code may call a wrapper
are used unchanged; `may_import` identifies them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch.optim import Optimizer

TRACER = "torch._dynamo"


def may_import(make: Callable[..., Optimizer]) -> bool:
    """Return True if an optimizer made by `make` may import the tracer in spite of this module."""
    if not _is_class(make):
        return True
    steps = {inspect.unwrap(vars(base)["step"]) for base in make.__mro__[:-1] if "step" in vars(base)}
    return make.add_param_group is not Optimizer.add_param_group or len(steps - {Optimizer.step}) > 1


def import_tracer() -> None:
    importlib.import_module(TRACER)


def made(make: Callable[..., Optimizer], groups: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Optimizer:
    """Return `make(groups, *args, **kwargs)`, without the import if possible."""
    if not _is_class(make):
        return make(groups, *args, **kwargs)
    optimizer = make.__new__(make)
    own = vars(optimizer)
    own["add_param_group"] = MethodType(_unasked(make.add_param_group), optimizer)  # called by the constructor
    try:
        optimizer.__init__(groups, *args, **kwargs)  # type: ignore[misc]
    finally:
        del own["add_param_group"]
    return optimizer


def call(optimizer: Optimizer, method: str, *args: Any) -> Any:
    """Call `optimizer.method(*args)`, without the import if possible."""
    return _unasked(getattr(type(optimizer), method))(optimizer, *args)


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


def _is_class(make: Callable[..., Optimizer]) -> TypeGuard[type[Optimizer]]:
    """Return True if calling `make` only initializes an object."""
    usual = isinstance(make, type) and issubclass(make, Optimizer) and make.__new__ is object.__new__
    return usual and type(make).__call__ is type.__call__


def _unasked(function: Any) -> Any:
    return function if TRACER in sys.modules or not _asks(function) else function.__wrapped__


def _asks(function: Any) -> bool:
    """Return True for a wrapper that imports the tracer."""
    return TRACER in getattr(getattr(function, "__code__", None), "co_names", ()) and hasattr(function, "__wrapped__")
