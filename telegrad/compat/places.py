"""The table of Telegrad's modules, by the names of the torch modules that they replace."""

from __future__ import annotations

from importlib import import_module

import torch.distributed

from telegrad.compat import profiler
from telegrad.compat.optimizer import DistributedOptimizer
from telegrad.compat.remote_module import RemoteModule
from telegrad.compat.rpc import futures
from telegrad.compat.substitution import Export, Substitution
from telegrad.errors import UsageError

_OURS = "telegrad.compat"
MODULES = {
    "torch.distributed.rpc": f"{_OURS}.rpc",
    "torch.distributed.rpc.api": f"{_OURS}.rpc.api",
    "torch.distributed.rpc.backend_registry": f"{_OURS}.rpc.backend_registry",
    "torch.distributed.rpc.constants": f"{_OURS}.rpc.constants",
    "torch.distributed.rpc.functions": f"{_OURS}.rpc.functions",
    "torch.distributed.rpc.internal": f"{_OURS}.rpc.internal",
    "torch.distributed.rpc.options": f"{_OURS}.rpc.options",
    "torch.distributed.rpc.rref_proxy": f"{_OURS}.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": f"{_OURS}.rpc.server_process_global_profiler",
    "torch.distributed.autograd": f"{_OURS}.autograd",
    "torch.distributed.nn.api.remote_module": f"{_OURS}.remote_module",
    "torch.distributed.optim.optimizer": f"{_OURS}.optimizer",
    "torch._C._distributed_rpc": f"{_OURS}.c_rpc",
    "torch._C._distributed_rpc_testing": f"{_OURS}.c_rpc_testing",
    "torch._C._distributed_autograd": f"{_OURS}.c_autograd",
}
_DEAR = ("torch.distributed.optim",)  # imports half of torch, which DistributedOptimizer does not need
_LEGACY_PROFILER = ("ProfilerConfig", "_enable_profiler_legacy", "_parse_legacy_records")


def substitution() -> Substitution:
    """Return the substitution of these modules.

    Raises:
        UsageError: torch was built without `torch.distributed`.
    """
    if not torch.distributed.is_available():
        raise UsageError("torch was built without torch.distributed, whose stores the workers meet through")
    torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]  # with torch's own operators, not ours
    modules = {place: import_module(ours) for place, ours in MODULES.items()}
    exports = [
        Export("torch.distributed.nn", "RemoteModule", RemoteModule, "torch.distributed.nn.api.remote_module"),
        Export(
            "torch.distributed.optim", "DistributedOptimizer", DistributedOptimizer, "torch.distributed.optim.optimizer"
        ),
        Export("torch.futures", "collect_all", futures.collect_all),
        Export("torch.futures", "wait_all", futures.wait_all),
        *(Export("torch.autograd.profiler_legacy", name, getattr(profiler, name)) for name in _LEGACY_PROFILER),
    ]
    if not hasattr(torch.jit.annotations, "is_rref"):  # torch was built without RPC, so TorchScript has no references
        exports.append(Export("torch.jit.annotations", "is_rref", lambda annotation: False))
    return Substitution(modules, exports, put_off=_DEAR)
