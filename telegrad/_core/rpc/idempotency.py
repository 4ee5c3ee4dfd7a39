"""Deduplication of repeated calls: the callee's side of `idempotent=True`.

Each call has the incarnation of its caller and a number. The first call with both is run. A later one is a repetition
and gets the result of the first.

An entry stays until the caller confirms the answer (`AnswerAcknowledged`), or the call has timed out, after which it is
not repeated, and no earlier repetition can be under way. A running call always keeps its entry.

Answers take at most MOST_OF_CALLER bytes for one caller, and MOST in total, besides the newest of each caller, which
may be larger. Above these limits the oldest answer is dropped, of the caller with most bytes. Its number becomes the
caller's floor: an unknown call with that number or a lower one may have run, and is refused. If a caller has died or
left, its answers are dropped and its calls no longer run. If it returns, calls that have not come before run again.
"""

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import islice
from math import inf
from time import monotonic
from types import CoroutineType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from telegrad._core.agent.agent import Agent
from telegrad._core.agent.call_server import ASYNC_MARK, Deferred
from telegrad._core.agent.incoming import its_future
from telegrad._core.calls.call_names import runs_as, user_name
from telegrad._core.calls.cancelling import MUST_FINISH, finishing
from telegrad._core.calls.futures import Future, Signal
from telegrad._core.membership.members import Identity, Member
from telegrad._core.streams.producer import current_call
from telegrad._core.threads import results
from telegrad._core.worker import current
from telegrad.errors import AnswerLost, CallCancelled

LONGEST = 3600.0  # seconds for which the answer of a call without a timeout is kept
LATE = 30.0  # seconds that a repetition, sent before the timeout, may take to arrive
MOST_OF_CALLER = 256 << 20  # bytes
MOST = 1 << 30  # bytes
ENTRY = 1 << 10  # bytes that an answer counts besides its value
MOST_DEAD = 1 << 10  # remembered callers that died or left most recently
LOOK_EVERY = 1.0  # seconds between searches for expired answers
MOST_LOOKED_AT = 1 << 12  # objects to visit when measuring a value: about a millisecond
SAMPLE = 1 << 8  # elements to visit in one container


class AnswerAcknowledged(NamedTuple):
    """Notification to the callee: the caller has the answer to the call of that number, or wants none."""

    number: int


class CallEntry:
    """A call that was started here."""

    def __init__(self) -> None:
        self.outcome: Any = None  # future of the result; used by the driver
        self.until = 0.0  # time after which the caller does not repeat the call
        self.ended = False
        self.settled = False
        self.weight = 0  # bytes, once it has ended and is kept


class _Caller:
    def __init__(self) -> None:
        self.entries: dict[int, CallEntry] = {}  # by number; ended calls are in the order of their ends
        self.kept = 0  # bytes
        self.floor = 0.0  # unknown calls up to this number may have run
        self.newest = 0  # the highest number that has come


class IdempotencyTable:
    """The idempotent calls of one worker. The table reads no clock: `tests/sim/test_lives.py` tests it."""

    def __init__(self) -> None:
        self._callers: dict[str, _Caller] = {}  # by incarnation
        self.kept = 0  # bytes of all answers

    def __len__(self) -> int:
        return sum(len(caller.entries) for caller in self._callers.values())

    def enter(self, name: str, number: int, left: float, now: float) -> CallEntry | None:
        """Record a call with this time `left` (0 for no limit), without an outcome if it arrives for the first time;
        return None if it may have run and its answer was dropped."""
        caller = self._callers.setdefault(name, _Caller())
        entry = caller.entries.get(number)
        if entry is None:
            if number <= caller.floor:
                return None
            entry = caller.entries[number] = CallEntry()
            caller.newest = max(caller.newest, number)
        entry.until = max(entry.until, now + (left or LONGEST) + LATE)
        return entry

    def ended(self, name: str, number: int, weight: int = 0) -> list[CallEntry]:
        """Record that a call has ended, with the bytes of its value; return the entries that are dropped."""
        # Both exist: an entry is not dropped before its call has ended, nor a caller (`died`) before its last entry.
        caller = self._callers[name]
        entry = caller.entries.pop(number)
        entry.ended = True
        # The caller has given up before the end, or is dead: no repetition will come.
        if entry.settled or caller.floor == inf:
            return [entry]
        caller.entries[number] = entry  # as the newest
        entry.weight = weight + ENTRY
        caller.kept += entry.weight
        self.kept += entry.weight
        over = []
        while caller.kept > MOST_OF_CALLER and (dropped := self._drop_oldest(caller)) is not None:
            over.append(dropped)
        while self.kept > MOST:
            most = max(self._callers.values(), key=lambda each: each.kept)
            if (dropped := self._drop_oldest(most)) is None:
                break
            over.append(dropped)
        return over

    def _drop_oldest(self, caller: _Caller) -> CallEntry | None:
        """Drop the oldest answer of a caller, but not its only one."""
        ended = [*islice((number for number, entry in caller.entries.items() if entry.ended), 2)]
        if len(ended) < 2:
            return None
        # One number instead of a list of dropped ones. A call with a lower number that arrives for the first time is
        # refused, too, although it has not run; but no call runs twice.
        caller.floor = max(caller.floor, ended[0])
        return self._take_out(caller, ended[0])

    def _take_out(self, caller: _Caller, number: int) -> CallEntry:
        entry = caller.entries.pop(number)
        caller.kept -= entry.weight
        self.kept -= entry.weight
        return entry

    def settled(self, name: str, number: int) -> CallEntry | None:
        """Record that the caller has the answer, or wants none; return the entry if it is dropped."""
        caller = self._callers.get(name)
        entry = caller.entries.get(number) if caller is not None else None
        if caller is None or entry is None:
            return None
        entry.settled = True
        return self._take_out(caller, number) if entry.ended else None

    def expire(self, now: float) -> list[CallEntry]:
        over = []
        for caller in self._callers.values():
            late = [number for number, entry in caller.entries.items() if entry.ended and entry.until <= now]
            over += [self._take_out(caller, number) for number in late]
        return over

    def died(self, name: str) -> list[CallEntry]:
        """Record that a caller has died or left; return the entries of its ended calls."""
        caller = self._callers.pop(name, None) or _Caller()
        self._callers[name] = caller  # as the last
        caller.floor = inf
        # A dead caller is remembered, since calls that it has sent before may still arrive. One with running calls
        # stays in any case: `ended` looks it up.
        gone = [each for each, other in self._callers.items() if other.floor == inf and not other.entries]
        if len(gone) > MOST_DEAD:
            del self._callers[gone[0]]
        return [self._take_out(caller, number) for number, entry in list(caller.entries.items()) if entry.ended]

    def is_dead(self, name: str) -> bool:
        caller = self._callers.get(name)
        return caller is not None and caller.floor == inf

    def returned(self, name: str) -> None:
        """Record that a caller that had died lives: calls that have come before its return were dropped, others run."""
        if self.is_dead(name):
            self._callers[name].floor = self._callers[name].newest


class IdempotentCalls:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards the table
        self._table = IdempotencyTable()
        self._next_look = 0.0  # used by the timer thread only
        self._dead: deque[str] = deque()  # callers that recently died or left; each use is one operation of a deque
        agent.on(AnswerAcknowledged, self._on_settled)
        agent.ticking.append(self._tick)

    def __len__(self) -> int:
        return len(self._table)

    def enter(self, caller: str, number: int, left: float) -> tuple[Future[Any], bool]:
        """Record a call; return its outcome, and True if it must run; raise AnswerLost if its answer was dropped."""
        now = monotonic()
        with self._lock:
            entry = self._table.enter(caller, number, left, now)
            if entry is None:
                raise AnswerLost(
                    f"worker {self._agent.name!r} no longer has the answer of this idempotent call, which may have run "
                    f"and was not repeated: it keeps at most {MOST_OF_CALLER >> 20} MiB of unread answers for one "
                    f"worker, {MOST >> 20} MiB for all, and none for a worker that was declared lost. Check what the "
                    "function has done, and call it again if it has not run or may run twice"
                )
            outcome: Future[Any] | None = entry.outcome
            if outcome is not None:
                return outcome, False
            outcome = entry.outcome = Future()
        outcome.heed()  # the caller gets a failure
        return outcome, True

    def ended(self, caller: str, number: int, outcome: Future[Any], result: Any, error: BaseException | None) -> None:
        """Complete the outcome of a call for its repetitions."""
        weight = 0
        with suppress(Exception):  # of a user's `__sizeof__`
            weight = size_of(result if error is None else error.args)
        with self._lock:
            over = self._table.ended(caller, number, weight)
        del over  # freed without the lock: it may hold objects of the user
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    def gone(self, member: Member) -> None:
        """Drop the answers for a worker that has died or left, within LOOK_EVERY."""
        # Only noted: this runs under the lock of the membership, and answers may hold objects whose end runs user code.
        self._dead.append(member.incarnation)

    def returned(self, member: Member) -> None:
        """Run calls of a lost worker that answers again."""
        with self._lock:
            with suppress(ValueError):  # it has been processed
                self._dead.remove(member.incarnation)
            self._table.returned(member.incarnation)

    def _on_settled(self, sender: Identity, settled: AnswerAcknowledged) -> None:
        with self._lock:
            over = self._table.settled(sender.incarnation, settled.number)
        del over

    def _tick(self, now: float) -> float:
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY
            with self._lock:
                over = self._table.expire(now)
                while self._dead:
                    over += self._table.died(self._dead.popleft())
            del over
        return self._next_look


def run_once(number: int, left: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, or the result of an earlier call with this number."""
    call = current_call()
    call.name = user_name(function, args)
    calls, caller = current.here().attached(IdempotentCalls), call.caller.identity.incarnation
    try:
        outcome, is_first = calls.enter(caller, number, left)
    except AnswerLost:
        if call.link.closed is not None:
            raise
        # The caller may have been lost. The connection of its call is open, so it lives, and is taken back.
        list(results(current.agent().reached, call.caller.identity))
        outcome, is_first = calls.enter(caller, number, left)
    if not is_first:
        return Deferred(outcome, function)
    tell = partial(calls.ended, caller, number, outcome)
    try:
        result = _called(function, args, kwargs)
    except BaseException as error:
        tell(None, error)
        raise
    # In each of the following ways `tell` is called once, at the end of the function. Otherwise the repetitions of the
    # call would wait for its outcome forever.
    if type(result) is CoroutineType:
        awaited = _awaited(tell, result)
        setattr(awaited, "__qualname__", result.__qualname__)  # noqa: B010  # not known to types
        # A coroutine that is closed before its first step runs no code, not even an `except`.
        finalize(awaited, _end_unbegun, tell, outcome, result).atexit = False
        return awaited
    future = result.future if type(result) is Deferred else None
    if hasattr(function, ASYNC_MARK):
        future = its_future(function, result)
    if future is None:
        tell(result, None)
        return result
    if isinstance(future, torch._C.Future | Signal):
        future.add_done_callback(partial(_pass_on, tell))
    else:
        tell(None, future)
    return Deferred(outcome, function)


setattr(run_once, MUST_FINISH, True)  # after a broken connection, the caller repeats the call to get the answer
runs_as(run_once, lambda number, left, function, *args: user_name(function, args))


@finishing
def _called(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


@finishing
async def _awaited(tell: Callable[..., None], coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        result = await coroutine
    except BaseException as error:
        tell(None, error)
        raise
    tell(result, None)
    return result


def _end_unbegun(tell: Callable[..., None], outcome: Future[Any], coroutine: Coroutine[Any, Any, Any]) -> None:
    if not outcome.done():  # otherwise the coroutine has run
        coroutine.close()
        tell(None, CallCancelled("the function could not begin"))


def _pass_on(tell: Callable[..., None], done: Any) -> None:
    try:
        result = done.wait()
    except BaseException as error:
        tell(None, error)
    else:
        tell(result, None)


def size_of(value: Any) -> int:
    """Return the approximate size of a value in bytes, with everything inside; sample large containers."""
    size, seen, left = 0.0, set[int](), [(value, 1.0)]
    while left and len(seen) < MOST_LOOKED_AT:
        each, share = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        size += share * _own_size(each)
        # References of users lead to the agent and all its state, which the value does not own.
        if isinstance(each, Tensor) or type(each).__module__.startswith("telegrad."):
            continue
        inside = gc.get_referents(each)
        sample = inside[:: len(inside) // SAMPLE | 1]  # an odd step: keys and values of a dictionary alternate
        left += [(one, share * len(inside) / len(sample)) for one in sample]
    return int(size)


def _own_size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    known = sys.getsizeof(value, 0)
    return max(known, int(value.nbytes)) if type(value).__module__ == "numpy" and hasattr(value, "nbytes") else known
