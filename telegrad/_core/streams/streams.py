"""The reader's side of streams: iterates over the items that a function on another worker yields.

A stream consists of one long call, which runs the function (`generator_runs.Producer`) and is answered after the last
item was sent, and of pulls. Pulls are short calls, some of them in flight ahead of the reader. Each is answered once
items are available, with all of them. Closing the stream cancels all these calls. Windows (`__init__.py`) limit both
sides.

Several threads may read one stream. The lock of a stream guards the received items and the list of pulls. It is not
held while a call is made, which may block, or cancelled, which completes that call's future on this thread: a callback
of the long call takes the lock.
"""

import asyncio
import contextlib
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Generic, NoReturn, Self, TypeVar
from weakref import ref

import torch

from telegrad._core import checks, forks
from telegrad._core.agent.agent import Agent
from telegrad._core.agent.pending_call import PendingCall, PreparedCall
from telegrad._core.calls.call_names import NEXT_ITEMS, not_compiled, user_name
from telegrad._core.calls.futures import Future, Signal, completion_of
from telegrad._core.calls.settings import limit_of
from telegrad._core.interrupts import raised_by_handler
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.pickling.remote_text import fold
from telegrad._core.streams import ReceiveWindow
from telegrad._core.streams.generator_runs import Producer, unpacked, weight_of
from telegrad._core.streams.producer import MOST_BYTES, Taken, pull
from telegrad._core.threads import program_has_ended
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CallTimeout, ShutDown, TelegradError, UsageError

T = TypeVar("T")

MOST_WINDOW = 1 << 31
WINDOW = 256  # items that a function may be ahead of its reader
GRACE = 1.0  # seconds in shutdown until streams are closed: another thread may be about to read them
# Pulls in flight while no thread waits: while the reader processes the answer to one, the next waits at the callee,
# which sends each item at once.
AHEAD = 2

_NONE = object()


class _Pull(Signal):
    """A pull in flight; processing its answer runs no user code."""

    __slots__ = ("about", "begun", "behind", "call")

    quick = True
    about: str
    begun: float

    def __init__(self, behind: Any) -> None:
        super().__init__()
        self.behind = behind  # the call that runs the function, for `telegrad why`
        self.call: PendingCall | None = None


class Stream(Generic[T]):
    """The items that a function on another worker yields: `for item in stream`, or `async for`; from `rpc_stream`.

    Leaving `with stream:`, `close()`, or dropping the stream closes the generator on the other worker. `value` is the
    return value of the function, once all items were taken. An exception of the function is raised after the last item.

    Example:
        >>> def squares(upto):
        ...     for number in range(upto):
        ...         yield number * number
        ...     return "done"
        >>> stream = rpc.rpc_stream("worker1", squares, (4,))
        >>> list(stream)
        [0, 1, 4, 9]
        >>> stream.value
        'done'
    """

    value: Any = None

    def __init__(self, to: str | int | Identity, made: PreparedCall, timeout: float, window: int) -> None:
        """Start the function of a call."""
        checks.count("window", window, 1, MOST_WINDOW, "a number of items")
        here = current.here()
        agent, opened = here.agent, here.attached(OpenStreams)
        self._agent = agent
        self._owner = owner = agent.identify(to)
        self._name = user_name(made.users)
        self._timeout = limit_of(timeout, agent.timeout)
        self._lock = threading.Lock()  # guards the intake and the pulls
        self._intake = ReceiveWindow(window, MOST_BYTES)
        self._pulls: deque[_Pull] = deque()  # in flight, or answered and not processed
        self._unsent: deque[tuple[_Pull, int, int]] = deque()  # not sent yet: each with `ReceiveWindow.pull()`
        self._number = next(opened.numbers)
        self._done: Future[Any] = Future()  # of the call that runs the function
        # Its failure is raised to the reader, and is no unretrieved error if the reader has closed the stream.
        self._done.heed()
        producer = Producer(made.function, self._number, window, agent.shares_program(owner.name))
        agent.call_for(self._done, owner, made._replace(function=producer, asked=self._name), 0)
        self._ran: Any = self._done.call
        self._run_soon = here.references.for_finalisers()
        self._done.add_done_callback(partial(_cancel_if_failed, self._pulls, self._lock))
        in_turn = getattr(self._ran, "in_turn", None)  # of an actor's method, which waits for the function
        self._waiting = contextlib.nullcontext if in_turn is None else in_turn.waited_for
        self._broken: BaseException | None = None  # error of a failed pull
        self._ended = False  # the end was reported to the reader, or the stream was closed
        self._reader = threading.get_ident()  # the thread that has opened it, or has read it last
        opened.add(self)
        # Context of the opening code, in which all pulls are made, whichever thread reads. In an autograd context pulls
        # are made only when the reader wants more, since a backward pass should find no call in flight.
        self._here = copy_context()
        recorded = agent.layers.graphs is not None and agent.layers.graphs.current() is not None
        self._grad_mode = torch.is_grad_enabled() if recorded else None
        if not recorded:
            self._advance(AHEAD)

    # Reading

    def __iter__(self) -> Self:
        return self

    @not_compiled
    def __next__(self) -> T:
        self._reader = threading.get_ident()
        try:
            while (item := self._take()) is _NONE:
                if (awaited := self._awaited(StopIteration)) is not None:
                    self._wait(awaited)
            return self._open(item)
        except BaseException as error:
            fold(error)
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        self._reader = threading.get_ident()
        try:
            while (item := self._take()) is _NONE:
                if (awaited := self._awaited(StopAsyncIteration)) is None:
                    continue
                # Not asyncio.wait_for: up to Python 3.11 it loses a cancellation that arrives as the awaited future
                # completes.
                with self._waiting():
                    waiter = completion_of(awaited)
                    await asyncio.wait((waiter,), timeout=self._timeout or None)
                if not awaited.done():
                    waiter.cancel()
                    raise self._too_late()
            return self._open(item)
        except BaseException as error:
            fold(error)
            raise

    def _awaited(self, at_end: type[Exception]) -> _Pull | Future[Any] | None:
        """Return what the reader must wait for before it looks for items again, if anything; raise at_end if the
        function has ended, and all items were taken."""
        awaited = self._advance(1)
        with self._lock:
            is_at_end = self._intake.over and self._intake.empty
        if awaited is not None or not is_at_end:
            return awaited
        if not (self._ended or self._broken is not None or self._done.done()):
            return self._done
        self._end()
        raise at_end

    def _open(self, item: Any) -> T:
        self._agent.streams.adopt(*getattr(item, "tensors", ()))
        opened: T = unpacked(item)
        return opened

    def _take(self) -> Any:
        with self._lock:
            intake = self._intake
            if intake.empty:
                return _NONE
            item = intake.take()
            if not intake.must_tell:
                return item
            taken = intake.tell()
        try:
            self._agent.notify(self._owner.name, Taken(self._number, taken), self._owner.incarnation)
        except TelegradError:
            pass  # the pulls fail, too
        return item

    def _advance(self, least: int) -> _Pull | None:
        """Process answers and send pulls; return the pull to wait for, None if items are here or none will come."""
        with self._lock:
            while self._pulls and self._pulls[0].done():
                self._take_in(self._pulls.popleft())
            if not self._intake.over:
                # In an autograd context a pull is made only if no item is here (see `__init__`).
                wanted = AHEAD if self._grad_mode is None else least if self._intake.empty else 0
                while len(self._pulls) < wanted:
                    made = _Pull(self._ran)
                    self._unsent.append((made, *self._intake.pull()))
                    self._pulls.append(made)
            awaited = self._pulls[0] if self._intake.empty and not self._intake.over else None
        while self._unsent and not self._intake.over:
            with contextlib.suppress(IndexError):  # another thread has just taken the last one
                self._send(self._unsent.popleft())
        return awaited

    def _send(self, unsent: tuple[_Pull, int, int]) -> None:
        try:
            # A copy of the context, since two threads cannot be in one context at once.
            self._here.copy().run(self._pull, *unsent)
        except BaseException:  # the wait for room was interrupted: the next read sends it
            self._unsent.appendleft(unsent)
            raise

    def _take_in(self, answered: _Pull) -> None:
        """Process an answer, with the lock held."""
        try:
            over, *items = answered.wait()
            self._intake.came(items, [*map(weight_of, items)], over)
        except Exception as error:
            if not (self._intake.over or hasattr(self._done, "failure")):  # else complete, or `_done` has the error
                # Without its frames: they would keep the reader's frame alive, and with it this stream.
                self._broken = fresh(error)
                # On another thread: cancelling completes `_done`, whose callback takes the lock that is held here.
                self._run_soon(partial(_cancel, [self._ran]))
            self._intake.over = True

    def _pull(self, made: _Pull, index: int, taken: int) -> None:
        call = PreparedCall(pull, (self._number, index, taken), asked=f"{NEXT_ITEMS} {self._name}")
        try:
            with contextlib.nullcontext() if self._grad_mode is None else torch.set_grad_enabled(self._grad_mode):
                self._agent.call_for(made, self._owner, call, 0)
            self._agent.expect(self._owner.name)
        except Exception as error:
            if raised_by_handler(error):
                raise
            made.set_exception(error)
        # If `_done` has failed while this pull was made, its callback has not found the call, which `made` did not have
        # yet.
        _cancel_if_failed(self._pulls, self._lock, self._done)

    # Waiting

    def _wait(self, awaited: _Pull | Future[Any]) -> None:
        """Wait for a pull, or for the end of the function; this thread reads the answer to a pull itself if it can."""
        deadline = monotonic() + self._timeout if self._timeout else inf
        call = awaited.call if isinstance(awaited, _Pull) else None
        with self._waiting():
            if call is not None:
                # The pull itself has no timeout, since it may be in flight long before a reader waits for it. The
                # deadline is that of this wait only: stored in the call, it would let the timer thread end the pull.
                call.help(deadline)
            left = max(0.0, deadline - monotonic()) if self._timeout else -1
            if not self._agent.wait_for(awaited, left):
                raise self._too_late()

    def _too_late(self) -> CallTimeout:
        ran = self._ran
        at = self._agent.layers.last_word(self._owner, ran.id) if ran is not None and not self._done.done() else ""
        return CallTimeout(
            f"no item arrived within the set timeout ({self._timeout:g} s) from the stream of {self._name} on worker "
            f"{self._owner.name!r}{at}. The stream is still open: read on, or close it. Give rpc_stream a longer "
            "timeout, which applies to each item"
        )

    # The end

    def _end(self) -> None:
        """Handle the end of the function: raise its exception, once."""
        with self._lock:
            first, self._ended = not self._ended, True
        if first:
            _cancel(self._under_way())  # pulls that are ahead
            broken, self._broken = self._broken, None
            if broken is not None:
                raise fresh(broken)
            try:
                self.value = self._done.value()
            except (StopIteration, StopAsyncIteration) as error:  # a loop would take it for the end of the items
                raise RuntimeError(f"the stream raised {type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Stop the stream: its generator is closed at its `yield`, unless it has ended. Do not wait for that.

        In a forked child this does nothing: the stream is its parent's.
        """
        if forks.is_inherited(self._agent):
            return
        with self._lock:
            self._intake.close()
            self._ended = True
        _cancel(self._under_way())

    def _under_way(self) -> list[Any]:
        with self._lock:
            return [self._ran, *(pull.call for pull in self._pulls)]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not getattr(self, "_ended", True) and not is_finalizing():  # stored last, if the stream was opened
            # Any thread may run this, even in the garbage collector while a lock is held: it takes no lock and sends
            # nothing.
            self._run_soon(partial(_cancel, [self._ran, *(pull.call for pull in self._pulls)]))

    def _give_up(self) -> None:
        """Close the stream, since its reader waits in the shutdown of this worker; further reads raise ShutDown."""
        with self._lock:
            if not self._ended:
                self._intake.close()
                self._broken = ShutDown(
                    f"rpc.shutdown() on worker {self._agent.name!r} has closed the stream of {self._name} on worker "
                    f"{self._owner.name!r}, which the thread that called shutdown had left open. Read it to its end, "
                    "or close it, before shutdown"
                )
        _cancel(self._under_way())

    async def aclose(self) -> None:
        """Same as `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(f"{self!r} is read on this worker and cannot be sent; send its items")

    def __repr__(self) -> str:
        return f"<Stream of {self._name} on {self._owner.name!r}: {self._intake.taken} items taken>"


class OpenStreams:
    """The streams that one worker reads, since a graceful shutdown waits for them. Once it only waits for calls in
    flight, close the streams that the waiting thread has read last: it reads no more, although the program may still
    refer to them, as in the traceback of an interrupted loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.numbers = itertools.count(1)  # of streams that this worker reads; `next` is atomic
        # By id. No lock: each use is one operation of a dict, also in the callback of `ref`. In a Python callback, an
        # exception of a signal handler would be lost.
        self._streams: dict[int, ref[Stream[Any]]] = {}
        self._all_leave: Callable[[], bool] = lambda: False
        self._leaver = 0  # the thread that waits in shutdown
        self._next_look = inf  # used by the timer thread after `leaving`
        agent.ticking.append(self._tick)

    def add(self, stream: Stream[Any]) -> None:
        key = id(stream)
        self._streams[key] = ref(stream, partial(self._streams.pop, key))

    def leaving(self, worker: Worker) -> None:
        """Record that this thread waits for the end of all calls."""
        self._leaver, self._all_leave = threading.get_ident(), lambda: worker.leaving.all_leave()
        self._next_look = monotonic() + GRACE
        self._agent.wake_at(self._next_look)

    def _tick(self, now: float) -> float:
        if now >= self._next_look:
            self._next_look = now + GRACE
            if self._all_leave():
                opened = [found() for found in list(self._streams.values())]
                for stream in filter(None, opened):
                    # As the program ends, its daemon threads have been stopped.
                    if stream._reader == self._leaver or program_has_ended():
                        self._agent.later(Stream._give_up, stream)  # frees items of users
        return self._next_look


def serve(worker: Worker) -> None:
    """Let the shutdown of a worker close streams without a reader."""
    opened = worker.attached(OpenStreams)
    worker.before_end.append(lambda timeout: opened.leaving(worker))


def _cancel(calls: list[Any]) -> None:
    for call in calls:
        if call is not None:
            call.cancel()


def _cancel_if_failed(pulls: deque[_Pull], lock: threading.Lock, done: Future[Any]) -> None:
    """Cancel all pulls in flight if the call of the function has failed: they will not be answered. A function that has
    raised is answered after its last item, so all pulls with items are over by then."""
    if done.done() and hasattr(done, "failure"):
        with lock:
            calls = [pull.call for pull in pulls]
        _cancel(calls)
