"""Calls that may come several times and are run once: the callee's side of `idempotent=True`. The rim of `ledger`."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from time import monotonic
from types import CoroutineType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from telegrad.agent.agent import Agent
from telegrad.agent.answers import its_future
from telegrad.agent.cancelling import MUST_FINISH, finishing
from telegrad.agent.futures import Future, Signal
from telegrad.agent.naming import OWN_ARGUMENTS, runs_as, user_name
from telegrad.agent.server import ASYNC_MARK, Later
from telegrad.errors import AnswerLost
from telegrad.group.members import Identity, Member
from telegrad.rpc import current
from telegrad.rpc.feeding import current_call
from telegrad.rpc.ledger import MOST, MOST_OF_CALLER, Key, Ledger, Settled

LOOK_EVERY = 1.0  # seconds between looks for answers that nobody will ask for
MOST_LOOKED_AT = 1 << 12  # objects, to see how large a value is: a millisecond
SAMPLE = 1 << 8  # elements of one container


class Desk:
    """The idempotent calls that were made to one worker."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards the ledger
        self._ledger: Ledger[Future[Any]] = Ledger()
        self._next_look = 0.0  # the clock's thread alone
        self._dead: deque[str] = deque()  # callers that have died or left lately; each use is one operation of a deque
        agent.on(Settled, self._on_settled)
        agent.ticking.append(self._tick)

    def __len__(self) -> int:
        return len(self._ledger)

    def enter(self, key: Key, left: float) -> tuple[Future[Any], bool]:
        """Note a call that has come; return its outcome, and whether it is to be run.

        Raises:
            AnswerLost: neither.
        """
        now = monotonic()
        outcome: Future[Any] = Future()
        with self._lock:
            entry = self._ledger.find(key, left, now)
            if entry is not None:
                return entry.outcome, False
            if self._ledger.has_forgotten(key):
                raise AnswerLost(
                    f"worker {self._agent.name!r} does not keep what came of this idempotent call any more, so it may "
                    f"have run, and was not run once more: at most {MOST_OF_CALLER >> 20} MiB of answers are kept for "
                    f"one worker that does not take them, {MOST >> 20} MiB for all, and none for one that was taken "
                    "for dead. See what the function has done, and call it anew where it has not run or may run twice"
                )
            self._ledger.begin(key, outcome, left, now)
        outcome.heed()  # the caller is told
        return outcome, True

    def ended(self, key: Key, weight: int) -> None:
        with self._lock:
            over = self._ledger.ended(key, weight)
        del over  # now: what it holds may be the user's

    def gone(self, member: Member) -> None:
        """Drop the answers for a worker that has died or left, within LOOK_EVERY."""
        self._dead.append(member.incarnation)

    def _on_settled(self, sender: Identity, settled: Settled) -> None:
        with self._lock:
            over = self._ledger.settled(Key(sender.incarnation, settled.number))
        del over

    def _tick(self, now: float) -> float:
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY
            with self._lock:
                over = self._ledger.expire(now)
                while self._dead:
                    over += self._ledger.died(self._dead.popleft())
            del over
        return self._next_look


def once(number: int, left: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What `function(*args, **kwargs)` gives, or gave when a call of this key came first."""
    call = current_call()
    call.name = user_name(function)
    desk = current.here().attached(Desk)
    key = Key(call.caller.identity.incarnation, number)
    outcome, is_first = desk.enter(key, left)
    if not is_first:
        return Later(outcome, function)
    tell = partial(_tell, desk, key, outcome)
    try:
        result = _called(function, args, kwargs)
    except BaseException as error:
        tell(error=error)
        raise
    if type(result) is CoroutineType:
        awaited = _awaited(tell, result)
        setattr(awaited, "__qualname__", result.__qualname__)  # noqa: B010  # not known to types
        return awaited
    future = result.future if type(result) is Later else None
    if hasattr(function, ASYNC_MARK):
        future = its_future(function, result)
    if future is None:
        tell(result)
        return result
    if isinstance(future, torch._C.Future | Signal):
        future.add_done_callback(partial(_pass_on, tell))
    else:
        tell(error=future)
    return Later(outcome, function)


setattr(once, OWN_ARGUMENTS, 3)
setattr(once, MUST_FINISH, True)  # a caller whose connection broke comes back for the answer
runs_as(once, lambda number, left, function, *_: user_name(function))


@finishing
def _called(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


@finishing
async def _awaited(tell: Callable[..., None], coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        result = await coroutine
    except BaseException as error:
        tell(error=error)
        raise
    tell(result)
    return result


def _pass_on(tell: Callable[..., None], done: Any) -> None:
    try:
        result = done.wait()
    except BaseException as error:
        tell(error=error)
    else:
        tell(result)


def _tell(desk: Desk, key: Key, outcome: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """A call has run: it is known to those that repeat it."""
    desk.ended(key, size_of(result if error is None else error.args))
    if error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


def size_of(value: Any) -> int:
    """Return about how many bytes a value has, with all that is in it; of large containers, a sample is looked at."""
    size, seen, left = 0.0, set[int](), [(value, 1.0)]
    while left and len(seen) < MOST_LOOKED_AT:
        each, share = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        size += share * _own_size(each)
        inside: Any = ()
        if isinstance(each, dict):
            inside = [*itertools.chain.from_iterable(itertools.islice(each.items(), SAMPLE))]
            share *= max(1.0, 2 * len(each) / max(1, len(inside)))
        elif isinstance(each, list | tuple):
            inside = each[:: len(each) // SAMPLE + 1]
            share *= max(1.0, len(each) / max(1, len(inside)))
        elif isinstance(each, set | frozenset | deque):
            inside = [*itertools.islice(each, SAMPLE)]
            share *= max(1.0, len(each) / max(1, len(inside)))
        elif not isinstance(each, Tensor) and not type(each).__module__.startswith("telegrad."):
            inside = gc.get_referents(each)
        left += [(one, share) for one in inside]
    return int(size)


def _own_size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    known = sys.getsizeof(value, 0)
    return max(known, int(value.nbytes)) if type(value).__module__ == "numpy" and hasattr(value, "nbytes") else known
