"""Remote procedure calls: run a function on another worker, by its name, with tensors as arguments and results.

To try what stands here: `with telegrad.local(2):` makes a group of this process, "driver", and of worker0 and worker1.
"""

from telegrad.importing import uncollected

with uncollected():
    from telegrad.agent.cancelling import cancelled
    from telegrad.agent.futures import Future
    from telegrad.agent.scene import time_left
    from telegrad.group.members import WorkerInfo
    from telegrad.rpc import functions
    from telegrad.rpc.actors import actor
    from telegrad.rpc.api import (
        UNSET_RPC_TIMEOUT,
        _rref_context_get_debug_info,
        debug_info,
        get_worker_info,
        remote,
        rpc_async,
        rpc_stream,
        rpc_sync,
    )
    from telegrad.rpc.elastic import Generation
    from telegrad.rpc.generations import generation, rendezvous_again
    from telegrad.rpc.groupcalls import GroupFuture
    from telegrad.rpc.groups import Group, group
    from telegrad.rpc.life import init_rpc, serve, shutdown, stop_serving
    from telegrad.rpc.options import BackendType, RpcBackendOptions, TelegradOptions, TensorPipeRpcBackendOptions
    from telegrad.rpc.presence import on_join, on_leave, on_lost, wait_for_workers, workers
    from telegrad.rpc.publishing import lookup, publish
    from telegrad.rpc.references import RRef
    from telegrad.rpc.refgroups import RefGroup
    from telegrad.rpc.streams import Stream
    from telegrad.transport.tls import TlsFiles
    from telegrad.witness import witness as _witness  # which registers itself, for `telegrad why`

del _witness

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
