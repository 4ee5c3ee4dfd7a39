"""Validation of timeouts from users."""

from __future__ import annotations

from typing import Any

from telegrad._core import checks

DEFAULT = -1.0  # timeout of a call that uses the timeout of the options
_HINT = "; leave it out for the rpc_timeout of the options"


def limit_of(timeout: Any, default: float) -> float:
    """Return the user's timeout, or the default where it was left out.

    Raises:
        InvalidArgument: it is no number of seconds.
    """
    if type(timeout) in (float, int) and timeout == DEFAULT:
        return default
    found: float = checks.seconds("timeout", timeout, hint=_HINT)
    return found


def check_timeout(timeout: Any) -> None:
    """Raise InvalidArgument for an invalid timeout that is given now and used later."""
    if timeout is not DEFAULT:
        limit_of(timeout, DEFAULT)
