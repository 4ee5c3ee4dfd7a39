"""`torch._C._distributed_rpc`: the names of the C++ part of torch's RPC."""

from telegrad.compat.missing import missing_from
from telegrad.compat.rpc import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
    PyRRef,
    RpcAgent,
    RpcBackendOptions,
    TensorPipeAgent,
    WorkerInfo,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _rref_context_get_debug_info,
    _set_and_start_rpc_agent,
    _set_profiler_node_id,
    _set_rpc_timeout,
    _TensorPipeRpcBackendOptionsBase,
    enable_gil_profiling,
    get_rpc_timeout,
)

__all__ = [
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "PyRRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "WorkerInfo",
    "_TensorPipeRpcBackendOptionsBase",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent",
    "_set_profiler_node_id",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
]

__getattr__ = missing_from("torch._C._distributed_rpc")
