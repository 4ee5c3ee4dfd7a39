"""A call with arguments converted to the callee's annotations."""

from __future__ import annotations

from typing import Any, NamedTuple


class PreparedCall(NamedTuple):
    """A function with its arguments, and an object that must live until the call is answered."""

    function: Any
    args: Any
    kwargs: Any
    keeps: Any = None
    asked: Any = None  # the function that the user called, if another is sent

    @property
    def users(self) -> Any:
        """The function that the user called, or a text."""
        return self.function if self.asked is None else self.asked
