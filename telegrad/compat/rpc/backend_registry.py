"""`torch.distributed.rpc.backend_registry`: Telegrad is the backend named TENSORPIPE; programs may register others."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad._core.security.keyring import find_keys
from telegrad._core.start.life import enter_group
from telegrad._core.stores.sealed_store import SealedStore
from telegrad._core.stores.stores import RendezvousStore
from telegrad._core.worker import current
from telegrad.compat.rpc.agent import TensorPipeAgent
from telegrad.compat.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC
from telegrad.compat.rpc.references import RRef
from telegrad.errors import UsageError
from telegrad.rpc import RpcBackendOptions, TensorPipeRpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """The functions that make a backend's options and its agent."""

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., Any]


def _repr(self: enum.Enum) -> str:
    return f"BackendType.{self.name}"


def _types(values: dict[str, BackendValue]) -> Any:
    made = enum.Enum("BackendType", values)  # type: ignore[misc]
    made.__repr__ = _repr  # type: ignore[assignment, method-assign]
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
    met: RendezvousStore | None = None,
) -> TensorPipeAgent:
    """`met` has more details of the store, if Telegrad opened it."""
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not {type(rpc_backend_options).__name__}"
        )
    if store is None:
        raise UsageError("a store is needed for the workers to meet")
    if met is None:
        met = RendezvousStore(SealedStore(store, find_keys(rpc_backend_options.key)), None, rank, world_size)
    meeting = met
    enter_group(name, rpc_backend_options, lambda timeout: meeting, RRef)
    assert current.worker is not None
    return TensorPipeAgent(current.worker)


BackendType: Any = _types({"TENSORPIPE": BackendValue(_make_options, _join_group)})
