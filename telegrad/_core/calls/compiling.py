"""Excludes remote calls from `torch.compile`: they cause a graph break, and the code that they run is not compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

# The effect of `torch.compiler.disable`, without its import of the compiler (seconds) and without a wrapper.
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def not_compiled(function: F) -> F:
    """Mark a function that users call: `torch.compile` compiles neither the function nor its callees."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a remote call cannot be part of a graph"  # type: ignore[attr-defined]
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function
