"""The timeouts that users give."""

from __future__ import annotations

from typing import Any

from telegrad._core import checks

DEFAULT = -1.0  # a call's timeout: that of the options
_HINT = "; leave it out for the rpc_timeout of the options"


def limit_of(timeout: Any, default: float) -> float:
    """Return a timeout that a user gave, or the default where it was left out.

    Raises:
        InvalidArgument: it is no number of seconds.
    """
    if type(timeout) in (float, int) and timeout == DEFAULT:
        return default
    found: float = checks.seconds("timeout", timeout, hint=_HINT)
    return found


def check_timeout(timeout: Any) -> None:
    """Raise InvalidArgument for a timeout that no call could have; for what is given now and used later."""
    if timeout is not DEFAULT:
        limit_of(timeout, DEFAULT)
