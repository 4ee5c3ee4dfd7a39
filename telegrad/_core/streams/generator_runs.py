"""Runs a stream's function, on its own thread or on the event loop, as far ahead as its feed allows.

An item is encoded at its yield, and decoded on the thread that takes it. Later changes of an item therefore have no
effect, an item that cannot be sent fails at its yield, and the reader thread of a connection decodes no user data.
Tensors are copied, since they are sent perhaps much later, and torch counts no writes by `data`, by numpy, by fused
optimizers, or to inference tensors.
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterator, Sequence
from functools import partial
from types import CoroutineType
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from telegrad._core.agent.agent import Agent
from telegrad._core.agent.call_server import Deferred
from telegrad._core.calls.call_names import user_name
from telegrad._core.calls.futures import Signal, completion_of
from telegrad._core.pickling.exceptions import without_frames
from telegrad._core.pickling.pickling import decode, encode
from telegrad._core.pickling.reducers import REDUCERS, reduce_reference
from telegrad._core.references.handles import Handle
from telegrad._core.streams.producer import Feed, Reader, current_call, reader
from telegrad._core.wire.packing import copied
from telegrad._core.worker import current
from telegrad._core.worker.actors import GeneratorTurn, steps_of
from telegrad._core.worker.value_access import Method, opened
from telegrad.errors import UsageError

_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})


class EncodedItem(NamedTuple):
    """An item that is no atom."""

    body: bytes
    tensors: Sequence[Tensor]
    references: Sequence[Any]  # handles at the sender, references of users at the receiver
    weight: int


def packed(item: Any, same_program: bool, recorded: bool) -> Any:
    """Return the encoded item, with copies of its tensors and arrays; raise CannotEncode if it cannot be sent.
    `recorded`: gradients of the copies go to the tensors."""
    if type(item) in _ATOMS:
        return item
    body, tensors, references, _ = encode(item, same_program)
    weight = len(body) + sum(each.numel() * each.element_size() for each in tensors)
    copies = [*copied(tensors)]
    if recorded:
        with torch.enable_grad():
            for slot, tensor in enumerate(tensors):
                if tensor.is_nested and tensor.requires_grad:
                    copies[slot] = tensor  # which is refused, as torch records no copy of it
                elif tensor.requires_grad:
                    # In a list: torch replaces a tensor that is an argument and also the result by a view of it.
                    made = [copies[slot].requires_grad_(False)]
                    copies[slot] = _Copied.apply(tensor, made)  # type: ignore[no-untyped-call]
    return EncodedItem(body, copies, references, weight)


class _Copied(torch.autograd.Function):
    """Not `clone`, which loses the strides, and the memory that several tensors share."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, made: list[Tensor]) -> Tensor:
        return made[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def unpacked(item: Any) -> Any:
    """Return the decoded item; raise CannotDecode if it cannot be rebuilt here."""
    return decode(item.body, item.tensors, item.references) if type(item) is EncodedItem else item


def weight_of(item: Any) -> int:
    """Return the approximate size of an item in bytes."""
    if type(item) is EncodedItem:
        return item.weight
    kind = type(item)
    if kind is int:
        return item.bit_length() >> 3  # type: ignore[no-any-return]
    return len(item) if kind is str or kind is bytes else 0


# An encoded item has handles in the place of the user's references, and is itself encoded in the answer to a pull.
REDUCERS[Handle] = reduce_reference


Steps = Callable[[], GeneratorTurn] | None  # creates the turn of each step, if the function is an actor's method


class Producer:
    """Replaces the function of a call: runs it, and feeds its items to a stream of the caller."""

    def __init__(self, function: Callable[..., Any], number: int, window: int, same_program: bool) -> None:
        self._function = function
        self._number = number
        self._window = window
        self._same_program = same_program

    @property
    def __wrapped__(self) -> Any:
        return self._function

    @property
    def _telegrad_known_as(self) -> str:
        return user_name(self._function)

    def _telegrad_runs(self, *args: Any) -> str:
        return user_name(self._function, args)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        of_caller = reader()
        of_caller.begin(self._number)
        driven: Any = None
        try:
            feed = of_caller.feed(self._number)
            if not feed.begin(self._window):
                return None
            _end_with_call(feed)
            agent, name = current.agent(), user_name(self._function, args)
            try:
                steps = self._steps(agent, args)
                made = _in_turn(steps, agent, self._function, *args, **kwargs)
                iterator = None if isinstance(made, AsyncIterable | CoroutineType) else _iterator(made, name)
                if iterator is not None:
                    return _once_drained(feed, name, self._run(agent, feed, steps, iterator))
            except BaseException as error:
                feed.end()
                # Nothing is left to send, so the server may answer with the error now. Otherwise the error waits for
                # the last item, without frames: these would keep the function's objects alive.
                if feed.drained.done():
                    raise
                return _once_drained(feed, name, error=without_frames(error))
            # From here on the coroutine that the server runs counts as the running function. `_let_go` ends that, by
            # the end of the coroutine or when it is freed.
            driven = self._drive(agent, feed, steps, made, name)
            driven.__qualname__ = name
            # Not at the end of the coroutine: a coroutine that is cancelled before it starts runs no code.
            feed.on_end = finalize(driven, _let_go, of_caller, made)
            feed.on_end.atexit = False
            return driven
        finally:
            if driven is None:
                of_caller.end()

    def _steps(self, agent: Agent, args: Any) -> Steps:
        if not isinstance(self._function, Method):
            return None
        value = opened(current.references().slot(args[:2]), agent)
        stream = current_call().caller.identity, self._number
        return steps_of(agent, value, stream, self._function.__name__)

    def _run(self, agent: Agent, feed: Feed, steps: Steps, iterator: Iterator[Any]) -> Any:
        """Run the iterator until its end, or until the stream is closed; return its result."""
        try:
            while True:
                while (room := feed.room()) is not None:
                    agent.wait_for(room)
                if feed.closed:
                    return None
                try:
                    made = self._next(iterator) if steps is None else _in_turn(steps, agent, self._next, iterator)
                except StopIteration as stop:
                    return stop.value
                # Without `del`, a function that waits for its reader would keep the tensors of an item that was sent.
                feed.put(made, weight_of(made))
                del made
        finally:
            # This raises GeneratorExit at the `yield` of a function whose stream was closed. It does nothing after the
            # function's own end.
            try:
                if isinstance(iterator, Generator):
                    _in_turn(steps, agent, iterator.close)
            finally:
                feed.end()

    async def _drive(self, agent: Agent, feed: Feed, steps: Steps, made: Any, name: str) -> None:
        """Run the function on the event loop; return once the last item was sent."""
        # A second time: the server has stored its own `stop`, which cancels the task, when it has begun this coroutine.
        _end_with_call(feed)
        try:
            await self._drive_to_end(agent, feed, steps, made, name)
        except GeneratorExit:  # from `close()`: the coroutine must not wait any more
            raise
        except BaseException:
            # The reader of a closed stream awaits no answer, and its end has cancelled this task.
            if not feed.closed:
                await completion_of(feed.drained)
            raise
        await completion_of(feed.drained)

    async def _drive_to_end(self, agent: Agent, feed: Feed, steps: Steps, made: Any, name: str) -> None:
        try:
            if isinstance(made, CoroutineType):
                made = await _awaited_in_turn(steps, agent, lambda: made)
            if not isinstance(made, AsyncIterable):
                made = _in_steps(_iterator(made, name))
            iterator: AsyncIterator[Any] = aiter(made)
            try:
                while True:
                    while (room := feed.room()) is not None:
                        await completion_of(room)
                    if feed.closed:
                        return
                    try:
                        item = await _awaited_in_turn(steps, agent, partial(self._anext, iterator))
                    except StopAsyncIteration:
                        return
                    feed.put(item, weight_of(item))
                    del item
            finally:
                if isinstance(iterator, AsyncGenerator):
                    await _awaited_in_turn(steps, agent, iterator.aclose)
        finally:
            feed.on_end()
            feed.end()

    def _next(self, iterator: Iterator[Any]) -> Any:
        """Return the next item, encoded: in an actor's turn, after which other methods may change its tensors."""
        return self._packed(next(iterator))

    async def _anext(self, iterator: AsyncIterator[Any]) -> Any:
        return self._packed(await anext(iterator))

    def _packed(self, item: Any) -> Any:
        agent = current.agent()
        graphs = agent.layers.graphs
        made = packed(item, self._same_program, graphs is not None and graphs.current() is not None)
        agent.streams.publish()
        return made


def _once_drained(feed: Feed, name: str, value: Any = None, error: BaseException | None = None) -> Any:
    """Return the result of a function, for an answer that is sent after the last item."""
    if error is None and feed.drained.done():
        return value
    ended = Signal()
    feed.drained.add_done_callback(lambda _: ended.set_result(value) if error is None else ended.set_exception(error))
    return Deferred(ended, name)


def _let_go(of_caller: Reader, made: Any) -> None:
    if isinstance(made, CoroutineType):
        made.close()  # perhaps it has not begun
    of_caller.end()


def _end_with_call(feed: Feed) -> None:
    """Close the feed when its call is cancelled: the reader has closed the stream, or the connection has ended. A
    generator ends at its next `yield`. If the connection has ended, also cancel a task, which may never come to one."""
    # Without a lock: `call.stop` is stored and then `call.cancelled` read; a thread that cancels does the reverse.
    call = current_call()
    stop = call.stop

    def end() -> None:
        feed.close()
        if stop is not None and getattr(call.link, "closed", None) is not None:
            stop()

    call.stop = end
    if call.cancelled:  # perhaps before `end` was set
        end()


def _in_turn(steps: Steps, agent: Agent, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if steps is None:
        return act(*args, **kwargs)
    step = steps()
    agent.wait_for(step.begins)
    with step.taken():
        return act(*args, **kwargs)


async def _awaited_in_turn(steps: Steps, agent: Agent, act: Callable[[], Any]) -> Any:
    if steps is None:
        return await act()
    step = steps()
    try:
        await completion_of(step.begins)
    except BaseException:  # cancelled: once the turn comes, the next call gets it
        step.begins.add_done_callback(lambda _: agent.later(lambda _: step.on_end(), None))
        raise
    with step.taken():
        return await act()


async def _in_steps(iterator: Iterator[Any]) -> AsyncGenerator[Any, None]:
    for item in iterator:
        yield item


def _iterator(made: Any, name: str) -> Iterator[Any]:
    """Return an iterator over the result of a function; raise UsageError if it gives no items."""
    try:
        return iter(made)
    except TypeError:
        kind = "a future" if isinstance(made, torch._C.Future | Deferred) else repr(type(made).__qualname__)
        raise UsageError(
            f"{name} returned {kind}, but a stream needs items: let it `yield` them, or return a list or an iterator. "
            "For one value use rpc_sync, rpc_async or remote"
        ) from None
