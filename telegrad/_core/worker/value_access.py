"""Proxies of values on other workers, and functions that run at a value's owner, or where the value is needed.

A call that uses a reference sends its id only; the caller holds the handle until the answer, so nothing is counted.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor
from torch.nn import Module

from telegrad._core.agent.agent import Agent
from telegrad._core.agent.call_server import ASYNC_MARK, Deferred
from telegrad._core.agent.incoming import its_future
from telegrad._core.calls.call_names import RUNS, known_as, runs_as, user_name
from telegrad._core.calls.cancelling import MUST_FINISH, finishes
from telegrad._core.calls.futures import Future, complete
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.main_modules import warn_of_rebound
from telegrad._core.pickling.remote_text import fold
from telegrad._core.references import Id
from telegrad._core.references.handles import ValueSlot
from telegrad._core.references.reference_table import ReferenceTable
from telegrad._core.worker import current
from telegrad.autograd import check_root
from telegrad.errors import ClaimLost, UsageError

R = TypeVar("R")

BATCHED = "_telegrad_batched"  # attribute of the class of functions that run in batches


class RefPlaceholder(NamedTuple):
    id: Id
    owner: tuple[str, int, str]  # its identity, as a plain tuple: a class takes longer to send


@known_as("to_here() of a reference")
def fetch(maker: str, number: int) -> Any:
    slot = current.references().slot((maker, number))
    return slot.open() if slot.full else Deferred(slot, fetch)


@known_as("future() of a reference")
def created(maker: str, number: int) -> Any:
    """Return None once the value of a reference that this worker owns exists."""
    return Deferred(when_full(current.references().slot((maker, number))), created)


def when_full(slot: ValueSlot) -> Future[None]:
    """Return a future that completes with None once the slot is full, or fails with its error."""
    future: Future[None] = Future()

    def check() -> None:
        slot.wait()

    slot.add_done_callback(lambda _: complete(future, check))
    return future


class Method:
    """Calls a method of a value that this worker owns, or the value itself if the name is empty."""

    def __init__(self, attribute: str) -> None:
        self.__name__ = name = attribute[len(_CALL) :].removeprefix(EACH)
        self.__qualname__ = f"methods.{attribute}"
        known_as(f"{name or '__call__'}{OF_VALUE}")(self)

    def __call__(self, maker: str, number: int, /, *args: Any, **kwargs: Any) -> Any:
        table = current.references()
        value, name = opened(table.slot((maker, number)), table.agent), self.__name__
        function = getattr(value, name) if name else value
        if name and not callable(function):
            raise TypeError(
                f"{name!r} is an attribute of {type(value).__qualname__}, not a method. To read it, write "
                f"rref.to_here().{name}, which copies the value, or pass the reference to a function on the owner that "
                f"returns rref.local_value().{name}"
            )
        try:
            return _finish(function, args, kwargs)
        except ClaimLost as error:
            # The method has run, and a use of another published value in it has raised this. With its claim, the caller
            # would take it for the loss of this value, and repeat the call (`RestorableRRef._until_run`).
            error.claim = None
            raise

    # Pickled by this name in the module. The callee finds it as an attribute of its own `methods`, which makes it then.
    def __reduce__(self) -> str:
        return self.__qualname__

    def _telegrad_must_finish(self, maker: str, number: int, *_: Any) -> bool:
        return _must_finish((maker, number), self.__name__)

    def _telegrad_runs(self, maker: str, number: int, *_: Any) -> str:
        slot = current.references().slot((maker, number))
        return user_name(self) if slot.failure or not slot.full else _method_name(slot.value, self.__name__)


class MethodOfEach(Method):
    """As `Method`, called on many workers: each picks its own value."""

    def __init__(self, attribute: str) -> None:
        super().__init__(attribute)
        self.one = Method(attribute.replace(EACH, "", 1))

    def __call__(self, ids: dict[str, Id], /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return self.one(*ids[current.agent().name], *args, **kwargs)

    def _telegrad_must_finish(self, ids: dict[str, Id], *_: Any) -> bool:  # type: ignore[override]
        return self.one._telegrad_must_finish(*ids[current.agent().name])

    def _telegrad_runs(self, ids: dict[str, Id], *_: Any) -> str:  # type: ignore[override]
        return self.one._telegrad_runs(*ids[current.agent().name])


class _Methods:
    """One function for each method: the callee measures the duration of each function by name."""

    def __init__(self) -> None:
        self.kind = _CALL  # TURN once callees of this process may be actors, so that they must keep the order of calls

    def of(self, name: str) -> Method:
        """Return the method of that name. After EACH, the name is that of a `MethodOfEach`."""
        warn_of_rebound()
        made: Method = getattr(self, self.kind + name)
        return made

    def __getattr__(self, attribute: str) -> Method:
        # Also called for names that pickle and copy look for.
        if not attribute.startswith((_CALL, TURN)):
            raise AttributeError(attribute)
        kind = MethodOfEach if attribute.startswith(EACH, len(_CALL)) else Method
        made = self.__dict__[attribute] = kind(attribute)
        return made


_CALL = "call_"  # prefix of a method's name, which may be that of any attribute
TURN = "turn_"
EACH = "*"  # follows the prefix if many are called
OF_VALUE = "() of the value of a reference"  # after the name of a method, in names of calls
METHODS = f"{__name__}:methods.".encode()  # prefix of their names in messages
TURNS = METHODS + TURN.encode()
methods = _Methods()


class Proxy(Generic[R]):
    """Makes `proxy.method(*args)` call that method at the owner of the value, and `proxy(*args)` call the value.

    Example:
        >>> words = rpc.remote("worker1", list, ("ab",))
        >>> words.rpc_sync().index("b")
        1
    """

    __slots__ = ("_call", "_timeout")

    def __init__(self, call: Callable[[str, float, Any, Any], R], timeout: float) -> None:
        self._call = call
        self._timeout = timeout

    def __getattr__(self, method: str) -> Callable[..., R]:
        if method.startswith("__"):
            # Usually Python looks for a protocol, and no remote call is meant.
            raise AttributeError(
                f"special methods are not called through a reference: instead of {method}(...) use an operator of the "
                "reference, such as rref[key], or pass the reference to a function that uses rref.local_value()"
            )
        return RemoteMethod(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return RemoteMethod(self, "")(*args, **kwargs)


class RemoteMethod(Generic[R]):
    """A method of a value at its owner. An attribute that is no method looks the same here, so it must not be used."""

    __slots__ = ("_name", "_proxy")

    def __init__(self, proxy: Proxy[R], name: str) -> None:
        self._proxy = proxy
        self._name = name

    def __call__(self, /, *args: Any, **kwargs: Any) -> R:
        try:
            return self._proxy._call(self._name, self._proxy._timeout, args, kwargs)
        except BaseException as error:
            fold(error)
            raise

    def __repr__(self) -> str:
        return f"<the remote method {self._name!r}, not called; of an attribute, rref.to_here().{self._name} is a copy>"

    def __bool__(self) -> bool:
        raise UsageError(
            f"{self._name!r} was not called: write .{self._name}(...) for a method. To read an attribute, write "
            f"rref.to_here().{self._name}, which copies the value, or call a function on the owner that returns it"
        )

    def __eq__(self, _: object) -> bool:
        return bool(self)

    __hash__ = object.__hash__


def call_method(value: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
    return _finish(getattr(value, method), args, kwargs)


def with_values(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function` with the values of borrowed references, each fetched directly from its owner."""
    agent = current.agent()
    here = agent.me.identity
    wanted = [each for each in (*args, *kwargs.values()) if type(each) is RefPlaceholder]
    far = [each for each in wanted if each.owner != here]
    # All calls are made before the first wait, so the values are fetched at the same time.
    coming = {each: agent.call_async(Identity(*each.owner), fetch, each.id, None) for each in far}
    values = {each: opened(current.references().slot(each.id), agent) for each in wanted if each.owner == here}
    values |= {each: future.wait() for each, future in coming.items()}
    return _finish(
        function,
        tuple(values[each] if type(each) is RefPlaceholder else each for each in args),
        {name: values[each] if type(each) is RefPlaceholder else each for name, each in kwargs.items()},
    )


def opened(slot: ValueSlot, agent: Agent, timeout: float = 0) -> Any:
    """Return the value in a slot of this worker once it is full; raise TimeoutError after `timeout` s, if not 0."""
    if not slot.full and not agent.wait_for(slot, timeout or -1):
        raise TimeoutError
    value = slot.open()
    if agent.streams.used:
        agent.streams.adopt(value)
    return value


def open_roots(table: ReferenceTable, values: Sequence[Any]) -> Future[list[Tensor]]:
    """Return the root tensors of a backward pass that starts here; `values` has tensors and references.

    The future fails if one of them cannot be a root.
    """
    found: Future[list[Tensor]] = Future()
    _look_at_roots(found, [value if isinstance(value, Tensor) else table.slot(value) for value in values])
    return found


def _look_at_roots(found: Future[list[Tensor]], coming: Sequence[Tensor | ValueSlot], _: Any = None) -> None:
    """Complete `found` if all values are there; otherwise check again when the next one is.

    This is no closure that passes itself on: that would be a reference cycle, which keeps the graphs of the roots
    alive.
    """
    missing = next((each for each in coming if isinstance(each, ValueSlot) and not each.done()), None)
    if missing is None:
        complete(found, _roots_of, coming)
    else:
        missing.add_done_callback(partial(_look_at_roots, found, coming))


def _roots_of(coming: Sequence[Tensor | ValueSlot]) -> list[Tensor]:
    roots = [each.wait() if isinstance(each, ValueSlot) else each for each in coming]
    for root in roots:
        check_root(root)
    return roots


runs_as(with_values, lambda function, *args: user_name(function, args))
setattr(with_values, MUST_FINISH, lambda function=None, *args: finishes(function, args))  # also without arguments
setattr(call_method, MUST_FINISH, lambda value, method, *_: _must_finish(value.id, method))
runs_as(call_method, lambda value, method, *_: _method_name(value, method))


def _must_finish(ref: Id, method: str) -> bool:
    """Return True if that method of a value of this worker must finish; False if the value does not exist yet."""
    slot = current.references().slot(ref)
    return slot.full and not slot.failure and finishes(getattr(slot.value, method or "__call__", None), ())


def _method_name(value: Any, method: str) -> str:
    """Return the user's name for a method of a value, or for a call of the value itself."""
    if type(value) is RefPlaceholder:
        return f"{method}{OF_VALUE}"
    said = getattr(type(value), RUNS, None)
    if said is not None:
        return str(said(value, method))
    return f"{type(value).__qualname__}.{method or ('forward' if isinstance(value, Module) else '__call__')}"


def _finish(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function as the server does for direct calls."""
    result = function(*args, **kwargs)
    if hasattr(type(function), BATCHED):
        result.__qualname__ = function.__qualname__  # errors name the coroutine so
    return Deferred(its_future(function, result), function) if hasattr(function, ASYNC_MARK) else result
