"""Settings of a worker's agent."""

from __future__ import annotations

from typing import NamedTuple

from telegrad._core.devices.device_maps import Devices
from telegrad._core.security.tls import TlsFiles


class Settings(NamedTuple):
    """Settings of an agent; see `telegrad._core.worker.options` for the meaning."""

    threads: int
    timeout: float
    transport: str  # "auto", "unix" or "tcp"
    shared_memory: int
    silence: float
    tls: TlsFiles | None
    devices: Devices
    pass_deadlines: bool = False
    wait_for_worker: bool = False
    most_calls: int = 1 << 15  # in flight to one worker; further calls block, unless the thread serves a call
    most_bytes: int = 1 << 30  # of the tensors in them
    heartbeat: float = 0.0
    most_waiting: int = 40_000  # unanswered calls of one worker; above, its connection is read slowly
    most_waiting_bytes: int = 1 << 28  # of its calls and control messages that have not begun
