"""`torch.distributed.rpc`."""

import logging
import numbers
import os
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import torch.distributed as dist

from telegrad._core.agent.incoming import Answers
from telegrad._core.calls.futures import Future
from telegrad._core.membership.members import check_name
from telegrad._core.pickling.remote_text import folded
from telegrad._core.rpc.cluster import check_free
from telegrad._core.security.keyring import find_keys
from telegrad._core.sockets import split
from telegrad._core.stores.raw_stores import FileStore
from telegrad._core.stores.stores import open_store
from telegrad.compat import autograd as dist_autograd
from telegrad.compat.profiler import _server_process_global_profile
from telegrad.compat.rpc import api, backend_registry
from telegrad.compat.rpc.api import *  # noqa: F403
from telegrad.compat.rpc.api import (
    _delete_all_user_and_unforked_owner_rrefs,  # noqa: F401 - torch has this and the next ones here
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,  # noqa: F401
    _set_and_start_rpc_agent,  # noqa: F401
    _set_rpc_timeout,  # noqa: F401
)
from telegrad.compat.rpc.backend_registry import *  # noqa: F403
from telegrad.compat.rpc.backend_registry import BackendType, construct_rpc_backend_options, init_backend
from telegrad.errors import UsageError
from telegrad.rpc import RpcBackendOptions, TensorPipeRpcBackendOptions, WorkerInfo, _rref_context_get_debug_info

_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions
_is_tensorpipe_available = True
_DEFAULT_INIT_METHOD = backend_registry.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = backend_registry.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = backend_registry.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = backend_registry.UNSET_RPC_TIMEOUT

__all__ = ["Future", "RpcBackendOptions", "TensorPipeRpcBackendOptions", "WorkerInfo", "init_rpc", "is_available"]
__all__ += ["_rref_context_get_debug_info", "_server_process_global_profile"]
__all__ += api.__all__
__all__ += backend_registry.__all__


def is_available() -> bool:
    return True


@folded
def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join the group under `name`. Block until every worker of the group can be called.

    Raises the same errors as `telegrad.rpc.init_rpc`.
    """
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, not {rpc_backend_options!r}"
        )
    if backend is None:
        backend = _backend_of(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = construct_rpc_backend_options(backend)
    check_free()
    check_name(name)
    if rank < 0 and not world_size:
        rank, world_size = _missing(rpc_backend_options.init_method)
    keys = find_keys(getattr(rpc_backend_options, "key", None))
    meet = partial(open_store, rpc_backend_options.init_method, rank, world_size, keys)
    dist_autograd._init(rank)
    if backend is BackendType.TENSORPIPE:
        options = rpc_backend_options
        _begin(backend, store=None, name=name, rank=rank, world_size=world_size, rpc_backend_options=options, meet=meet)
        return
    meeting = meet(rpc_backend_options.rpc_timeout or float("inf"))
    store = meeting.store.raw
    # A backend of the program expects a store of torch, and Telegrad's FileStore is none.
    if isinstance(store, FileStore):
        store = dist.FileStore(store.path, -1)
    _init_rpc_backend(backend, store, name, meeting.rank, meeting.world_size, rpc_backend_options)


def _missing(init_method: str) -> tuple[int, int | None]:
    """Return the rank and the size, if the call gives neither."""
    url = split(init_method)
    if url.scheme == "env":
        if "RANK" not in os.environ:
            raise ValueError("environment variable RANK expected, but not set: set it, or give rank=...")
        return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 0)) or None
    if "rank" not in parse_qs(url.query):
        raise ValueError(f"rank parameter missing: give rank=..., or write it into the URL {init_method!r}")
    return -1, None


def _backend_of(given: RpcBackendOptions | None) -> Any:
    """Return the backend of these options."""
    if given is None:
        return backend_registry.BackendType.TENSORPIPE
    for backend in backend_registry.BackendType:
        if isinstance(given, type(construct_rpc_backend_options(backend))):
            return backend
    raise TypeError(f"Could not infer backend for options {given}: pass backend=...")


def _init_rpc_backend(
    backend: Any = BackendType.TENSORPIPE,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join a group whose workers meet in `store`."""
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    check_free()
    _begin(backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options)


def _begin(backend: Any, **given: Any) -> None:
    # torch's workers warn of an error that a caller gets. Telegrad's log it at level DEBUG.
    Answers.level = logging.WARNING
    api._forget_rounds()  # before this worker can be called, because objects of the first round may arrive at once
    api._init_rpc_states(init_backend(backend, **given))


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    expected = (
        (backend, backend_registry.BackendType),
        (store, dist.Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    )
    for given, kind in expected:
        if not isinstance(given, kind):
            raise UsageError(f"Argument {given} must be of type {kind} but got type {type(given)}")


def _get_debug_info() -> dict[str, str]:
    """Return the debug values of references, of the agent and of contexts."""
    references = _rref_context_get_debug_info()
    return {**references, **_get_current_rpc_agent().get_debug_info(), **dist_autograd._get_debug_info()}


def _set_profiler_node_id(node_id: int) -> None:
    """Do nothing: events have the rank of the group that this process is in."""
