"""The caller's context that also applies on the callee: autocast, baggage, deadline, and the methods that wait.

A method of an actor holds the actor's turn while it runs. Each call that it makes is a hop with a unique id. Nested
calls carry the ids of all hops above them. A nested call back to the actor would wait for the turn, which the method
holds while it waits for the hop: a deadlock. The actor refuses such calls.

Baggage is a dictionary of strings for call followers such as tracers (see `profiling`). A worker without a follower
forwards the baggage that it received.

Deadlines travel as the time that is left, since the clocks of two workers are not synchronised. All calls made within
one call share its deadline, even if their own timeouts are longer.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from math import inf
from time import monotonic
from types import coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from telegrad._core.calls import profiling
from telegrad._core.forks import in_child
from telegrad._core.membership.members import Identity
from telegrad._core.memory import device_streams as streams
from telegrad._core.memory.device_streams import Streams
from telegrad._core.wire.messages import INFERENCE, NO_GRAD
from telegrad._core.wire.tensors import DTYPES, NAMES
from telegrad.errors import CallTimeout, PeerError

T = TypeVar("T")

is_autocast_on = torch._C._is_any_autocast_enabled  # for any device type: the fastest query

Hops = tuple[tuple[str, int], ...]


class ActorLock:
    """The period in which one method of an actor runs."""

    def __init__(self, key: str, on_wait: Callable[[ActorLock, tuple[str, int]], None]) -> None:
        """`on_wait` is called with each hop that the method starts to wait for."""
        self.key = key
        self.awaited: set[tuple[str, int]] = set()
        self.on_wait = on_wait
        self.calls = itertools.count()


class NestedCall(NamedTuple):
    """The actor method by which a call was made."""

    turn: ActorLock
    hop: tuple[str, int]

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Mark the method as waiting for the call while the block runs."""
        self.turn.awaited.add(self.hop)
        try:
            self.turn.on_wait(self.turn, self.hop)
            yield
        finally:
            self.turn.awaited.discard(self.hop)

    def awaiting(self, waiter: asyncio.Future[Any]) -> Generator[Any, None, Any]:
        """Await a future and mark the method as waiting meanwhile."""
        with self.waited_for():
            return (yield from waiter.__await__())


class CallContext(NamedTuple):
    hops: Hops = ()  # the calls of actors for which this code runs
    turn: ActorLock | None = None  # the actor's turn that this code holds
    baggage: dict[str, str] | None = None
    until: float = inf  # deadline, on this worker's `monotonic` clock
    whose: str = ""  # name of the deadline's origin


class DerivedTimeout(float):
    """A call's timeout that is bounded by the time left of another call."""

    whose: str = ""  # name of the limit's origin, if it is not the call's own

    @classmethod
    def of(cls, left: float, whose: str) -> DerivedTimeout:
        made = cls(left)
        made.whose = whose
        return made


_NONE = CallContext()
_current: ContextVar[CallContext] = ContextVar("telegrad_call_context", default=_NONE)


class Seen:
    """The kinds of data that call contexts of this process have had. Calls look for no other kind, which saves time."""

    def __init__(self) -> None:  # attributes of the object, which are read faster than those of its class
        self.call_context = False  # True once one was entered
        self.deadline = False  # True once one had a deadline


seen = Seen()


in_child(lambda: _current.set(_NONE))  # the call that the forking thread serves belongs to the parent


def remaining_timeout(limit: float, call: Any) -> float:
    """Return the timeout of a call that starts here and has the timeout `limit` (0 for none); raise CallTimeout if
    there is none left."""
    here = _current.get()
    if here.until == inf:
        return limit
    left = here.until - monotonic()
    if left <= 0:
        raise CallTimeout(f"{call.described} was not called: no time was left of {here.whose}")
    return DerivedTimeout.of(limit, "") if 0 < limit <= left else DerivedTimeout.of(left, here.whose)


def time_left() -> float | None:
    """Return the seconds until the deadline of the call that this code serves; None where no deadline was sent.

    Callers send it where their options have `pass_deadlines=True`.

    Example:
        >>> rpc.rpc_sync("worker1", rpc.time_left) is None
        True
    """
    until = _current.get().until
    return None if until == inf else max(0.0, until - monotonic())


def described(left: float = 0.0, whose: str = "", autocast: bool = True) -> tuple[bytes, NestedCall | None]:
    """Return this thread's context for a call that it makes (empty if there is none), and the actor method that makes
    it.

    `left` is the time left for the call, limited by `whose`; 0 if no deadline is sent. `autocast` is sent, too.
    """
    here = _current.get()
    follower = profiling.follower
    if here is _NONE and follower is None and not left and not is_autocast_on():
        return b"", None
    types = _autocast_types() if autocast else {}
    hops, turn, baggage, *_ = here
    if follower is not None:
        baggage = follower.baggage() or baggage
    in_turn = None
    if turn is not None:
        in_turn = NestedCall(turn, (turn.key, next(turn.calls)))
        hops += (in_turn.hop,)
    if not (types or hops or baggage or left):
        return b"", in_turn
    time = (left, whose) if left else ()
    return pickle.dumps((types, torch.is_autocast_cache_enabled(), hops, baggage, *time), 5), in_turn


def described_autocast() -> bytes:
    """Return this thread's autocast, which is on, for `under_autocast`."""
    return pickle.dumps((_autocast_types(), torch.is_autocast_cache_enabled()), 5)


def under_autocast(description: bytes) -> AbstractContextManager[None]:
    """Run the block with exactly the autocast state in `description`, from another thread or worker."""
    return _under_autocast(description) if description or is_autocast_on() else nullcontext()


@contextmanager
def _under_autocast(description: bytes) -> Iterator[None]:
    types, cached = pickle.loads(description) if description else ({}, True)
    with ExitStack() as stack:
        for kind in _autocast_kinds():
            name = types.get(kind)
            dtype = DTYPES[name] if name is not None else None
            stack.enter_context(torch.autocast(kind, dtype, enabled=name is not None, cache_enabled=cached))
        yield


class Modes(NamedTuple):
    """The modes of torch in which a thread runs."""

    inference: bool
    records: bool  # gradients
    autocast: bytes  # for `under_autocast`

    @classmethod
    def here(cls) -> Modes:
        """Return the modes of this thread."""
        autocast = described_autocast() if is_autocast_on() else b""
        return cls(torch.is_inference_mode_enabled(), torch.is_grad_enabled(), autocast)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the block in exactly these modes, from another thread or worker."""
        inference, records, autocast = self
        with torch.inference_mode(inference), torch.set_grad_enabled(records), under_autocast(autocast):
            yield


def _autocast_kinds() -> list[str]:
    return [kind for kind in ("cpu", streams.kind()) if kind]


def _autocast_types() -> dict[str, str]:
    enabled = filter(torch.is_autocast_enabled, _autocast_kinds())
    return {kind: NAMES[torch.get_autocast_dtype(kind)] for kind in enabled}


@contextmanager
def holding(description: bytes | memoryview, came: float) -> Iterator[None]:
    """Apply the caller's context in the block; `came` is the call's arrival time. Skip autocast of absent devices."""
    types, cached, hops, baggage, *time = pickle.loads(description)
    with ExitStack() as stack:
        for kind, name in types.items():
            if kind in _autocast_kinds():
                stack.enter_context(torch.autocast(kind, DTYPES[name], cache_enabled=cached))
        if hops or baggage or time:
            context = CallContext(hops, _current.get().turn, baggage)
            if time:
                seen.deadline = True
                context = context._replace(until=came + time[0], whose=time[1])
            stack.enter_context(entered(context))
        yield


def unlimited() -> AbstractContextManager[None]:
    """Run the block without a deadline."""
    here = _current.get()
    return nullcontext() if here.until == inf else entered(here._replace(until=inf, whose=""))


@contextmanager
def entered(context: CallContext | None) -> Iterator[None]:
    if context is None:
        yield
        return
    seen.call_context = True
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def baggage() -> dict[str, str]:
    return _current.get().baggage or {}


def hops() -> Hops:
    return _current.get().hops


def hops_of(description: bytes | memoryview) -> Hops:
    hops: Hops = pickle.loads(description)[2]
    return hops


# The complete context of a call


class GraphContext(Protocol):
    """The autograd context in which calls run and tensors are sent."""

    def sent(self, tensors: Sequence[Tensor], to: Identity, what: Any, graph: bool) -> bytes:
        """Record tensors that are about to be sent, and return data for the frame. Without `graph`, record nothing."""

    def entered(self) -> AbstractContextManager[None]:
        """Return a context manager: code inside its block belongs to this context."""


class GraphLayer(Protocol):
    """Interface of the autograd layer, which follows tensors from worker to worker."""

    def current(self) -> GraphContext | None:
        """Return the context in which this thread's code runs."""

    def received(self, data: bytes, tensors: list[Tensor], sender: Identity) -> tuple[GraphContext, Sequence[Tensor]]:
        """Return the context of received tensors, which may have ended, and the tensors that replace them."""

    def close(self, reason: PeerError) -> None:
        """Release resources when the worker leaves the group."""


@contextmanager
def setting(
    flags: int, call_context: bytes | memoryview, graph: GraphContext | None, came: float = 0.0
) -> Generator[None, None, None]:
    """Apply the caller's grad mode, autograd context and call context in the block; `came` is when the call arrived."""
    with ExitStack() as stack:
        if flags:
            # In this order: entering `inference_mode` also sets the grad mode.
            stack.enter_context(torch.inference_mode(bool(flags & INFERENCE)))
            stack.enter_context(torch.set_grad_enabled(not flags & NO_GRAD))
        if call_context:
            stack.enter_context(holding(call_context, came))
        if graph is not None:
            stack.enter_context(graph.entered())
        yield


@contextmanager
def resumed(flags: int, call_context: bytes | memoryview, graph: GraphContext | None) -> Generator[None, None, None]:
    """Apply `setting` on a thread that continues a call after the call's function has returned."""
    with setting(flags, call_context, graph):
        carried, follower = baggage(), profiling.follower
        with follower.resumed(carried) if carried and follower is not None else nullcontext():
            yield


@coroutine
def in_setting(
    inner: Coroutine[Any, Any, Any], setting: Callable[[], AbstractContextManager[None]], streams: Streams
) -> Generator[Any, None, Any]:
    """Drive `inner` with the caller's setting in each of its steps, but not in steps of other coroutines between them.

    A coroutine that waits inside of `torch.no_grad()` or `torch.autocast()` leaves the thread in that mode. Save the
    mode for the coroutine's next step, and run the steps of other coroutines without it.
    """
    kept, plain = ExitStack(), None
    step: Any
    value: Any
    step, value = inner.send, None
    try:
        while True:
            ensure_grad()  # a task of the program on this loop may wait inside of torch.no_grad()
            try:
                with streams.turn(), setting():
                    plain = has_no_mode() if plain is None else plain
                    kept.close()
                    waited = step(value)
                    kept = ExitStack() if plain and has_no_mode() else _without_modes()
            except StopIteration as stop:
                return stop.value
            finally:
                ensure_grad()
            try:
                value = yield waited
                step = inner.send
            except BaseException as error:
                step, value = inner.throw, error
    finally:  # otherwise an error's traceback, which has this frame, would keep the coroutine alive in a cycle
        step = value = waited = inner = None  # type: ignore[assignment]


def ensure_grad() -> None:
    """Enable recording of gradients: a function may have called `torch.set_grad_enabled(False)`."""
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)


def has_no_mode() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not is_autocast_on()


def _without_modes() -> ExitStack:
    """Leave this thread's grad mode and autocast; closing the returned stack enters them again."""
    stack = ExitStack()
    stack.enter_context(Modes(False, True, b"").applied())
    return stack


class CallerContext:
    """The context variables and modes of the thread that creates this object, for an operation that others continue."""

    __slots__ = ("_modes", "_variables")

    def __init__(self) -> None:
        self._variables = copy_context()
        self._modes = Modes.here()

    def run(self, act: Callable[..., T], *args: Any) -> T:
        """Return `act(*args)`, called in that context. Any thread may do so, also several at once."""
        with self._modes.applied():
            # A copy for each run: a context refuses to be entered by two threads at once.
            return self._variables.copy().run(act, *args)
