"""`torch.distributed.rpc.backend_registry`: Telegrad is the backend named TENSORPIPE; programs may register others.

The agent that a backend returns has the interface that programs for torch use.
"""

import enum
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from telegrad._core.calls import settings as options
from telegrad._core.membership.members import Members, WorkerInfo
from telegrad._core.rpc import remote_calls
from telegrad._core.rpc.cluster import enter_group
from telegrad._core.security.keyring import find_keys
from telegrad._core.stores.sealed_store import SealedStore
from telegrad._core.stores.stores import RendezvousStore
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.compat.rpc.references import RRef
from telegrad.errors import UsageError
from telegrad.rpc import RpcBackendOptions, TensorPipeRpcBackendOptions

__all__ = ["BackendType", "BackendValue", "RpcAgent", "TensorPipeAgent", "backend_registered"]
__all__ += ["construct_rpc_backend_options", "enable_gil_profiling", "init_backend", "register_backend"]

# `torch.distributed.rpc.constants`
UNSET_RPC_TIMEOUT = remote_calls.UNSET_RPC_TIMEOUT
DEFAULT_RPC_TIMEOUT_SEC = options.DEFAULT_RPC_TIMEOUT
DEFAULT_INIT_METHOD = options.DEFAULT_INIT_METHOD
DEFAULT_NUM_WORKER_THREADS = options.DEFAULT_NUM_WORKER_THREADS
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=2**31 - 1)

_LOOKS = 16  # samples that are averaged to measure the wait for the GIL


class RpcAgent:
    """A worker of a group."""

    measures_gil = False  # of all workers of the process

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._agent = worker.agent

    @property
    def is_static_group(self) -> bool:
        return isinstance(self._worker.directory, Members)

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        found = self._agent.me if worker is None else self._agent.find(worker)
        return WorkerInfo(found.name, found.id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return the workers of the group that this one knows."""
        directory = self._worker.directory
        members = list(directory) if isinstance(directory, Members) else directory.members()
        return [WorkerInfo(member.name, member.id) for member in members]

    def get_debug_info(self) -> dict[str, str]:
        info = {
            "agent.thread_pool_size": str(self._agent.settings.threads),
            "agent.calls_started": str(self._agent.started),
            "agent.idle": str(int(self._agent.idle)),
        }
        if self.measures_gil:
            info["agent.gil_average_wait_time_us"] = f"{_gil_wait():.1f}"
        return info

    get_metrics = get_debug_info

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no call is in flight in the whole group, then leave it."""
        self._worker.shutdown(True, timeout)

    def shutdown(self) -> None:
        """Leave the group at once."""
        self._worker.shutdown(False, 0)

    def sync(self) -> None:
        """Block until no call of this worker is in flight, and none runs here."""
        while not self._agent.idle:
            time.sleep(1e-3)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RpcAgent) and other._worker is self._worker

    def __hash__(self) -> int:
        return id(self._worker)


class TensorPipeAgent(RpcAgent):
    """The agent under the name of torch's only kind."""


def enable_gil_profiling(flag: bool) -> None:
    """Include the average wait for the GIL in `get_debug_info` if `flag` is true."""
    RpcAgent.measures_gil = flag


def _gil_wait() -> float:
    """Return the average microseconds until a thread gets the GIL back after releasing it."""
    start = time.perf_counter()
    for _ in range(_LOOKS):
        time.sleep(0)
    return (time.perf_counter() - start) / _LOOKS * 1e6


class BackendValue(NamedTuple):
    """The functions that make a backend's options and its agent."""

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., Any]


def _types(values: dict[str, BackendValue]) -> Any:
    made: Any = enum.Enum("BackendType", values)  # type: ignore[misc]
    made.__repr__ = lambda self: f"BackendType.{self.name}"  # type: ignore[method-assign, attr-defined]
    made.__doc__ = "The backends that there are; `register_backend` adds one."
    return made


def backend_registered(backend_name: str) -> bool:
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend to `BackendType`, which becomes a new type; return the new member."""
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _types({**{member.name: member.value for member in BackendType}, backend_name: value})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD, **kwargs: Any
) -> Any:
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the agent of a backend, which has joined its group."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _make_options(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _join_group(
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
    meet: Callable[[float], RendezvousStore] | None = None,
) -> TensorPipeAgent:
    """`meet` opens the store within a time, instead of `store`: `telegrad why` shows the worker while it waits."""
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not {type(rpc_backend_options).__name__}"
        )
    if meet is None:
        if store is None:
            raise UsageError("a store is needed for the workers to meet")
        meeting = RendezvousStore(SealedStore(store, find_keys(rpc_backend_options.key)), None, rank, world_size)
        meet = lambda timeout: meeting  # noqa: E731
    enter_group(name, rpc_backend_options, meet, RRef)
    assert current.worker is not None
    return TensorPipeAgent(current.worker)


BackendType: Any = _types({"TENSORPIPE": BackendValue(_make_options, _join_group)})
