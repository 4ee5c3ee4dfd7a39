"""`torch.distributed.rpc.internal`: the pickler, and the names of profiled calls."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from telegrad._core.calls.profiling import event_name
from telegrad._core.pickling.pickling import decode, encode
from telegrad._core.pickling.reducers import REDUCERS
from telegrad.compat.rpc.references import not_by_hand

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(enum.Enum):
    """The ways of making a call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """An exception as text."""

    msg: str
    exception_type: type


class _InternalRPCPickler:
    """The pickler of calls, for direct use. It returns pickled bytes, and the tensors that are sent beside them."""

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        body, tensors, references, _ = encode(obj, False)
        if references:
            raise not_by_hand(references[0])
        return bytes(body), list(tensors)

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[Tensor]) -> Any:
        return decode(binary_data, tensor_table)

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Set the reducer of a class, for calls too; the first reducer of a class stays."""
        REDUCERS.setdefault(obj_class, lambda _, obj: reducer(obj))


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[Tensor]]:
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[Tensor]) -> Any:
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name of a call in the profiler."""
    return event_name(exec_type.value, func_name, current_worker_name, dst_worker_name)
