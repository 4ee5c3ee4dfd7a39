"""`torch.compile` leaves remote calls alone: its graph breaks there, and what they run stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

# What `torch.compiler.disable` comes to. That one imports the compiler, which takes seconds, and wraps the function.
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def not_compiled(function: F) -> F:
    """Mark a function that users call: neither it nor what it calls is compiled, in whatever code it stands."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a remote call is no part of a graph"  # type: ignore[attr-defined]
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function
