"""`torch.distributed.rpc.rref_proxy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad._core.rpc.remote_calls import UNSET_RPC_TIMEOUT
from telegrad._core.rpc.rref import Proxy
from telegrad.compat.missing import missing_from
from telegrad.compat.rpc import api
from telegrad.compat.rpc.api import rpc_async  # noqa: F401 - public in torch's module
from telegrad.compat.rpc.references import RRef

__all__ = ["RRefProxy"]


def RRefProxy(rref: RRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:  # noqa: N802
    """Return a proxy whose `proxy.method(*args)` calls that method at the owner, by one of the three call functions."""
    ways = {api.rpc_sync: rref.rpc_sync, api.rpc_async: rref.rpc_async, api.remote: rref.remote}
    return ways[rpc_api](timeout)


__getattr__ = missing_from("torch.distributed.rpc.rref_proxy")
