"""RRef, the reference for users: it refers to a value on some worker. Operators on it run there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NoReturn, Self, TypeVar

from torch import Tensor

from telegrad._core import checks, forks
from telegrad._core.agent.pending_call import PreparedCall
from telegrad._core.calls import profiling
from telegrad._core.calls.call_names import not_compiled, user_name
from telegrad._core.calls.futures import Future
from telegrad._core.calls.settings import DEFAULT, check_timeout, limit_of
from telegrad._core.membership.members import Identity, WorkerInfo
from telegrad._core.pickling.reducers import REDUCERS, reduce_reference
from telegrad._core.pickling.remote_text import fold, folded
from telegrad._core.references.handles import Handle, ValueSlot, check_generation, number
from telegrad._core.references.reference_table import ReferenceTable
from telegrad._core.streams.streams import MOST_WINDOW, WINDOW, Stream
from telegrad._core.worker import current
from telegrad._core.worker.value_access import (
    OF_VALUE,
    Proxy,
    RefPlaceholder,
    call_method,
    created,
    fetch,
    methods,
    opened,
    when_full,
    with_values,
)
from telegrad.autograd import backward, check_root
from telegrad.errors import CallTimeout, NotOwner, UsageError

Operator = Callable[..., Any]
new_tuple = tuple.__new__  # takes half the time of a named tuple's own `__new__`, which is written in Python
T = TypeVar("T", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self._operate(function, self, *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self._operate(function, other, self)


class RRef(Generic[T]):
    """A reference to a value of type T on one worker, its owner; the value lives as long as any reference to it.

    References can be sent to any worker inside the arguments or the result of a remote call. Operators and the methods
    of tensors run at the owner and return a reference to their result, as does a call: `rref(*args)`. `rpc.remote`
    creates a reference to a value of another worker, `RRef(value)` one to a value of this worker.

    Args:
        value: anything.
        type_hint: accepted and ignored: any type will do.

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> ones = rpc.remote("worker1", torch.ones, (3,))
        >>> total = (ones * 2).sum()  # computed on worker1
        >>> total.to_here()
        tensor(6.)
    """

    __slots__ = ("__weakref__", "_handle", "_is_computed", "_table")

    _make_future: Callable[[], Future[Any]] = Future
    _sends_modes = True  # workers with this class of references send the grad mode and autocast with their calls

    _handle: Handle
    _is_computed: bool  # by an operator, or by a method of tensors
    _table: ReferenceTable

    @not_compiled
    def __init__(self, value: T, type_hint: Any = None) -> None:
        self._table = current.references()
        self._is_computed = False
        self._table.agent.streams.publish()
        self._handle = self._table.own(ValueSlot.of(value))

    @classmethod
    def _of_handle(cls, table: ReferenceTable, handle: Handle) -> Self:
        """Create the user's object for a reference that was created elsewhere or was received."""
        made = cls.__new__(cls)
        made._table = table
        made._handle = handle
        made._is_computed = False
        return made

    # The owner

    def owner(self) -> WorkerInfo:
        """Return the worker that has the value; raises as `owner_name`."""
        return WorkerInfo(self.owner_name(), self._handle.owner.id)

    def owner_name(self) -> str:
        """Return the name of the worker that has the value.

        Raises:
            GenerationOver: an elastic group is in another generation, where another worker may have that name.
        """
        check_generation(self._handle)
        return self._handle.owner.name

    def is_owner(self) -> bool:
        """Return True if this worker has the value."""
        return self._handle.owner == self._table.agent.me.identity

    def confirmed_by_owner(self) -> bool:
        """Return True if the owner already knows that this worker holds a reference."""
        return self._table.confirmed(self._handle)

    # The value

    @property
    def _telegrad_known_as(self) -> str:
        return f"to_here() of {self!r}"

    _telegrad_noted_as = "to_here() of a reference"  # recorded calls do not distinguish references

    @not_compiled
    def to_here(self, timeout: float = DEFAULT) -> T:
        """Return the value itself on its owner, elsewhere a copy; wait until it exists. Timeout as for `rpc.rpc_sync`.

        Returns:
            The value; its tensors are in memory of this worker.

        Raises:
            Exception: the error of the function that should have created the value.
            RRefError: the value is lost; `OwnerLost` if its owner died.
            CallTimeout: it did not arrive in time.
        """
        if self._handle.slot is not None:
            return self._open(timeout)
        try:
            owner, perform = self._reach(timeout), self._table.agent.perform
            call = new_tuple(PreparedCall, (fetch, self._handle.id, None, None, self))
            if profiling.wanted():
                here, there = self._table.agent.name, owner.name
                event = profiling.CallEvent(f"to_here#({here})->({there})", "to_here", here, there)
                perform = partial(profiling.called, event, perform)
            return perform(owner, call, timeout)  # type: ignore[no-any-return]
        except BaseException as error:
            fold(error)
            raise

    def _reach(self, timeout: float = DEFAULT) -> Identity:
        """Return the owner to call, or raise an error. A restorable value, which may then be another, is waited for."""
        return self._table.reach(self._handle)

    def _check(self) -> None:
        """As `_reach`, without a call."""
        self._table.check(self._handle)

    @not_compiled
    def local_value(self) -> T:
        """Return the value itself, on its owner; wait until it exists.

        Raises:
            NotOwner: the value lives on another worker.
        """
        if self._handle.slot is None:
            raise NotOwner(
                f"{self!r}: the value is not on this worker. Use to_here() for a copy, or rpc_sync() to use it there"
            )
        return self._open(0)

    def _open(self, timeout: float) -> T:
        self._table.check(self._handle)
        assert self._handle.slot is not None
        limit = limit_of(timeout, self._table.agent.timeout)
        try:
            value: T = opened(self._handle.slot, self._table.agent, limit)
        except TimeoutError as error:
            # The value exists, so this error is that of the function that should have created it.
            if self._handle.slot.full:
                raise
            raise CallTimeout(
                f"{self!r}: the value was not created within {limit:g} s; the function that creates it may still be "
                "running. Give to_here a longer timeout, or 0 for no limit"
            ) from error
        return value

    @not_compiled
    def future(self) -> Future[None]:
        """Return a future that is done once the value exists; it fails with the error of the creating call."""
        return self._when_made(DEFAULT)

    _get_future = future

    def _when_made(self, timeout: float) -> Future[None]:
        creation = self._table.creation(self._handle)
        if creation is not None:
            return creation
        self._check()
        if self._handle.slot is not None:
            return when_full(self._handle.slot)
        if self._table.made_here(self._handle):  # the creating call has therefore succeeded
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self._table.agent.call_async(self._reach(), created, self._handle.id, None, timeout, self)

    # Gradients

    @not_compiled
    @folded
    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run backward from the value, a tensor of one element, across workers in a context.

        Args:
            dist_autograd_ctx_id: the context, from `telegrad.autograd.context`. Without one, the graph and the value
                must be on this worker alone.
            retain_graph: keep the graph for another pass.

        Raises:
            UsageError: the value is no tensor of one element that needs a gradient.
            NotOwner: there is no context, and the value lives on another worker.
        """
        checks.flag("retain_graph", retain_graph)
        checks.count("dist_autograd_ctx_id", dist_autograd_ctx_id, -1, what="the id of a context")
        if dist_autograd_ctx_id != -1:
            backward(dist_autograd_ctx_id, self, retain_graph)
            return
        value = self.local_value()
        if not isinstance(value, Tensor):
            check_root(value)
        value.backward(retain_graph=retain_graph)  # type: ignore[attr-defined]

    def _as_root(self) -> tuple[str, Any, Callable[[float], Future[None]]]:
        return self._reach().name, self._handle.id, self._when_made

    # Calls at the owner

    @not_compiled
    @folded
    def rpc_sync(self, timeout: float = DEFAULT) -> T:
        """Return a proxy: `rref.rpc_sync().method(*args)` runs a method of the value at the owner and returns its
        result. The timeout is as for `rpc.rpc_sync`.

        Returns:
            A `Proxy`, whose every attribute is such a method.
        """
        check_timeout(timeout)
        return Proxy(self._call, timeout)  # type: ignore[return-value]  # completes and checks the methods of T

    @not_compiled
    @folded
    def rpc_async(self, timeout: float = DEFAULT) -> Proxy[Future[Any]]:
        """As `rpc_sync`, but return a future.

        Returns:
            A `Proxy`, whose methods return a `Future`.
        """
        check_timeout(timeout)
        return Proxy(self._call_async, timeout)

    @not_compiled
    @folded
    def remote(self, timeout: float = DEFAULT) -> Proxy[RRef[Any]]:
        """As `rpc_sync`, but return a reference to the result, which stays at the owner.

        Returns:
            A `Proxy`, whose methods return an `RRef`.
        """
        check_timeout(timeout)
        return Proxy(self._create, timeout)

    @not_compiled
    @folded
    def rpc_stream(self, timeout: float = DEFAULT, window: int = WINDOW) -> Proxy[Stream[Any]]:
        """As `rpc_sync`, for a method that yields: return a stream of its items.

        Args:
            timeout: seconds for each item; 0 for no limit. The default is in the options.
            window: how many items the method may be ahead of its reader.

        Returns:
            A `Proxy`, whose methods return a `Stream`.
        """
        check_timeout(timeout)
        checks.count("window", window, 1, MOST_WINDOW, "a number of items")
        return Proxy(partial(self._stream, window), timeout)

    def __call__(self, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Call the value at its owner; return a reference to the result."""
        return self._create("", DEFAULT, args, kwargs)

    @not_compiled
    def _call(self, method: str, timeout: float, args: Any, kwargs: Any, asked: Any = None) -> Any:
        owner, perform = self._reach(timeout), self._table.agent.perform
        if profiling.wanted():
            perform = self._recorded("sync", method, perform, asked)
        return perform(owner, self._prepared(method, args, kwargs, asked), timeout)

    @not_compiled
    def _call_async(self, method: str, timeout: float, args: Any, kwargs: Any, asked: Any = None) -> Future[Any]:
        owner, begin = self._reach(timeout), self._table.agent.begin
        if profiling.wanted():
            begin = self._recorded("async", method, begin, asked)
        return begin(owner, self._prepared(method, args, kwargs, asked), timeout, self._make_future)

    @not_compiled
    def _stream(self, window: int, method: str, timeout: float, args: Any, kwargs: Any) -> Stream[Any]:
        owner = self._reach(timeout)
        return Stream(owner, self._prepared(method, args, kwargs), timeout, window)

    @not_compiled
    def _create(self, method: str, timeout: float, args: Any, kwargs: Any) -> RRef[Any]:
        owner = self._reach(timeout)
        create: Callable[..., RRef[Any]] = self._recorded("remote", method, self._table.create)
        return create(owner, self._prepared(method, args, kwargs), timeout)

    def _prepared(self, method: str, args: Any, kwargs: Any, asked: Any = None) -> PreparedCall:
        """Return the call of a method; `_reach` must precede, since it may replace the handle."""
        return new_tuple(PreparedCall, (methods.of(method), (*self._handle.id, *args), kwargs, self, asked))

    def _recorded(self, kind: str, method: str, call: F, asked: Any = None) -> F:
        """Return a function that makes a call, which is an event in profiles if they are wanted."""
        if not profiling.wanted():
            return call
        what = user_name(asked) if asked is not None else method or "__call__"
        here, there = self._table.agent.name, self._handle.owner.name
        event = profiling.CallEvent(profiling.event_name(kind, what, here, there), what, here, there)
        return partial(profiling.CALLS[kind], event, call)  # type: ignore[return-value]

    # Operators and methods of tensors

    @not_compiled
    def _operate(self, function: Callable[..., Any], /, *operands: Any, **named: Any) -> RRef[Any]:
        """Call a function at the owner with the values of its operands."""
        held = [each for each in (*operands, *named.values()) if isinstance(each, RRef)]
        for each in held:
            each._check()
        args = (function, *(each._lent() if isinstance(each, RRef) else each for each in operands))
        kwargs = {name: each._lent() if isinstance(each, RRef) else each for name, each in named.items()}
        name = operands[1] if function is call_method else profiling.function_name(function)
        asked = f"{name}{OF_VALUE}" if function is call_method else function
        made: RRef[Any] = self._recorded("remote", name, self._table.create)(
            self._reach(), PreparedCall(with_values, args, kwargs, held, asked), DEFAULT
        )
        made._is_computed = True
        return made

    def __bool__(self) -> bool:
        """Return True, or raise UsageError if the reference is the result of an operator or a method of tensors."""
        if self._is_computed:
            raise UsageError(
                f"bool() of {self!r}, a reference to a result, does not tell whether the result is true: an `if`, a "
                "`while` or max() needs the value. Write ref.to_here() there, as in `if (a < b).to_here()`. To call a "
                "method of an object that is named like one of tensors, write ref.rpc_sync().method()"
            )
        return True

    # Without these Python would iterate with __getitem__, without end.
    __iter__ = __contains__ = None

    def __getitem__(self, index: Any) -> Any:
        return self._operate(operator.getitem, self, index)

    __add__: Operator = _plain(operator.add)
    __sub__: Operator = _plain(operator.sub)
    __mul__: Operator = _plain(operator.mul)
    __matmul__: Operator = _plain(operator.matmul)
    __truediv__: Operator = _plain(operator.truediv)
    __floordiv__: Operator = _plain(operator.floordiv)
    __mod__: Operator = _plain(operator.mod)
    __pow__: Operator = _plain(operator.pow)
    __and__: Operator = _plain(operator.and_)
    __or__: Operator = _plain(operator.or_)
    __xor__: Operator = _plain(operator.xor)
    __lshift__: Operator = _plain(operator.lshift)
    __rshift__: Operator = _plain(operator.rshift)

    __radd__: Operator = _reflected(operator.add)
    __rsub__: Operator = _reflected(operator.sub)
    __rmul__: Operator = _reflected(operator.mul)
    __rmatmul__: Operator = _reflected(operator.matmul)
    __rtruediv__: Operator = _reflected(operator.truediv)
    __rfloordiv__: Operator = _reflected(operator.floordiv)
    __rmod__: Operator = _reflected(operator.mod)
    __rpow__: Operator = _reflected(operator.pow)
    __rand__: Operator = _reflected(operator.and_)
    __ror__: Operator = _reflected(operator.or_)
    __rxor__: Operator = _reflected(operator.xor)
    __rlshift__: Operator = _reflected(operator.lshift)
    __rrshift__: Operator = _reflected(operator.rshift)

    # Equality compares the references themselves.
    __lt__: Operator = _plain(operator.lt)
    __le__: Operator = _plain(operator.le)
    __gt__: Operator = _plain(operator.gt)
    __ge__: Operator = _plain(operator.ge)

    __neg__: Operator = _plain(operator.neg)
    __pos__: Operator = _plain(operator.pos)
    __abs__: Operator = _plain(operator.abs)
    __invert__: Operator = _plain(operator.invert)

    def _lent(self) -> RefPlaceholder:
        return RefPlaceholder(self._handle.id, (*self._handle.owner,))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and callable(getattr(Tensor, name, None)):
            return lambda *args, **kwargs: self._operate(call_method, self, name, *args, **kwargs)
        raise AttributeError(
            f"RRef has no attribute {name!r}. To call a method of the value write rref.rpc_sync().{name}(...). To read "
            f"an attribute write rref.to_here().{name}, which copies the value, or pass the reference to a function on "
            f"the owner that reads rref.local_value().{name}"
        )

    # Unsupported uses

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"{self!r} can only be sent in the arguments or the result of a remote call, because a pickled reference "
            "cannot be counted. To save the value, pickle rref.to_here()"
        )

    def __copy__(self) -> RRef[T]:
        return self

    def __deepcopy__(self, memo: Any) -> RRef[T]:
        return self

    def __repr__(self) -> str:
        if forks.is_inherited(self._table):  # logs may show it
            return "<RRef of the process that this one was forked from>"
        name, slot = f"RRef {number(self._handle.id)}", self._handle.slot
        if slot is None:
            confirmed = self._table.confirmed(self._handle)
            return f"<{name} on {self._handle.owner.name!r}{'' if confirmed else ', not confirmed yet'}>"
        state = f"here: {type(slot.value).__name__}" if slot.full else "here, still being made"
        return f"<{name} {'here, failed' if slot.failure else state}>"


REDUCERS[RRef] = lambda pickler, reference: reduce_reference(pickler, reference._handle)
