"""Remote procedure calls: run a function on another worker, by its name, with tensors as arguments and results.

To try the examples: `with telegrad.local(2):` makes a group of this process, "driver", and of worker0 and worker1.
"""

from telegrad._core.processes import gc_paused

with gc_paused():
    from telegrad._core.calls.call_context import time_left
    from telegrad._core.calls.cancelling import cancelled
    from telegrad._core.calls.futures import Future
    from telegrad._core.calls.settings import (
        BackendType,
        RpcBackendOptions,
        TelegradOptions,
        TensorPipeRpcBackendOptions,
    )
    from telegrad._core.membership.members import WorkerInfo
    from telegrad._core.rpc.cluster import Generation
    from telegrad._core.rpc.life import (
        _rref_context_get_debug_info,
        debug_info,
        generation,
        get_worker_info,
        init_rpc,
        on_join,
        on_leave,
        on_lost,
        rendezvous_again,
        serve,
        shutdown,
        stop_serving,
        wait_for_workers,
        workers,
    )
    from telegrad._core.rpc.remote_calls import UNSET_RPC_TIMEOUT, remote, rpc_async, rpc_stream, rpc_sync
    from telegrad._core.rpc.rref import RRef
    from telegrad._core.security.tls import TlsFiles
    from telegrad._core.streams.streams import Stream
    from telegrad._core.worker.actors import actor
    from telegrad.groups.group import Group, group
    from telegrad.groups.group_calls import GroupFuture
    from telegrad.groups.ref_group import RefGroup
    from telegrad.publishing.published import lookup, publish
    from telegrad.reporting import introspection as _introspection  # noqa: F401 - registers itself, for `telegrad why`
    from telegrad.rpc import functions

PyRRef = RRef  # its name in the documentation of torch.distributed.rpc

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "BackendType",
    "Future",
    "Generation",
    "Group",
    "GroupFuture",
    "PyRRef",
    "RRef",
    "RefGroup",
    "RpcBackendOptions",
    "Stream",
    "TelegradOptions",
    "TensorPipeRpcBackendOptions",
    "TlsFiles",
    "WorkerInfo",
    "_rref_context_get_debug_info",
    "actor",
    "cancelled",
    "debug_info",
    "functions",
    "generation",
    "get_worker_info",
    "group",
    "init_rpc",
    "lookup",
    "on_join",
    "on_leave",
    "on_lost",
    "publish",
    "remote",
    "rendezvous_again",
    "rpc_async",
    "rpc_stream",
    "rpc_sync",
    "serve",
    "shutdown",
    "stop_serving",
    "time_left",
    "wait_for_workers",
    "workers",
]
