"""Tests of a follower of calls: it surrounds them, and sends baggage with them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import pytest
import torch

from telegrad._core.calls import call_context, profiling
from telegrad._core.calls.futures import Future
from telegrad._core.calls.profiling import CallEvent
from telegrad.rpc import remote, rpc_async, rpc_sync
from tests.cluster import next_turn, wait_until

pytestmark = pytest.mark.usefixtures("here")

T = TypeVar("T")
_inside: ContextVar[str] = ContextVar("inside", default="")


class Notes:
    """A follower that notes its calls; its baggage is the path of the call."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def called(self, event: CallEvent, call: Callable[[], T]) -> T:
        self.lines.append(f"{event.here} calls {profiling.function_name(event.function)} on {event.there}")
        return call()

    def begun(self, event: CallEvent, call: Callable[[], tuple[T, Future[Any]]]) -> T:
        value, future = call()
        torch._C.Future.add_done_callback(future, lambda _: self.lines.append(f"{event.there} is done"))
        return value

    def in_place_of(
        self, function: Callable[..., Any], args: Sequence[Any], here: str, caller: str
    ) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            token = _inside.set(call_context.baggage().get("way", "") + f"{caller}>")
            try:
                return function(*args, **kwargs)
            finally:
                _inside.reset(token)

        return run

    def baggage(self) -> dict[str, str]:
        return {"way": _inside.get()} if _inside.get() else {}

    @contextmanager
    def resumed(self, baggage: dict[str, str]) -> Iterator[None]:
        yield


@pytest.fixture
def notes() -> Iterator[Notes]:
    made = Notes()
    profiling.follow(made)
    yield made
    profiling.follow(None)


def way(*to: str) -> str:
    return rpc_sync(to[0], way, to[1:]) if to else _inside.get()


async def carried() -> list[dict[str, str]]:
    before = call_context.baggage()
    await next_turn()
    return [before, call_context.baggage()]


def stop_following(to: str) -> Any:
    profiling.follow(None)
    return rpc_sync(to, call_context.baggage)


def test_a_follower_surrounds_calls_at_both_ends(notes: Notes) -> None:
    assert rpc_sync("w1", way, ("w2", "w1")) == "w0>w1>w2>"
    assert notes.lines == ["w0 calls way on w1", "w1 calls way on w2", "w2 calls way on w1"]
    del notes.lines[:]
    future, made = rpc_async("w2", abs, (-1,)), remote("w2", abs, (-1,))
    wait_until(lambda: len(notes.lines) == 2)
    assert made.to_here() == future.wait() == 1
    assert notes.lines == ["w2 is done", "w2 is done", "w0 calls to_here on w2"]


def test_baggage_holds_in_each_step_of_a_coroutine(notes: Notes) -> None:
    assert rpc_sync("w1", rpc_sync, ("w2", carried)) == [{"way": "w0>"}] * 2
    assert rpc_sync("w1", carried) == [{}] * 2


def test_a_worker_without_a_follower_passes_the_baggage_on(notes: Notes) -> None:
    assert rpc_sync("w1", rpc_sync, ("w2", stop_following, ("w3",))) == {"way": "w0>"}
    assert call_context.baggage() == {}
