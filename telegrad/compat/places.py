"""Telegrad's modules, by the names of the torch modules that they replace."""

import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from opcode import opmap
from types import ModuleType
from typing import NoReturn

import torch.distributed

from telegrad.compat import profiler
from telegrad.compat.remote_module import RemoteModule
from telegrad.compat.rpc import calls
from telegrad.compat.rpc.references import RRef  # noqa: F401 - for the table below
from telegrad.compat.substitution import Export, Substitution
from telegrad.errors import UsageError
from telegrad.optim import DistributedOptimizer

_OURS = "telegrad.compat"
_MODULES = {
    "torch.distributed.rpc": f"{_OURS}.rpc",
    "torch.distributed.rpc.api": f"{_OURS}.rpc.api",
    "torch.distributed.rpc.backend_registry": f"{_OURS}.rpc.backend_registry",
    "torch.distributed.autograd": f"{_OURS}.autograd",
    "torch.distributed.nn.api.remote_module": f"{_OURS}.remote_module",
}
# Modules that only have names of other modules: those that are public, and after "|" those that are not in `__all__`.
_NAMES = {
    "torch.distributed.rpc.constants": (
        f"{_OURS}.rpc.backend_registry",
        "DEFAULT_INIT_METHOD DEFAULT_NUM_WORKER_THREADS DEFAULT_PROCESS_GROUP_TIMEOUT DEFAULT_RPC_TIMEOUT_SEC "
        "DEFAULT_SHUTDOWN_TIMEOUT UNSET_RPC_TIMEOUT",
    ),
    "torch.distributed.rpc.internal": (
        f"{_OURS}.rpc.references",
        "PythonUDF RPCExecMode RemoteException deserialize serialize | _InternalRPCPickler _build_rpc_profiling_key "
        "_internal_rpc_pickler",
    ),
    "torch.distributed.rpc.server_process_global_profiler": (
        f"{_OURS}.profiler",
        "| EventList FunctionEvent _server_process_global_profile profile",
    ),
    "torch.distributed.rpc.functions": ("telegrad.rpc.functions", "async_execution"),
    "torch.distributed.rpc.options": ("telegrad.rpc", "TensorPipeRpcBackendOptions"),
    "torch.distributed.rpc.rref_proxy": (f"{_OURS}.rpc.api", "RRefProxy | rpc_async UNSET_RPC_TIMEOUT"),
    "torch.distributed.optim.optimizer": (f"{_OURS}.places", "DistributedOptimizer | RRef"),
    "torch._C._distributed_rpc": (
        f"{_OURS}.rpc",
        "_DEFAULT_INIT_METHOD _DEFAULT_NUM_WORKER_THREADS _DEFAULT_RPC_TIMEOUT_SEC _UNSET_RPC_TIMEOUT PyRRef RpcAgent "
        "RpcBackendOptions TensorPipeAgent WorkerInfo _TensorPipeRpcBackendOptionsBase "
        "_delete_all_user_and_unforked_owner_rrefs _get_current_rpc_agent _is_current_rpc_agent_set "
        "_rref_context_get_debug_info _set_and_start_rpc_agent _set_profiler_node_id _set_rpc_timeout "
        "enable_gil_profiling get_rpc_timeout",
    ),
    "torch._C._distributed_rpc_testing": (f"{_OURS}.rpc", ""),
    "torch._C._distributed_autograd": (
        f"{_OURS}.autograd",
        "DistAutogradContext _current_context _get_debug_info _get_max_id _init _is_valid_context _new_context "
        "_release_context _retrieve_context backward get_gradients",
    ),
}
# This module imports FSDP and sympy for its other optimizers: 0.7 s of processor time in each process, and as much
# again at its exit. `DistributedOptimizer` needs neither.
_DEAR = ("torch.distributed.optim",)
_LEGACY_PROFILER = ("ProfilerConfig", "_enable_profiler_legacy", "_parse_legacy_records")


def modules() -> dict[str, ModuleType]:
    """Return the modules, each after its parent."""
    made = {place: import_module(ours) for place, ours in _MODULES.items()}
    for place, (home, names) in _NAMES.items():
        module = made[place] = ModuleType(place, f"`{place}`: names of {home}.")
        module.__spec__ = ModuleSpec(place, None)
        public, _, others = (part.split() for part in names.partition("|"))
        module.__all__ = public  # type: ignore[attr-defined]
        for name in public + others:
            setattr(module, name, getattr(import_module(home), name))
        parent, _, leaf = place.rpartition(".")
        if parent in made:
            setattr(made[parent], leaf, module)
    for place, module in made.items():
        vars(module)["__getattr__"] = partial(_refuse, place)
    return made


def _refuse(place: str, name: str) -> NoReturn:
    """Serve as the `__getattr__` of a module that replaces `place`, for the names that it does not have."""
    frame = sys._getframe(1)
    wanted = frame.f_locals["name"] if frame.f_code.co_name == "_find_and_load_unlocked" else ""  # `import place.name`
    name = wanted.rpartition(".")[2] or name  # not `__path__`, which that asks for
    text = (
        f"module {place!r} has no attribute {name!r}: Telegrad serves this module, without the inner workings of "
        "torch's own. What to use instead of these is in docs/migration.md of Telegrad"
    )
    # Imports would turn an AttributeError into an ImportError without its text.
    if wanted:
        raise ModuleNotFoundError(text, name=wanted)
    if frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]:
        raise ImportError(text, name=place)
    raise AttributeError(text)


def substitution() -> Substitution:
    """Return the substitution of these modules; raise UsageError if torch was built without `torch.distributed`."""
    if not torch.distributed.is_available():
        raise UsageError("torch was built without torch.distributed, whose stores the workers meet through")
    # TorchScript compiles a function in this table into an operator of torch. The table is made once, at its first use,
    # from the functions that torch.distributed.autograd has at that moment. If it were made later, scripts that call
    # Telegrad's functions would run torch's engine.
    torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    exports = [
        Export("torch.distributed.nn", "RemoteModule", RemoteModule, "torch.distributed.nn.api.remote_module"),
        Export(
            "torch.distributed.optim", "DistributedOptimizer", DistributedOptimizer, "torch.distributed.optim.optimizer"
        ),
        Export("torch.futures", "collect_all", calls.collect_all),
        Export("torch.futures", "wait_all", calls.wait_all),
        *(Export("torch.autograd.profiler_legacy", name, getattr(profiler, name)) for name in _LEGACY_PROFILER),
    ]
    if not hasattr(torch.jit.annotations, "is_rref"):  # torch was built without RPC, so TorchScript has no references
        exports.append(Export("torch.jit.annotations", "is_rref", lambda annotation: False))
    return Substitution(modules(), exports, put_off=_DEAR)
