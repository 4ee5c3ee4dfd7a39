"""`torch.distributed.rpc.constants`."""

from __future__ import annotations

from datetime import timedelta

from telegrad._core.rpc.remote_calls import UNSET_RPC_TIMEOUT
from telegrad._core.worker import options

DEFAULT_RPC_TIMEOUT_SEC = options.DEFAULT_RPC_TIMEOUT
DEFAULT_INIT_METHOD = options.DEFAULT_INIT_METHOD
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS = options.DEFAULT_NUM_WORKER_THREADS
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=2**31 - 1)

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
]
