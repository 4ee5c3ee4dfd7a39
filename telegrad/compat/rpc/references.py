"""RRef with the undocumented interface of torch's RRef that programs use, and the pickler, which refuses references."""

import enum
import time
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from telegrad._core.calls.call_names import known_as, not_compiled
from telegrad._core.calls.futures import Future
from telegrad._core.calls.profiling import event_name
from telegrad._core.calls.settings import DEFAULT
from telegrad._core.pickling.pickling import decode, encode
from telegrad._core.pickling.reducers import REDUCERS
from telegrad._core.pickling.remote_text import folded
from telegrad._core.processes import instances
from telegrad._core.references import Id
from telegrad._core.references.handles import DELETED
from telegrad._core.rpc import rref as references
from telegrad._core.worker import current
from telegrad._core.worker.value_access import Proxy, opened
from telegrad.compat.rpc import calls
from telegrad.errors import NotInitialized, NotOwner, RRefError, TelegradError, UsageError

T = TypeVar("T")

CONFIRMATION = 5.0  # seconds for a forwarded reference to be confirmed by its owner
LOOK = 1e-3
FORK = "Cannot call fork an UserRRef after deletion."


class RRef(references.RRef[T]):
    """A reference to a value of type T on its owner. The value lives as long as any reference to it."""

    __slots__ = ("_of_operator", "_profiled", "_type")

    _make_future = staticmethod(calls.make_future)
    _sends_modes = False

    _of_operator: bool  # made here by a call of an operator of torch, see `calls.is_operator`
    _profiled: Future[Any]  # done once the profiler event of the creating call is complete
    _type: Future[type]

    @not_compiled
    def __init__(self, value: T, type_hint: Any = None) -> None:
        if isinstance(value, torch.jit.ScriptModule) and type_hint is None:
            raise UsageError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
            )
        try:
            super().__init__(value, type_hint)
        except NotInitialized:
            raise NotInitialized(
                "Current RPC agent is not set! Did you initialize the RPC framework by calling `rpc.init_rpc`?"
            ) from None

    @not_compiled
    @folded
    def to_here(self, timeout: float = DEFAULT) -> T:
        self._check_alive("Cannot call to_here() on it after deletion.")
        try:
            return super().to_here(timeout)
        except Exception as error:
            if getattr(self, "_of_operator", False):
                calls.raise_translated(error, True)
            raise

    @not_compiled
    def local_value(self) -> T:
        if self._handle.slot is None:
            raise NotOwner(
                f"For {self._describe('rref_id=', 'fork_id=')}, can't call localValue() on user "
                f"{_text(self._table.agent.me)}. Call it on owner {_text(self._handle.owner)}, or use to_here() for a "
                "copy"
            )
        return super().local_value()

    def rpc_sync(self, timeout: float = DEFAULT) -> Any:
        return RRefProxy(self._call, timeout)

    def rpc_async(self, timeout: float = DEFAULT) -> Proxy[Any]:
        return RRefProxy(self._call_async, timeout)

    def remote(self, timeout: float = DEFAULT) -> Proxy[Any]:
        """Do the same as `rpc_sync`, but return a reference to the result. A missing attribute raises at once."""
        return RRefProxy(self._create_checked, timeout)

    @not_compiled
    @folded
    def _call(self, *call: Any) -> Any:
        try:
            return super()._call(*call)
        except Exception as error:
            calls.raise_translated(error)

    @not_compiled
    def _create_checked(self, method: str, timeout: float, args: Any, kwargs: Any) -> references.RRef[Any]:
        # torch raises for a missing attribute when the proxy's method is called, and not when the result is used.
        if method:
            self._table.agent.call(
                self._table.reach(self._handle), find_attribute, (*self._handle.id, method), None, timeout
            )
        return self._create(method, timeout, args, kwargs)

    @not_compiled
    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        if dist_autograd_ctx_id == -1 and self._handle.slot is None:
            raise UsageError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        super().backward(dist_autograd_ctx_id, retain_graph)

    def confirmed_by_owner(self) -> bool:
        """Return True if the owner knows this reference. Block up to CONFIRMATION s for one that was sent here."""
        until = monotonic() + CONFIRMATION
        while not super().confirmed_by_owner():
            if self._table.made_here(self._handle) or self._table.closed or monotonic() > until:
                return False
            time.sleep(LOOK)
        return True

    def _get_profiling_future(self) -> Future[Any]:
        return self._profiled

    def _set_profiling_future(self, future: Future[Any]) -> None:
        self._profiled = future

    def _get_type(self, timeout: float = DEFAULT, blocking: bool = True) -> Any:
        """Return the type of the value, or a future of it. The owner is asked once."""
        future = getattr(self, "_type", None)
        if future is None:
            future = self._type = calls.rpc_async(
                self._handle.owner.name, _rref_typeof_on_owner, (self, True), timeout=timeout
            )
        return future.wait() if blocking else future

    def _serialize(self) -> NoReturn:
        self.__reduce_ex__(5)

    def _check_alive(self, what: str) -> None:
        if self._handle.fault == DELETED or self._table.closed:
            raise RRefError(f"{self!r} was deleted when its group ended. {what}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._check_alive(FORK)
        self._table.check(self._handle)
        raise not_by_hand(self)

    def __str__(self) -> str:
        if self._handle.slot is not None:
            return f"OwnerRRef({self._number(self._handle.id)})"
        return self._describe("RRefId = ", "ForkId = ")

    def _describe(self, ref: str, fork: str) -> str:
        known_as = self._table.fork_of(self._handle) or self._handle.id
        return f"UserRRef({ref}{self._number(self._handle.id)}, {fork}{self._number(known_as)})"

    def _number(self, id_: Id) -> str:
        maker = id_[0].rpartition("#")[0]
        try:
            rank: Any = self._table.agent.identify(maker).id
        except TelegradError:  # that worker has left
            rank = maker
        return f"GloballyUniqueId(created_on={rank}, local_id={id_[1] - 1})"


class RRefProxy(Proxy[Any]):
    """Makes `proxy.method(*args)` call that method at the owner, including special methods."""

    __slots__ = ()

    def __getattr__(self, method: str) -> Any:
        return lambda *args, **kwargs: self._call(method, self._timeout, args, kwargs)


def not_by_hand(what: Any) -> UsageError:
    """Return the error for pickling a reference outside of a call."""
    return UsageError(
        f"Can not pickle rref in python pickler, {what!r} can only be pickled when using RPC. To save the value, "
        "pickle rref.to_here()"
    )


def _reduce(pickler: Any, reference: RRef[Any]) -> Any:
    reference._check_alive(FORK)
    return REDUCERS[references.RRef](pickler, reference)


REDUCERS[RRef] = _reduce


def _text(worker: Any) -> str:
    return f"WorkerInfo(id={worker.id}, name={worker.name})"


@known_as("remote() of a reference")
def find_attribute(maker: str, number: int, name: str) -> None:
    """Raise AttributeError if the value of a reference that this worker owns has no such attribute."""
    table = current.references()
    getattr(opened(table.slot((maker, number)), table.agent), name)


@known_as("_get_type() of a reference")
def _rref_typeof_on_owner(rref: RRef[Any], blocking: bool = True) -> type:
    return type(rref.local_value())


def delete_users() -> None:
    """Release every reference of this process to values of other workers."""
    counts = current.references().counts()
    if counts["users"] == counts["pending_deletes"]:  # there is none: skip the search through all objects of torch
        return
    for each in instances(RRef):
        if each._handle.slot is None:
            each._table.give_up(each._handle)


# `torch.distributed.rpc.internal`


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


serialize, deserialize = _internal_rpc_pickler.serialize, _internal_rpc_pickler.deserialize


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name of a call in the profiler."""
    return event_name(exec_type.value, func_name, current_worker_name, dst_worker_name)
