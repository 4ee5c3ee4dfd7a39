"""Tests of streams: the items that a function on another worker yields."""

import asyncio
import contextlib
import functools
import gc
import itertools
import operator
import os
import re
import threading
import time
import weakref
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import telegrad.autograd as dist_autograd
from telegrad import errors
from telegrad._core.agent.peer import Peer
from telegrad._core.calls.futures import completion_of
from telegrad._core.pickling.pickling import LARGE
from telegrad._core.streams import streams
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.rpc import RRef, actor, debug_info, functions, remote, rpc_async, rpc_stream, rpc_sync, shutdown
from tests.cluster import PATIENCE, Process, agents_here, group, in_threads, next_turn, run_all, wait_until

pytestmark = pytest.mark.usefixtures("here")

events: dict[str, threading.Event] = {}
seen: list[Any] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    events.clear()
    seen.clear()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left(five: list[Worker]) -> Iterator[None]:
    """Check that the tests leave no calls or references behind."""
    yield
    gc.collect()
    wait_until(lambda: is_quiet(five[0]) and is_quiet(five[1]))


def event(name: str) -> threading.Event:
    return events.setdefault(name, threading.Event())


def is_quiet(worker: Worker) -> bool:
    return worker.agent.idle and not any(worker.references.counts().values())


# Functions that the other worker runs


def count(n: int) -> Generator[int, None, str]:
    yield from range(n)
    return f"{n} in all"


def noted(n: int, name: str = "closed") -> Generator[int, None, None]:
    """Yield numbers; record each of them, and the end."""
    try:
        for i in range(n):
            seen.append(i)
            yield i
    finally:
        event(name).set()


async def count_async(n: int) -> AsyncIterator[int]:
    with contextlib.closing(noted(n)) as numbers:
        for i in numbers:
            await next_turn()
            yield i


async def list_later(n: int) -> list[int]:
    await next_turn()
    return [*range(n)]


def fails_after(n: int) -> Iterator[int]:
    yield from range(n)
    raise KeyError("no more")


def gated(n: int) -> Iterator[int]:
    for i in range(n):
        event(f"gate {i}").wait(PATIENCE)
        yield i


def through(to: str, n: int, *rest: str) -> Iterator[int]:
    """Yield the items of a chain of streams, plus 1 for each stream."""
    inner = rpc_stream(to, through, [rest[0], n, *rest[1:]]) if rest else rpc_stream(to, count, (n,))
    for item in inner:
        yield item + 1


# Reading


@pytest.mark.parametrize("to", ["w0", "w1"])
@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 2}, {"window": 3}, {"window": 1000}], ids=str)
def test_all_items_arrive_in_order_and_the_value_last(to: str, options: Any) -> None:
    stream = rpc_stream(to, count, (300,), **options)
    assert stream.value is None
    assert [*stream] == [*range(300)]
    assert stream.value == "300 in all"
    assert [*stream] == []
    assert "300 items taken" in repr(stream)


def test_any_iterable_is_a_stream() -> None:
    assert [*rpc_stream("w1", range, (3,))] == [0, 1, 2]
    assert [*rpc_stream("w1", sorted, ([3, 1],), {"reverse": True})] == [3, 1]
    assert [*rpc_stream("w1", list_later, (3,))] == [0, 1, 2]
    assert [*rpc_stream("w1", count_async, (300,), window=7)] == [*range(300)]


def rewritten(way: str, size: int) -> Iterator[Any]:
    """Rewrite one tensor between yields, mostly in ways that torch's version counters do not count."""
    memory = np.zeros(size, dtype=np.float32)
    tensor: Any = torch.zeros(2, size)
    with torch.inference_mode(way == "inference"):
        made = torch.zeros(size)
    sparse = torch.zeros(2, size).index_fill_(0, torch.tensor([1]), 1).to_sparse()
    module = torch.nn.Linear(size, 1)
    grown: list[float] = []
    for i in range(3):
        with torch.inference_mode(way == "inference"):
            made.fill_(i)
        memory[:] = i
        tensor.data.fill_(i)
        sparse._values().fill_(i)
        module.weight.data.fill_(i)
        grown.append(i)
        shared = (tensor[0], tensor[0, ::2], tensor.untyped_storage())
        whole = {"array": memory, "array's tensor": torch.from_numpy(memory), "a view": tensor[1], "sparse": sparse}
        others = {"inference": made, "module": module, "storage": tensor.untyped_storage(), "shared": shared}
        yield {**whole, **others, "list": grown}[way]
        if way == "module":
            tensor.data = torch.zeros(2, size)


async def rewritten_async(way: str, size: int) -> AsyncIterator[Any]:
    for item in rewritten(way, size):
        yield item


def value_of(item: Any) -> float:
    if isinstance(item, list):
        return item[-1]
    if isinstance(item, tuple):
        row, some, storage = item
        row.add_(1)  # changes all three, as they share memory
        assert (some.stride(), storage.nbytes()) == ((2,), 8 * len(row))
        assert torch.equal(row[::2], some)
        return float(some[-1]) - 1
    if isinstance(item, torch.nn.Module):
        return float(next(item.parameters()).detach().max())
    if isinstance(item, torch.UntypedStorage):
        return float(torch.empty(0).set_(item)[-1])
    return float((item.to_dense() if isinstance(item, torch.Tensor) else item).max())


@pytest.mark.parametrize("function", ["rewritten", "rewritten_async"])
@pytest.mark.parametrize(
    "way", ["array", "array's tensor", "a view", "sparse", "inference", "module", "storage", "shared", "list"]
)
@pytest.mark.parametrize("size", [4, LARGE])
def test_an_item_that_is_rewritten_later_arrives_as_it_was_yielded(function: str, way: str, size: int) -> None:
    assert [value_of(item) for item in rpc_stream("w1", globals()[function], (way, size))] == [0, 1, 2]


def running(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    total = weight.new_zeros(3)
    for _ in range(3):
        total += weight**2
        yield total


def test_gradients_go_back_through_items_that_are_written_to_later() -> None:
    weight = torch.full((3,), 2.0, requires_grad=True)
    with dist_autograd.context() as context:
        items = rpc_stream("w1", running, (weight,))
        dist_autograd.backward(context, [torch.stack([item.sum() for item in items]).sum()])
        assert dist_autograd.get_gradients(context)[weight].tolist() == [24, 24, 24]


@pytest.mark.parametrize("function", ["kept_alive", "kept_alive_async"])
def test_an_item_that_was_sent_is_not_kept_at_the_callee(function: str) -> None:
    """The function waits meanwhile until the reader takes the item."""
    with rpc_stream("w1", globals()[function], (), window=1):
        wait_until(lambda: len(seen) == 1 and seen[0]() is None)


def kept_alive() -> Iterator[torch.Tensor]:
    while True:
        yield noticed()


async def kept_alive_async() -> AsyncIterator[torch.Tensor]:
    while True:
        yield noticed()


def noticed() -> torch.Tensor:
    tensor = torch.zeros(LARGE)
    seen.append(weakref.ref(tensor))
    return tensor


@pytest.mark.parametrize("size", [6, LARGE])
def test_a_stream_takes_types_that_torch_cannot_copy(size: int) -> None:
    numbers = torch.arange(size).to(torch.uint8)
    given = [numbers.view(getattr(torch, name)) for name in ("uint4", "uint1", "int4")]
    for sent, item in zip(given, rpc_stream("w1", list, (given,)), strict=True):
        assert item.dtype is sent.dtype
        assert torch.equal(item.view(torch.uint8), numbers)


def test_streams_of_methods() -> None:
    shelf = remote("w1", Shelf)
    assert [*shelf.rpc_stream(window=2).names("b")] == ["bread", "butter"]
    assert [*shelf.rpc_stream()()] == ["all"]


class Shelf:
    def names(self, first: str) -> Iterator[str]:
        yield from (name for name in ("apple", "bread", "butter") if name.startswith(first))

    def __call__(self) -> Iterator[str]:
        yield "all"


def test_references_are_converted_as_in_any_call() -> None:
    assert [item.to_here() for item in rpc_stream("w1", list, ([RRef(5), RRef(6)],))] == [5, 6]
    assert [*rpc_stream("w1", annotated, (RRef([1, 2]),))] == [1, 2]
    assert [*rpc_stream("w1", annotated, (remote("w2", list, ((3,),)),))] == [3]


def annotated(values: list[int]) -> Iterator[int]:
    yield from values


def test_a_stream_cannot_be_sent() -> None:
    with rpc_stream("w1", count, (3,)) as stream, pytest.raises(errors.CannotEncode) as told:
        rpc_sync("w1", len, [stream])
    assert str(told.value).startswith("argument 0 cannot be sent: <Stream of")
    assert "send its items" in str(told.value)


def test_streams_of_functions_by_value() -> None:
    assert [*rpc_stream("w1", lambda n: (i * i for i in range(n)), (4,))] == [0, 1, 4, 9]
    assert [*rpc_stream("w1", functions.by_value(annotated), ([4],))] == [4]


# Limits of items ahead


@pytest.mark.parametrize("function", [noted, count_async])
@pytest.mark.parametrize("window", [1, 2, 5, 64])
def test_a_function_is_never_more_than_a_window_ahead(function: Any, window: int) -> None:
    with rpc_stream("w1", function, (200,), window=window) as stream:
        wait_until(lambda: len(seen) == window)
        for taken in range(1, 101):
            assert next(stream) == taken - 1
            assert taken <= len(seen) <= taken + window
            if taken % window == 0:  # it knows all taken items but less than half a window
                wait_until(lambda taken=taken: len(seen) >= min(200, taken + window - window // 2))  # type: ignore[misc]
    assert event("closed").wait(PATIENCE)


def test_a_function_is_never_more_than_64_mb_ahead() -> None:
    with rpc_stream("w1", tensors, (100, 5 << 20)) as stream:
        wait_until(lambda: len(seen) == 4)
        assert rpc_sync("w1", abs, (-1,)) == 1
        assert len(seen) == 4  # the fourth reached the limit
        assert len(next(stream)) == 5 << 20
    assert len(seen) < 8


def tensors(n: int, size: int) -> Iterator[torch.Tensor]:
    for i in range(n):
        seen.append(i)
        yield torch.full((size,), float(i))


# Ends


def ends(kind: type[Exception]) -> list[int]:
    raise kind("too early")


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
def test_an_error_that_ends_loops_does_not_end_that_of_the_reader(kind: type[Exception]) -> None:
    async def read() -> list[int]:
        return [item async for item in rpc_stream("w1", ends, (kind,))]

    for act in (lambda: list(rpc_stream("w1", ends, (kind,))), lambda: asyncio.run(read())):
        with pytest.raises(RuntimeError, match=rf"the stream raised {kind.__name__}: too early\nOn worker 'w1'"):
            act()


def test_an_error_arrives_after_the_items_before_it() -> None:
    stream = rpc_stream("w1", fails_after, (3,))
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="no more") as caught:
        next(stream)
    assert "fails_after" in str(caught.value.args)
    assert "w1" in str(caught.value.args)
    assert [*stream] == []


class Empty(Exception):
    def __bool__(self) -> bool:
        raise AssertionError("an error is no condition")


def empty(n: int) -> Any:
    raise Empty


@pytest.mark.parametrize("function", [empty, lambda n: map(empty, range(n))])
def test_an_error_with_a_truth_value_of_its_own_arrives(function: Any) -> None:
    for _ in range(20):  # its items may be read before or after it ends
        with pytest.raises(Empty):
            list(rpc_stream("w1", function, (1,)))


def exits(kind: type[BaseException], n: int) -> Iterator[int]:
    yield from range(n)
    event("exits").set()
    raise kind


async def exits_in_asyncio(kind: type[BaseException], n: int) -> AsyncIterator[int]:
    for item in exits(kind, n):
        yield item


async def nothing() -> None:
    pass


@pytest.mark.parametrize("function", [exits, exits_in_asyncio])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_items_arrive_before_an_exception_that_is_no_error(function: Any, kind: type[BaseException]) -> None:
    stream = rpc_stream("w1", function, (kind, 20))
    event("exits").wait(PATIENCE)
    rpc_sync("w1", nothing)  # runs on the same event loop, so the function has ended before
    assert [*itertools.islice(stream, 20)] == [*range(20)]
    with pytest.raises(errors.RemoteError, match=f"{kind.__name__}, which is no Exception, was raised"):
        next(stream)


def test_a_function_that_returns_no_items_is_refused() -> None:
    with pytest.raises(errors.UsageError, match=r"abs returned 'int', but a stream needs items: let it `yield`"):
        next(rpc_stream("w1", abs, [-1]))
    with pytest.raises(errors.UsageError, match="returned a future"):
        next(rpc_stream("w1", later))


@functions.async_execution
def later() -> Any:
    return rpc_async("w2", abs, (-1,))


def test_an_item_that_cannot_be_sent_fails_at_its_yield() -> None:
    stream = rpc_stream("w1", with_a_lock)
    assert next(stream) == 1
    with pytest.raises(errors.CannotEncode, match="lock"):
        next(stream)


def with_a_lock() -> Iterator[Any]:
    yield 1
    yield threading.Lock()


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("this is no number",)


def test_arguments_that_cannot_be_decoded_end_the_stream() -> None:
    with pytest.raises(errors.CannotDecode, match="this is no number"):
        next(rpc_stream("w1", count, [Unreadable()]))


def test_wrong_arguments() -> None:
    with pytest.raises(errors.UnknownWorker):
        rpc_stream("nobody", count, (1,))
    with pytest.raises(errors.CannotEncode):
        rpc_stream("w1", count, [threading.Lock()])
    with pytest.raises(errors.InvalidArgument, match="give the function that yields"):
        rpc_stream("w1", count(3))  # type: ignore[call-overload]
    with pytest.raises(errors.CannotEncode, match=r"call its function by rpc.rpc_stream"):
        rpc_sync("w1", count, (3,))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        next(rpc_stream("w1", count, []))


@pytest.mark.parametrize("function", [noted, count_async])
@pytest.mark.parametrize("how", ["close", "with", "break", "dropped", "before it began"])
def test_a_reader_that_stops_closes_the_generator(function: Any, how: str, five: list[Worker]) -> None:
    wait_until(lambda: is_quiet(five[1]))
    stream: Any = rpc_stream("w1", function, (10**6,), window=4)
    if how == "close":
        next(stream)
        stream.close()
        assert [*stream] == []
    elif how == "with":
        with stream:
            next(stream)
    elif how == "break":
        for _ in stream:
            break
    elif how == "dropped":
        next(stream)
    if how != "close":
        del stream
    if how != "before it began":
        assert event("closed").wait(PATIENCE)
    wait_until(lambda: is_quiet(five[1]) and is_quiet(five[0]))


def test_a_generator_that_runs_is_closed_at_its_next_yield() -> None:
    stream = rpc_stream("w1", stands, window=1)
    assert event("stands").wait(PATIENCE)
    stream.close()
    event("go on").set()
    assert event("closed").wait(PATIENCE)


def stands() -> Iterator[int]:
    try:
        event("stands").set()
        event("go on").wait(PATIENCE)
        yield 1
        yield 2
    finally:
        event("closed").set()


def test_the_timeout_is_for_each_item() -> None:
    stream = rpc_stream("w1", gated, (3,), timeout=PATIENCE)
    event("gate 0").set()
    assert next(stream) == 0
    stream._timeout = 0.1  # only the next wait is short
    assert not event("gate 1").wait(0.2)  # time in which no reader waits does not count
    with pytest.raises(errors.CallTimeout, match=r"within the set timeout \(0.1 s\) .*gated on worker 'w1'") as caught:
        next(stream)
    assert "test_streams.py" in str(caught.value)  # the line at which the function is
    stream._timeout = PATIENCE
    event("gate 1").set()
    assert next(stream) == 1  # it goes on
    event("gate 2").set()
    assert [*stream] == [2]


def test_a_stream_that_was_late_stays_open_when_other_calls_time_out() -> None:
    stream = rpc_stream("w1", gated, (1,), timeout=0.01)
    with pytest.raises(errors.CallTimeout, match="The stream is still open"):
        next(stream)
    peer = stream._pulls[0].call.peer
    with peer.lock:
        peer.calls.next_due = 0.0  # as set by a call with a timeout of its own
    peer.expire(time.monotonic())
    event("gate 0").set()
    stream._timeout = PATIENCE  # only the first wait is short
    assert [*stream] == [0]


def test_a_stream_ends_with_its_group(five: list[Worker]) -> None:
    with agents_here(2):
        stream = rpc_stream("w1", noted, (100,), window=1)
        next(stream)
    assert event("closed").wait(PATIENCE)
    with pytest.raises(errors.PeerError):
        list(stream)


@pytest.mark.parametrize("function", [noted, count_async])
def test_a_stream_does_not_end_in_order_if_the_worker_of_its_function_leaves(function: Any) -> None:
    with agents_here(2) as made:
        stream = rpc_stream("w1", function, (100,), window=2)
        next(stream)
        answered = threading.Event()

        def hold() -> None:
            answered.wait(0.3)  # an answer would arrive before the connections end

        stream._done.add_done_callback(lambda _: answered.set())
        made[1].at_end.append(hold)
        made[1].end("a test")
        with pytest.raises(errors.LeftEarly, match="a test"):
            list(stream)
        assert event("closed").wait(PATIENCE)


# Many at once


def test_several_readers_of_one_stream_share_its_items() -> None:
    stream = rpc_stream("w1", count, (5000,), window=16)

    def read() -> list[int]:
        current.enter(None)
        return [*stream]

    parts = in_threads(read, read, read)
    assert sorted(functools.reduce(operator.iadd, parts, [])) == [*range(5000)]
    assert all(part == sorted(part) for part in parts)


def test_a_chain_of_streams() -> None:
    assert [*rpc_stream("w1", through, ("w2", 300, "w3", "w4"), window=3)] == [*range(3, 303)]


@pytest.fixture
def one_slot(here: None) -> Iterator[list[Worker]]:
    """Start two workers with one slot each, and use the first."""
    with agents_here(2, num_worker_threads=1) as made:
        yield made


def test_a_hundred_streams_on_one_slot(one_slot: list[Worker]) -> None:
    streams = [rpc_stream("w1", count, (20,), window=3) for _ in range(100)]
    for _ in range(20):
        for stream in streams:
            next(stream)
    assert [[*stream] for stream in streams] == [[]] * 100
    wait_until(lambda: all(map(is_quiet, one_slot)))


@pytest.mark.usefixtures("one_slot")
def test_a_generator_that_computes_in_the_only_slot_still_delivers() -> None:
    stream = rpc_stream("w1", gated, (3,))
    for i in range(3):
        event(f"gate {i}").set()
        assert next(stream) == i  # though it waits at the next gate, and keeps its slot


@pytest.mark.usefixtures("one_slot")
def test_a_stream_that_reads_another_on_the_same_slot() -> None:
    assert [*rpc_stream("w1", through, ("w1", 50, "w1"), window=2)] == [*range(2, 52)]


# asyncio


def test_a_cancellation_that_comes_together_with_an_item_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout or Ctrl-C may cancel the task at any moment of `async for`."""

    async def read() -> None:
        task = asyncio.current_task()
        assert task is not None

        def cancelling(awaited: Any) -> asyncio.Future[None]:
            waiter = completion_of(awaited)
            waiter.add_done_callback(lambda _: task.cancel())
            return waiter

        monkeypatch.setattr(streams, "completion_of", cancelling)
        async for _ in rpc_stream("w1", endless):
            pass

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(read(), PATIENCE))


async def test_ends_of_streams_in_asyncio() -> None:
    stream = rpc_stream("w1", fails_after, (2,))
    assert [await anext(stream) for _ in range(2)] == [0, 1]
    with pytest.raises(KeyError):
        await anext(stream)
    assert [item async for item in stream] == []

    stream = rpc_stream("w1", count, (300,), window=10)
    assert ([item async for item in stream], stream.value) == ([*range(300)], "300 in all")

    async with contextlib.aclosing(rpc_stream("w1", noted, (100,), window=2)) as stream:
        async for _ in stream:
            break
    assert await asyncio.to_thread(event("closed").wait, PATIENCE)

    stream = rpc_stream("w1", gated, (2,), timeout=0.05)
    with pytest.raises(errors.CallTimeout, match="no item arrived"):
        await anext(stream)
    event("gate 0").set()
    assert await anext(stream) == 0
    event("gate 1").set()


async def test_a_task_that_is_cancelled_loses_no_item() -> None:
    stream = rpc_stream("w1", gated, (2,))
    task = asyncio.ensure_future(anext(stream))
    await next_turn()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    event("gate 0").set()
    event("gate 1").set()
    assert [item async for item in stream] == [0, 1]


# Modes, threads and contexts


def modes(n: int) -> Iterator[tuple[Any, ...]]:
    for _ in range(n):
        yield torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), threading.get_ident()


def test_a_stream_runs_in_the_modes_of_its_caller_and_on_one_thread() -> None:
    with torch.no_grad(), torch.autocast("cpu"):
        stream = rpc_stream("w1", modes, (500,), window=3)
    got = [*stream]
    assert ({each[:2] for each in got}, len({each[2] for each in got})) == ({(False, True)}, 1)


def scaled(weight: torch.Tensor, n: int) -> Generator[torch.Tensor, None, torch.Tensor]:
    for i in range(n):
        yield weight * (i + 1)
    return weight * 100


@pytest.mark.parametrize("window", [1, 2, 256])
def test_gradients_go_back_through_items(window: int) -> None:
    weight = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context:
        stream = rpc_stream("w1", scaled, (weight, 4), window=window)
        dist_autograd.backward(context, [sum(item.sum() * 2 for item in stream) + stream.value.sum() * 2])
        grad = dist_autograd.get_gradients(context)[weight]
    assert torch.equal(grad, torch.full((3,), 2.0 * (1 + 2 + 3 + 4 + 100)))


def test_gradients_of_some_items_while_the_stream_is_open_and_once_it_is_closed() -> None:
    weight = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context:
        with rpc_stream("w1", scaled, (weight, 1000), window=8) as stream:
            first, second, third = next(stream), next(stream), next(stream)
            dist_autograd.backward(context, [(first * second).sum()])
        dist_autograd.backward(context, [third.sum()])  # it is closed, and its call cancelled
        grad = dist_autograd.get_gradients(context)[weight]
    assert torch.equal(grad, torch.full((3,), 7.0))


def test_a_stream_belongs_to_the_context_that_it_was_opened_in() -> None:
    weight = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context:
        stream = rpc_stream("w1", scaled, (weight, 300), window=2)
        got = in_threads(lambda: [*stream])[0]  # a thread in no context
        dist_autograd.backward(context, [sum(each.sum() for each in got)])
        assert torch.equal(dist_autograd.get_gradients(context)[weight], torch.full((3,), 300 * 301 / 2))


# Actors


@actor
class Tank:
    def __init__(self) -> None:
        self.level, self.inside = 0, 0

    def fill(self, n: int) -> Iterator[int]:
        try:
            for _ in range(n):
                self.inside += 1
                assert self.inside == 1
                self.level += 1
                self.inside -= 1
                yield self.level
        finally:
            assert self.inside == 0

    async def fill_async(self, n: int) -> AsyncIterator[int]:
        for _ in range(n):
            self.inside += 1
            await next_turn()
            assert self.inside == 1
            self.level += 1
            self.inside -= 1
            yield self.level

    def drain(self) -> int:
        self.inside += 1
        assert self.inside == 1
        rpc_sync("w2", abs, (-1,))
        self.inside -= 1
        level, self.level = self.level, 0
        return level

    def fill_itself(self, own: Any) -> int:
        return sum(own.rpc_stream().fill(3))


@pytest.mark.parametrize("method", ["fill", "fill_async"])
def test_a_stream_of_an_actor_has_a_turn_for_each_item(method: str) -> None:
    tank = remote("w1", Tank)
    drained = [0]
    for at, _ in enumerate(getattr(tank.rpc_stream(window=3), method)(200)):
        if at % 5 == 0:
            drained.append(tank.rpc_sync().drain())  # while the stream is open
    drained.append(tank.rpc_sync().drain())
    assert sum(drained) == 200


def test_an_actor_that_reads_a_stream_of_itself_raises() -> None:
    tank = remote("w1", Tank)
    with pytest.raises(errors.UsageError, match=r"Tank.fill_itself waits for a call that calls Tank.fill"):
        tank.rpc_sync().fill_itself(tank)
    assert tank.rpc_sync().drain() == 0


# Other processes


def begin_reading(of: str) -> int:
    current.worker.kept = rpc_stream(of, noted, (10**6,), window=5)
    return next(current.worker.kept)


def read_to_the_end() -> str:
    try:
        for _ in current.worker.kept:
            pass
    except errors.PeerLost as error:
        return str(error)
    return ""


def is_closed_and_idle() -> bool:
    assert event("closed").wait(PATIENCE)
    wait_until(lambda: current.worker.agent.idle)
    wait_until(lambda: not any(debug_info().values()))
    return True


def test_the_end_of_either_process_ends_the_stream() -> None:
    with group(3) as (reader, callee, other):
        assert (reader.run(begin_reading, "worker1"), callee.run(begin_reading, "worker2")) == (0, 0)
        callee.kill()
        assert re.fullmatch(r".*'worker1' was lost.* in flight for \S+ s", reader.run(read_to_the_end))
        assert other.run(is_closed_and_idle)


class Large:
    """An object in the frame of a function that reads a stream."""


def dying(count: int) -> Iterator[int]:
    yield from range(count)
    os._exit(3)


def read_what_dies(of: str) -> weakref.ref[Large]:
    large = Large()
    stream = rpc_stream(of, dying, (10,), window=1)
    try:
        for _ in stream:
            pass
    except errors.PeerLost:
        return weakref.ref(large)
    raise AssertionError


def frees_its_frame(of: str) -> bool:
    gc.disable()
    kept = read_what_dies(of)
    wait_until(lambda: kept() is None)
    return True


def test_the_error_of_a_stream_keeps_no_frame_of_its_reader() -> None:
    with group(2) as made:
        assert made[0].run(frees_its_frame, "worker1")


def leave(rank: int) -> float:
    """Read a stream on rank 0, and shut down; return the seconds that it took."""
    begun = time.monotonic()
    if rank == 0:
        stream = rpc_stream("worker1", count, (1000,), window=1)
        next(stream)
        reader = threading.Thread(target=lambda: seen.extend(stream))
        reader.start()
    shutdown()
    if rank == 0:
        reader.join()
        assert len(seen) == 999
    return time.monotonic() - begun


def test_shutdown_waits_for_streams_that_are_read() -> None:
    with group(2) as made:
        assert max(run_all(made, leave)) < PATIENCE


def endless() -> Iterator[int]:
    yield from itertools.count()


def leave_open(rank: int) -> str:
    """Keep an interrupted stream on rank 0, as a notebook keeps its traceback; shut down, and read on."""
    kept: list[BaseException] = []
    stream = rpc_stream("worker1", endless) if rank == 0 else None
    try:
        for _ in stream or ():
            raise KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        kept.append(interrupt)
    shutdown()
    if stream is None:
        return ""
    with pytest.raises(errors.ShutDown) as told:
        next(stream)
    return str(told.value)


def test_shutdown_closes_streams_that_its_thread_has_left_open() -> None:
    with group(2) as made:
        assert "has closed the stream of " in run_all(made, leave_open)[0]


def echo_large(n: int) -> float:
    total = 0.0
    for item in rpc_stream("worker1", tensors, (n, 1 << 20)):
        total += float(item[-1])
        item += 1  # it is the reader's own
    return total


def test_large_tensors_between_processes(workers: list[Process]) -> None:
    assert workers[0].run(echo_large, 20) == sum(range(20))


def test_a_stream_goes_on_after_an_interrupt_of_a_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = rpc_stream("w1", count, (1000,), window=2)
    assert next(stream) == 0

    def interrupt(_: Peer) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Peer, "wait_for_capacity", interrupt)
    monkeypatch.setattr(Peer, "is_full", True)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert list(stream)[-1] == 999


def test_waits_that_time_out_leave_nothing_behind(five: list[Worker]) -> None:
    stream, value = rpc_stream("w1", gated, (1,), timeout=0.01), remote("w1", list_of_gated, (1,))

    async def ahead() -> None:
        with pytest.raises(errors.CallTimeout):
            await anext(stream)

    for _ in range(3):
        asyncio.run(ahead())
        for wait in (stream.__next__, functools.partial(value.to_here, 0.01)):
            with pytest.raises(errors.CallTimeout):
                wait()
    assert not stream._pulls[0]._callbacks
    wait_until(lambda: not any(call.cancelled for call in five[1].agent._server.going_on))
    wait_until(lambda: not any(slot._callbacks for slot in five[1].references._slots.values()))
    event("gate 0").set()
    assert value.to_here() == list(stream) == [0]


def list_of_gated(n: int) -> list[int]:
    return list(gated(n))
