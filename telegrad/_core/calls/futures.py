"""The future that an asynchronous call returns: torch's own, which can also be interrupted and awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextvars import copy_context
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch

from telegrad._core import checks, forks
from telegrad._core.calls.awaiting import check_knows_threads, happening, make_known_to_asyncio
from telegrad._core.calls.compiling import not_compiled
from telegrad._core.calls.unretrieved import Unseen
from telegrad._core.interrupts import postpone, raised_by_handler
from telegrad._core.pickling.exceptions import fresh, kept
from telegrad._core.pickling.pickling import encode
from telegrad.errors import CallCancelled, GroupError

T = TypeVar("T")
S = TypeVar("S")


_devices: list[torch.device] = []  # on which values of futures may lie; of the process: a future knows no worker


def may_lie_on(device: torch.device) -> None:
    """From now on the values of new futures may have tensors on that device; who waits for one waits for these, too."""
    if device not in _devices:
        _devices.append(device)


class Outcome(Protocol):
    """What becomes of a call: a future, or what keeps the books of the layer above."""

    quick: bool  # telling it runs nobody else's code, so that the thread that reads the answer does it
    call: Any
    about: str  # of a call that failed: which one

    def set_result(self, result: Any) -> None: ...

    def set_exception(self, result: Any) -> None: ...


class Helper(Protocol):
    """Whose work a waiting thread can do."""

    def help(self) -> None:
        """Wait until the future is done."""

    def cancel(self) -> bool:
        """End it now, and tell the callee; False where it is over."""


class Cancels(Protocol):
    """What ends with its cause."""

    def cancel(self) -> bool: ...


class Future(torch.futures.Future[T]):
    """A `torch.futures.Future` whose `wait` may be interrupted by Ctrl-C, and that asyncio can await.

    One that fails, and is dropped before anybody has waited for it or asked to be told, leaves an error in the log.

    Args:
        devices: for a future of one's own: on which devices its value may lie.

    Example:
        >>> future = rpc.rpc_async("worker1", pow, (2, 5))
        >>> future.wait()
        32
        >>> import asyncio
        >>> async def ask():
        ...     return await rpc.rpc_async("worker1", pow, (2, 6))
        >>> asyncio.run(ask())
        64
    """

    # In a dictionary they would be one more object for the garbage collector to visit. All but `call` and `depth`,
    # which a forked child compares with its own, are set where they are needed: `about` says whose future this is,
    # `heeded` that somebody is told of its end, `follows` with what it ends, where that is not its own call.
    __slots__ = ("about", "call", "depth", "failure", "follows", "heeded")

    quick = False
    about: str
    failure: Unseen
    follows: Cancels | None
    heeded: bool

    def __init__(self, *, devices: Any = None) -> None:
        self.call: Helper | None = None  # while the call is under way
        self.depth: int = forks.depth
        if devices is None:
            torch._C.Future.__init__(self, _devices)  # what torch's own comes to, without looking at each device
        else:
            super().__init__(devices=devices)

    def __repr__(self) -> str:
        if not self.done():
            if self.depth != forks.depth:
                return "<Future of the process that this one was forked from: not done>"
            return f"<Future of {self.call!r}>" if self.call is not None else "<Future: not done>"
        failure = getattr(self, "failure", None)
        return "<Future: done>" if failure is None else f"<Future: {failure!r}>"

    @not_compiled
    def wait(self) -> T:
        """Wait for the value.

        Raises:
            Exception: what the call has failed with.
        """
        if not self.done():
            forks.check(self.depth)
            call = self.call  # loaded once: another thread may end it
            if call is not None:
                call.help()  # the waiting thread fetches the answer by itself, where it can
            else:
                wait_for(self)
        value: T = _uncovered(super().wait())
        return value

    def cancel(self) -> bool:
        """End its call now, with CallCancelled; whether that could be done. Its callbacks run before this returns.

        The callee is told: what has not begun there does not begin, an `async def` function is cancelled, and so are
        the calls that were made for the sake of this one. Of a future that `then` gave, the call it follows is ended.
        """
        if not self.done():
            forks.check(self.depth)
        cause = getattr(self, "follows", None) or self.call
        return cause is not None and cause.cancel()

    def set_result(self, result: T) -> None:
        """End with a value. Where values may lie on devices, torch looks for its tensors, by pickling it.

        Args:
            result: the value; who waits gets it.
        """
        if _devices and not isinstance(result, torch.Tensor) and not _can_be_searched(result):
            result = _Covered(result)  # type: ignore[assignment]
        torch._C.Future.set_result(self, result)

    def set_exception(self, result: T) -> None:
        """End with an error, which each wait raises anew.

        torch holds it where the garbage collector cannot look: with frames in it that hold the future, none of them
        would ever be collected. So those where it was raised stay as text.

        Args:
            result: an exception.
        """
        assert isinstance(result, BaseException)
        failure = self.failure = Unseen(getattr(self, "about", "what a future stands for"), result)
        self._set_unwrap_func(lambda error: failure.raise_fresh(_uncovered(error)))
        self.set_result(kept(result))  # type: ignore[arg-type]
        if hasattr(self, "heeded"):  # only now: whoever asks to be told from here on finds the failure
            failure.seen = True

    def _another(self) -> Future[Any]:
        """One that follows from this."""
        return type(self)()

    @not_compiled
    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """Go on with the value.

        Args:
            callback: a function of this future, done, which is called then.

        Returns:
            A future of what `callback` returns; it fails with what that raises.
        """
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments. {callback!r} is no function of the future")
        child: Future[S] = self._another()
        if self.call is not None or getattr(self, "follows", None) is not None:
            child.follows = self

        def run(done: torch.futures.Future[T]) -> None:
            child.follows = None
            try:
                value = callback(done)
            except BaseException as error:
                forks.end_if_over()
                child.about = "a callback that was given to `then`"
                child.set_exception(error)  # type: ignore[arg-type]
                if not isinstance(error, Exception) or raised_by_handler(error):
                    raise
            else:
                child.set_result(value)

        self.add_done_callback(run)
        return child

    @not_compiled
    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Have a function called once this is done, in the context variables of this moment.

        Args:
            callback: a function of this future.
        """
        checks.function("callback", callback, "a function of the future")
        check_knows_threads(callback)
        if not self.done():
            forks.check(self.depth)
        self.heed()
        context = copy_context()

        def run(future: torch.futures.Future[T]) -> None:
            try:
                context.run(callback, future)
            except BaseException as error:
                forks.end_if_over()
                if not postpone(error):  # torch would print it
                    raise

        super().add_done_callback(run)

    def heed(self) -> None:
        """Somebody else sees to it, should this fail."""
        self.heeded = True
        if hasattr(self, "failure"):
            self.failure.seen = True

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            forks.check(self.depth)
            yield from self._until_done()
        try:
            return self.value()
        except (CallCancelled, GroupError) as error:
            make_known_to_asyncio(error)
            raise error

    def _until_done(self) -> Generator[Any, None, None]:
        """Let the loop go on; where it cancels this, the call is cancelled, too."""
        in_turn = getattr(self.call, "in_turn", None)
        waiter = happening(self)
        try:
            yield from waiter.__await__() if in_turn is None else in_turn.awaiting(waiter)
        except asyncio.CancelledError:
            self.cancel()
            raise

    @not_compiled
    def value(self) -> T:
        """The value of a future that is done."""
        if not self.done():
            forks.check(self.depth)
        value: T = _uncovered(super().wait() if self.done() else super().value())
        return value


def _can_be_searched(value: Any) -> bool:
    try:
        torch._jit_internal._extract_tensors(value)  # type: ignore[no-untyped-call]
    except Exception:  # something without a name, most likely
        return False
    return True


class _Covered:
    """A value that torch cannot pickle, with its tensors as all that torch sees of it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (encode(self.value, True).tensors,)


def _uncovered(value: Any) -> Any:
    return value.value if type(value) is _Covered else value


class Signal:
    """Something that happens once, or fails: a future without a value, for what this package waits for by itself."""

    __slots__ = ("_callbacks", "_error", "_happened", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _callbacks, and that _happened is set, which is loaded without it
        self._happened = False
        self._error: BaseException | None = None  # stored before it happens
        self._callbacks: list[Callable[[Any], None]] = []

    def done(self) -> bool:
        return self._happened

    def set_result(self, result: None = None) -> None:
        with self._lock:
            self._happened = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def set_exception(self, error: BaseException) -> None:
        self._error = kept(error)
        self.set_result()

    @not_compiled
    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        with self._lock:
            if not self._happened:
                self._callbacks.append(callback)
                return
        callback(self)

    @not_compiled
    def wait(self) -> Any:
        """Raise the error, if it ended so; it must be done."""
        if self._error is not None:
            raise fresh(self._error)


def wait_for(future: torch.futures.Future[Any] | Signal, timeout: float = -1) -> bool:
    """Wait until `future` is done, interruptibly; whether it is."""
    if not future.done():
        begun = perf_counter()  # noqa: F841  # who looks on sees it on the stack
        told = threading.Lock()
        told.acquire()
        future.add_done_callback(lambda _: told.release())
        return told.acquire(timeout=timeout)
    return True
