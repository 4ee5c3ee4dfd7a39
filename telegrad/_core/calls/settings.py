"""Settings of a worker's agent, and timeouts that users give to single calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from telegrad._core import checks
from telegrad._core.membership.members import Devices
from telegrad._core.security.tls import TlsFiles

DEFAULT = -1.0  # timeout of a call that uses the timeout of the options
_HINT = "; leave it out for the rpc_timeout of the options"


class Settings(NamedTuple):
    """Settings of an agent; see `telegrad._core.worker.options` for the meaning."""

    threads: int
    timeout: float
    address: str  # to listen on
    transport: str  # "auto", "unix" or "tcp"
    shared_memory: int
    silence: float
    tls: TlsFiles | None
    devices: Devices
    pass_deadlines: bool = False
    sends_modes: bool = True  # grad mode and autocast of callers hold in their calls; not after torch's `init_rpc`
    wait_for_worker: bool = False
    most_calls: int = 1 << 15  # in flight to one worker; further calls block, unless the thread serves a call
    most_bytes: int = 1 << 30  # of the tensors in them
    heartbeat: float = 0.0
    most_waiting: int = 40_000  # unanswered calls of one worker; above, its connection is read slowly
    most_waiting_bytes: int = 1 << 28  # of its calls and control messages that have not begun


def limit_of(timeout: Any, default: float) -> float:
    """Return the user's timeout, or the default if left out; raise InvalidArgument if it is no number of seconds."""
    if type(timeout) in (float, int) and timeout == DEFAULT:
        return default
    found: float = checks.seconds("timeout", timeout, hint=_HINT)
    return found


def check_timeout(timeout: Any) -> None:
    """Raise InvalidArgument for an invalid timeout that is given now and used later."""
    if timeout is not DEFAULT:
        limit_of(timeout, DEFAULT)
