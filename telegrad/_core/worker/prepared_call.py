"""A call whose arguments are what the callee's annotations ask for."""

from __future__ import annotations

from typing import Any, NamedTuple


class Call(NamedTuple):
    """A function with its arguments, and what must live until the call is answered."""

    function: Any
    args: Any
    kwargs: Any
    keeps: Any = None
    asked: Any = None  # the function that was asked for, where another is sent
