"""What surrounds a call and holds in its function, too: the caller's autocast, its baggage, its time, who waits for it.

A method of an actor has its turn while it runs. Each call that it makes is a hop, and so is named what is done for the
sake of that call, wherever: a call back to the actor would wait for the turn, and the turn for it. While the method
waits for a hop, such calls are refused.

Baggage are named strings of who follows calls (see `profiling`). A worker where nobody does passes on what came to it.

Time is told as what is left of it, since the clocks of two workers know nothing of each other. The one that calls in
this scene have ends at the same moment, whatever their own limits are.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from math import inf
from time import monotonic
from types import coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from telegrad._core.atfork import in_child
from telegrad._core.calls import profiling
from telegrad._core.calls.attachments import GraphContext
from telegrad._core.devices import device_streams as streams
from telegrad._core.devices.device_streams import Streams
from telegrad._core.wire.messages import INFERENCE, NO_GRAD
from telegrad._core.wire.tensors import DTYPES, NAMES
from telegrad.errors import CallTimeout

if TYPE_CHECKING:
    import asyncio

_is_autocast_on = torch._C._is_any_autocast_enabled  # for a device, whichever: the fastest way to ask

Hops = tuple[tuple[str, int], ...]


class Turn:
    """The time in which one method of an actor runs."""

    def __init__(self, key: str, on_wait: Callable[[Turn, tuple[str, int]], None]) -> None:
        """`on_wait` is called with each hop that the method begins to wait for."""
        self.key = key
        self.awaited: set[tuple[str, int]] = set()
        self.on_wait = on_wait
        self.calls = itertools.count()


class InTurn(NamedTuple):
    """By which method of an actor a call was made."""

    turn: Turn
    hop: tuple[str, int]

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Inside, the method waits for the call."""
        self.turn.awaited.add(self.hop)
        try:
            self.turn.on_wait(self.turn, self.hop)
            yield
        finally:
            self.turn.awaited.discard(self.hop)

    def awaiting(self, waiter: asyncio.Future[Any]) -> Generator[Any, None, Any]:
        """Await a future so."""
        with self.waited_for():
            return (yield from waiter.__await__())


class Scene(NamedTuple):
    """Where some code runs."""

    hops: Hops = ()  # for whose sake
    turn: Turn | None = None  # in which
    baggage: dict[str, str] | None = None
    until: float = inf  # by this worker's `monotonic`: when nobody waits for it any more
    whose: str = ""  # limit that is


class Described(Protocol):
    """A call."""

    @property
    def described(self) -> str:
        """What was called, and where."""


class Share(float):
    """The time of a call that has at most what is left of another's."""

    whose: str = ""  # limit that is, where it is not its own

    @classmethod
    def of(cls, left: float, whose: str) -> Share:
        made = cls(left)
        made.whose = whose
        return made


_current: ContextVar[Scene | None] = ContextVar("telegrad_scene", default=None)
_entered = False  # whether there was ever a scene in this process
limits = False  # whether there was ever one whose time is limited


@in_child
def _leave() -> None:
    """The call that the forking thread serves, whose time may be limited, is the parent's."""
    _current.set(None)


def matters() -> bool:
    """Whether there may be something to tell of this thread."""
    return _entered or profiling.follower is not None or _is_autocast_on()


def within(limit: float, call: Described) -> float:
    """The time of a call that begins here, whose own limit is that (0 for none).

    Raises:
        CallTimeout: there is none left.
    """
    here = _current.get()
    if here is None or here.until == inf:
        return limit
    left = here.until - monotonic()
    if left <= 0:
        raise CallTimeout(f"{call.described} was not called: no time was left of {here.whose}")
    return Share.of(limit, "") if 0 < limit <= left else Share.of(left, here.whose)


def time_left() -> float | None:
    """Seconds that this code has by the limits of those who wait for it; None where none was told.

    Callers tell it where their options have `pass_deadlines=True`.

    Example:
        >>> rpc.rpc_sync("worker1", rpc.time_left) is None
        True
    """
    here = _current.get()
    return None if here is None or here.until == inf else max(0.0, here.until - monotonic())


def described(left: float = 0.0, whose: str = "") -> tuple[bytes, InTurn | None]:
    """What to tell of this thread, which makes a call, empty where there is nothing; and the actor that makes it.

    The call has so much time `left`, by a limit of that name; 0 where that is not told.
    """
    here = _current.get()
    follower = profiling.follower
    if here is None and follower is None and not left and not _is_autocast_on():
        return b"", None
    types = _autocast_types()
    hops, turn, baggage, *_ = here or Scene()
    if follower is not None:
        baggage = follower.baggage() or baggage
    in_turn = None
    if turn is not None:
        in_turn = InTurn(turn, (turn.key, next(turn.calls)))
        hops += (in_turn.hop,)
    if not (types or hops or baggage or left):
        return b"", in_turn
    time = (left, whose) if left else ()
    return pickle.dumps((types, torch.is_autocast_cache_enabled(), hops, baggage, *time), 5), in_turn


def described_autocast() -> bytes:
    """Return this thread's autocast for `under_autocast`, empty where it is off."""
    if not _is_autocast_on():
        return b""
    return pickle.dumps((_autocast_types(), torch.is_autocast_cache_enabled()), 5)


def under_autocast(description: bytes) -> AbstractContextManager[None]:
    """Run the block with the autocast that another thread or worker has described, and with no other."""
    return _under_autocast(description) if description or _is_autocast_on() else nullcontext()


@contextmanager
def _under_autocast(description: bytes) -> Iterator[None]:
    types, cached = pickle.loads(description) if description else ({}, True)
    with ExitStack() as stack:
        for kind in _autocast_kinds():
            name = types.get(kind)
            dtype = DTYPES[name] if name is not None else None
            stack.enter_context(torch.autocast(kind, dtype, enabled=name is not None, cache_enabled=cached))
        yield


def _autocast_kinds() -> list[str]:
    """Return the types of devices of this worker that have an autocast of their own."""
    return [kind for kind in ("cpu", streams.kind()) if kind]


def _autocast_types() -> dict[str, str]:
    """Return the dtypes of this thread's autocast, by the type of device, where it is on."""
    return {
        kind: NAMES[torch.get_autocast_dtype(kind)] for kind in _autocast_kinds() if torch.is_autocast_enabled(kind)
    }


@contextmanager
def holding(description: bytes | memoryview, came: float) -> Iterator[None]:
    """Inside, what was told of the caller as the call `came` holds here; autocast for the devices of this worker."""
    types, cached, hops, baggage, *time = pickle.loads(description)
    with ExitStack() as stack:
        for kind, name in types.items():
            if kind in _autocast_kinds():
                stack.enter_context(torch.autocast(kind, DTYPES[name], cache_enabled=cached))
        if hops or baggage or time:
            here = _current.get()
            limit = _limit(came, *time) if time else ()
            stack.enter_context(entered(Scene(hops, here and here.turn, baggage, *limit)))
        yield


def _limit(came: float, left: float, whose: str) -> tuple[float, str]:
    """Until when there is time, and by whose limit."""
    global limits
    limits = True
    return came + left, whose


def unlimited() -> AbstractContextManager[None]:
    """Inside, this thread's code has all the time."""
    here = _current.get()
    return entered(None if here is None or here.until == inf else here._replace(until=inf, whose=""))


@contextmanager
def entered(scene: Scene | None) -> Iterator[None]:
    """Inside, this thread's code runs in that scene."""
    if scene is None:
        yield
        return
    global _entered
    _entered = True
    token = _current.set(scene)
    try:
        yield
    finally:
        _current.reset(token)


def baggage() -> dict[str, str]:
    """What came with the call that this thread's code runs in."""
    here = _current.get()
    return here.baggage or {} if here is not None else {}


def hops() -> Hops:
    """For whose sake this thread's code runs."""
    here = _current.get()
    return here.hops if here is not None else ()


def hops_of(description: bytes | memoryview) -> Hops:
    """For whose sake a call was made."""
    hops: Hops = pickle.loads(description)[2]
    return hops


# All that surrounds a call


@contextmanager
def setting(
    flags: int, scene: bytes | memoryview, context: GraphContext | None, came: float = 0.0
) -> Generator[None, None, None]:
    """The grad mode, the context and the scene that the caller was in as its call `came`."""
    with ExitStack() as stack:
        if flags:
            stack.enter_context(torch.inference_mode(bool(flags & INFERENCE)))
            stack.enter_context(torch.set_grad_enabled(not flags & NO_GRAD))
        if scene:
            stack.enter_context(holding(scene, came))
        if context is not None:
            stack.enter_context(context.entered())
        yield


@contextmanager
def resumed(flags: int, scene: bytes | memoryview, context: GraphContext | None) -> Generator[None, None, None]:
    """As `setting`, for a thread that goes on with a call after its function has returned."""
    with setting(flags, scene, context):
        carried, follower = baggage(), profiling.follower
        if carried and follower is not None:
            with follower.resumed(carried):
                yield
        else:
            yield


@coroutine
def in_setting(
    inner: Coroutine[Any, Any, Any], setting: Callable[[], AbstractContextManager[None]], streams: Streams
) -> Generator[Any, None, Any]:
    """Drive `inner` with the caller's setting in each of its steps, and not in those of others between them.

    A coroutine that waits inside of `torch.no_grad()` or `torch.autocast()` has left the thread in that mode. The mode
    is kept for its next step, and the steps of other coroutines meanwhile run without it.
    """
    kept, plain = ExitStack(), None
    step: Any
    value: Any
    step, value = inner.send, None
    try:
        while True:
            ensure_grad()  # a task that the program has made on this loop may wait inside of torch.no_grad()
            try:
                with streams.turn(), setting():
                    plain = _has_no_mode() if plain is None else plain
                    kept.close()
                    waited = step(value)
                    kept = ExitStack() if plain and _has_no_mode() else _without_modes()
            except StopIteration as stop:
                return stop.value
            finally:
                ensure_grad()
            try:
                value = yield waited
                step = inner.send
            except BaseException as error:
                step, value = inner.throw, error
    finally:  # else an error would keep the coroutine by its traceback, which has this frame, in a cycle
        step = value = waited = inner = None  # type: ignore[assignment]


def ensure_grad() -> None:
    """Have this thread record gradients: a function may have called `torch.set_grad_enabled(False)`."""
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)


def _has_no_mode() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not _is_autocast_on()


def _without_modes() -> ExitStack:
    """Leave the grad mode and the autocast that this thread is in; closing the stack enters them again."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    stack.enter_context(_under_autocast(b""))
    return stack
