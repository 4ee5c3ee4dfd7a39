"""The future that an asynchronous call returns: torch's own, which can also be interrupted and awaited."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Generator
from contextvars import copy_context
from typing import Any, Protocol, TypeVar

import torch

from telegrad.wire.failures import fresh

T = TypeVar("T")
S = TypeVar("S")


class Outcome(Protocol):
    """What becomes of a call: a future, or what keeps the books of the room above."""

    quick: bool  # telling it runs nobody else's code, so that the thread that reads the answer does it
    call: Any

    def set_result(self, result: Any) -> None: ...

    def set_exception(self, result: Any) -> None: ...


class Helper(Protocol):
    """Whose work a waiting thread can do."""

    def help(self) -> None:
        """Wait until the future is done."""


class Future(torch.futures.Future[T]):
    """A `torch.futures.Future` whose `wait` may be interrupted by Ctrl-C, and that asyncio can await."""

    quick = False
    call: Helper | None = None  # while the call is under way

    def wait(self) -> T:
        """Wait for the value; raises the call's error."""
        if not self.done():
            if self.call is not None:
                self.call.help()  # the waiting thread fetches the answer by itself, where it can
            else:
                wait_for(self)
        return super().wait()

    def set_exception(self, result: T) -> None:
        """End with an error, which each wait raises anew.

        torch holds it where the garbage collector cannot look: with frames in it that hold the future, none of them
        would ever be collected. So those where it was raised stay as text.
        """
        assert isinstance(result, BaseException)
        error = fresh(result)
        if result.__traceback__ is not None and hasattr(error, "add_note"):
            error.add_note("".join(traceback.format_tb(result.__traceback__)))
        self._set_unwrap_func(_raise_fresh)
        self.set_result(error)  # type: ignore[arg-type]

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """A future of what `callback` returns when it is given this one, done."""
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments. {callback!r} is no function of the future")
        child: Future[S] = type(self)()  # type: ignore[assignment]

        def run(done: torch.futures.Future[T]) -> None:
            try:
                value = callback(done)
            except Exception as error:
                child.set_exception(error)  # type: ignore[arg-type]
            else:
                child.set_result(value)

        self.add_done_callback(run)
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Have `callback` called with this future once it is done, in the context variables of this moment."""
        context = copy_context()
        super().add_done_callback(lambda future: context.run(callback, future))

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()

        def pass_on() -> None:
            if not waiter.cancelled():
                try:
                    waiter.set_result(self.value())
                except BaseException as error:
                    waiter.set_exception(error)

        def wake(_: torch.futures.Future[T]) -> None:
            loop.call_soon_threadsafe(pass_on)

        self.add_done_callback(wake)
        return waiter.__await__()

    def value(self) -> T:
        """The value of a future that is done."""
        return super().wait() if self.done() else super().value()


def _raise_fresh(error: BaseException) -> None:
    raise fresh(error)


def wait_for(future: torch.futures.Future[Any], timeout: float = -1) -> bool:
    """Wait until `future` is done, interruptibly; whether it is."""
    if not future.done():
        told = threading.Lock()
        told.acquire()
        future.add_done_callback(lambda _: told.release())
        return told.acquire(timeout=timeout)
    return True
