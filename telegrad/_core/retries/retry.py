"""Calls that do not fail at once: they wait for their worker, or are made once more where they may have run.

    wait_for_worker   the call waits while its worker is not there, up to its timeout
    idempotent        it is made once more where it may have run; a callee that lives runs it once (`idempotency`)

A call that has failed so waits in the queue of its worker. Now and then, after pauses that grow, the first call in the
queue is made once more, which finds out whether the worker can be called by that name: the name is looked up anew. Once
there is a connection, the others follow. A call that may have run waits besides for a time of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from time import monotonic
from typing import Any, NamedTuple

from telegrad._core import checks
from telegrad._core.agent.agent import Agent
from telegrad._core.agent.fanout import EachCall
from telegrad._core.agent.pending_call import PendingCall
from telegrad._core.calls.call_context import InTurn, Share
from telegrad._core.calls.call_names import known_as, user_name
from telegrad._core.calls.cancelling import Served, serving
from telegrad._core.calls.deadlines import limit_of
from telegrad._core.calls.futures import Future, Outcome, Signal
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.progress import Wait
from telegrad._core.retries.idempotency import IdempotentCalls, Settled, run_once
from telegrad._core.retries.retry_queue import Failure, RetryPolicy, RetryQueue, backoff, classify, should_retry
from telegrad._core.worker import current
from telegrad._core.worker.caller_context import CallerContext
from telegrad._core.worker.prepared_call import Call
from telegrad._core.worker.worker import Worker
from telegrad.errors import (
    CallCancelled,
    CallTimeout,
    ShutDown,
    TelegradError,
)

by_default = False  # whether calls of a worker of this process wait without being told to; set once


class Retries:
    """The calls of one worker that are made once more, and the thread-safe use of their queue."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.numbers = itertools.count(1)  # of idempotent calls; `next` is atomic
        self.may_come: Callable[[str | int], bool] = lambda to: True
        self.lock = threading.Lock()  # guards the queue, and that a call ends once
        self.queue: RetryQueue[RetriedCall] = RetryQueue()
        agent.ticking.append(self._tick)
        agent.busy.append(lambda: not self.queue.empty)

    def wait(self, call: RetriedCall, pause: float, why: str) -> bool:
        """Have a call wait; False if this worker leaves."""
        with self.lock:
            if not self.queue.wait(call, monotonic(), pause, why):
                return False
            upcoming = self.queue.next()
        self.agent.wake_at(upcoming)
        return True

    def withdraw(self, call: RetriedCall) -> bool:
        with self.lock:
            return self.queue.withdraw(call)

    def _tick(self, now: float) -> float:
        if self.queue.empty:
            return inf
        with self.lock:
            late, due, upcoming = self.queue.expired(now), self.queue.due(now), self.queue.next()
        for call, why in late:
            self.agent.later(call.fail, call.too_late(why))
        for to in due:
            self.agent.run(self._attempt, to, False)  # which may have to ask the store
        return upcoming

    def _attempt(self, to: str | int) -> None:
        """Make the first call that waits for a worker, and the others, too, if there is a connection then."""
        with self.lock:
            ready = self.queue.ready(to, monotonic())
        for call in ready:
            with self.lock:
                begun = self.queue.begin(call)
            if begun:
                call.again()
                if not self._is_connected(call):
                    break

    def _is_connected(self, call: RetriedCall) -> bool:
        """Return True if a call is under way over a connection that is there already."""
        pending = call.call
        try:
            return pending is not None and self.agent.is_connected(pending.peer.identity)
        except TelegradError:  # it has gone in that moment
            return False

    def close(self) -> None:
        """This worker leaves."""
        with self.lock:
            waiting = self.queue.close()
        for call in waiting:
            call.fail(ShutDown(f"worker {self.agent.name!r} shut down while {call.described} waited for the worker"))


class Request(NamedTuple):
    """What is called, where and how."""

    to: str | int
    call: Call
    policy: RetryPolicy
    number: int  # of an idempotent call, under which the callee knows it; else 0
    begun: float  # by `monotonic`

    @property
    def asked(self) -> Any:
        """Return what the user has called, or a text."""
        return self.call.function if self.call.asked is None else self.call.asked

    def function_and_args(self, left: float) -> tuple[Any, Any]:
        """Return what to call, where there is so much time left."""
        if not self.number:
            return self.call.function, self.call.args
        return run_once, (self.number, float(left), self.call.function, *(self.call.args or ()))


class RetriedCall:
    """A call that is made as often as its policy wants it: the outcome of each time, and one call to its own outcome.

    Later times run in the setting of the code that has begun it. `again` and `fail` are called by `Retries`.
    """

    quick = False
    about: str

    def __init__(self, retries: Retries, request: Request, timeout: float, outcome: Outcome) -> None:
        self.request = request
        self.timeout = timeout
        self.outcome = outcome
        self.parent: Served | None = None  # for the sake of which call it is made
        self.done = False
        self.over = Signal()  # happens once the outcome was told
        self._retries = retries
        self._context = CallerContext()
        self._last: PendingCall | None = None  # the call that was made last, unless it could not be made
        self._cancelled = ""  # why, once it was
        self._lost: BaseException | None = None  # the first failure after which it may have run
        self._repeats = 0

    @property
    def to(self) -> str | int:
        return self.request.to

    @property
    def until(self) -> float:
        return self.request.begun + self.timeout if self.timeout else inf

    def limit(self, timeout: float) -> None:
        """Have no more time than the call for whose sake it is made."""
        self.timeout = timeout

    def left(self) -> float:
        """Return the seconds that it has still; 0 for no limit."""
        return max(1e-3, self.until - monotonic()) if self.timeout else 0.0

    # Making it

    def admit(self) -> None:
        """It is about to begin: from now on its outcome is told, and can end it."""
        parent = serving.get()
        if parent is not None:
            parent.admit(self)
        self.outcome.call = self
        if parent is not None:
            parent.hold(self)

    def begin(self) -> None:
        """Make it for the first time; raise what keeps it from being made at all."""
        self.admit()
        try:
            self._make(self.timeout)
        except BaseException as error:
            if not isinstance(error, Exception) or not self._goes_on(error):
                self.conclude()
                raise

    def again(self) -> None:
        """Make it once more; on a thread that may run code of users."""
        try:
            left = Share.of(self.left(), f"the {self.timeout:g} s of this call") if self.timeout else 0.0
            self._context.run(self._make, left)
        except BaseException as error:
            self.set_exception(error)
            if not isinstance(error, Exception):
                raise
        if self._cancelled and (call := self.call) is not None:  # since it was looked at
            call.cancel()

    def _make(self, left: float) -> None:
        if self._cancelled:
            raise CallCancelled(self._cancelled)
        self._last, call = None, self.request.call
        function, args = self.request.function_and_args(left)
        try:
            self._retries.agent.call_for(
                self, self.to, function, args, call.kwargs, left, call.keeps, asked=self.request.asked
            )
        except BaseException:
            self._last = None
            raise

    # What comes of it

    def set_result(self, result: Any) -> None:
        if self.conclude(answered=True):
            self._settle()
            self.outcome.set_result(result)
            self.over.set_result()

    def set_exception(self, result: Any) -> None:
        if not self._goes_on(result):
            is_final = not self._cancelled or self._classify(result) is Failure.FINAL
            self.fail(result if is_final else CallCancelled(self._cancelled))

    def _goes_on(self, error: BaseException) -> bool:
        """Return True if it is made once more, after it has failed so."""
        failure, retries = self._classify(error), self._retries
        if self._cancelled or retries.agent.closed:
            return False
        if not should_retry(self.request.policy, failure, self._lost is not None):
            return False
        pause = 0.0
        if failure is Failure.MAY_HAVE_RUN:
            self._lost = self._lost or fresh(error)
            pause = backoff(self._repeats)
            self._repeats += 1
        elif not retries.may_come(self.to):
            return False
        if not retries.wait(self, pause, str(error).partition("\n")[0]):
            return False
        if self._cancelled and retries.withdraw(self):  # since it was looked at
            self.fail(CallCancelled(self._cancelled))
        return True

    def _classify(self, error: BaseException) -> Failure:
        """As `classify`; a call that was answered has run, whatever the function has raised."""
        return Failure.FINAL if self._last is not None and self._last.answer is not None else classify(error)

    def fail(self, error: BaseException) -> None:
        is_final = self._classify(error) is Failure.FINAL
        if not self.conclude():
            return
        if is_final:
            self._settle()
        if self._lost is not None:  # so it is not true that it has not run
            if classify(error) is Failure.NOT_RUN:
                error, self._lost = self._lost, error
            error.__cause__ = error.__cause__ or self._lost
        self.outcome.about = self.described
        self.outcome.set_exception(error.with_traceback(None))
        self.over.set_result()

    def conclude(self, answered: bool = False) -> bool:
        """It has ended; return True if the outcome is still to be told."""
        with self._retries.lock:
            done, self.done = self.done, True
            waited = self._retries.queue.end(self, answered)
        if waited and answered:
            self._retries.agent.wake_at(monotonic())  # for others that wait for the worker
        if not done:
            if self.parent is not None:
                self.parent.ended(self)
            self.outcome.call = None
        return not done

    def _settle(self) -> None:
        """Tell the callee that it need not keep the answer any longer."""
        if self.request.number and self._last is not None:
            who = self._last.peer.identity
            with contextlib.suppress(TelegradError):
                settled = Settled(self.request.number)
                self._retries.agent.notify(who.name, settled, who.incarnation, patient=True)

    # As an outcome, as the call of its own one, and as one that is made for the sake of another

    @property
    def call(self) -> PendingCall | None:
        """The call that is under way."""
        last = self._last
        return None if last is None or last.done else last

    @call.setter
    def call(self, call: PendingCall | None) -> None:
        self._last = call or self._last

    @property
    def described(self) -> str:
        return f"{user_name(self.request.asked)} on worker {self.to!r}"

    @property
    def in_turn(self) -> InTurn | None:
        call = self.call
        return None if call is None else call.in_turn

    def help(self) -> None:
        """Wait until it has ended, reading an answer by this thread where it can; say so where that takes long."""
        call, agent = self.call, self._retries.agent
        if call is not None:
            call.help()
        if self.over.done():
            return
        missing = [self.to if isinstance(self.to, str) else f"rank {self.to}"]

        def text() -> str:
            return f"{self.described}: {self._retries.queue.why(self.to) or 'it was called again'}"

        with Wait("wait_for_worker", text, lambda: missing, worker=agent.name) as wait:
            while not agent.wait_for(self.over, wait.left):
                wait.look()

    def cancel(self, why: str = "") -> bool:
        """End it now; False where it is over."""
        if self.done:
            return False
        self._cancelled = f"{self.described} was cancelled{why and ': '}{why}"
        call = self.call
        if (call is None or not call.cancel(why)) and self._retries.withdraw(self):
            self.fail(CallCancelled(self._cancelled))
        return True

    def too_late(self, why: str) -> CallTimeout:
        return CallTimeout(
            f"{self.described} waited for the worker in vain: it could not be called within the set timeout "
            f"({self.timeout:g} s). {why}"
        )

    def __repr__(self) -> str:
        return f"<persistent call of {self.described}: {'over' if self.done else self._last or 'not made yet'}>"


# What the layers above use


@known_as("a look whether the worker is there")
def ping() -> None:
    """Answer: this worker is there."""


def serve(worker: Worker) -> None:
    """Have a worker take such calls, and make them."""
    global by_default
    worker.agent.run_at_once(ping)
    worker.at_gone.append(worker.attached(IdempotentCalls).gone)
    retries = worker.attached(Retries)
    retries.may_come = partial(_may_come, worker)
    worker.at_end.append(retries.close)
    by_default = by_default or worker.agent.settings.wait_for_worker


def _may_come(worker: Worker, to: str | int) -> bool:
    """Return True if a worker that is not there may be so later: one that a group of fixed size has lost stays away."""
    membership = worker.membership
    return not membership.is_fixed or any(to in (each.name, each.id) for each in membership.view().workers)


def policy_of(wait_for_worker: bool | None, idempotent: bool) -> RetryPolicy | None:
    """Return how a call is to be made, None for a plain one. Ask where any of both is given, or `by_default`."""
    checks.flag("wait_for_worker", wait_for_worker, none=True)
    checks.flag("idempotent", idempotent)
    waits = current.agent().settings.wait_for_worker if wait_for_worker is None else wait_for_worker
    return RetryPolicy(waits, idempotent) if waits or idempotent else None


def _made(
    outcomes: Iterable[tuple[Outcome, str | int]], policy: RetryPolicy, call: Call, timeout: float
) -> list[RetriedCall]:
    """Return calls that have not begun. They have one number, under which each callee knows its own."""
    retries = current.here().attached(Retries)
    limit = limit_of(timeout, retries.agent.timeout)
    number = next(retries.numbers) if policy.repeats and call.function is not ping else 0
    now = monotonic()
    return [RetriedCall(retries, Request(to, call, policy, number, now), limit, outcome) for outcome, to in outcomes]


def begin(outcome: Outcome, policy: RetryPolicy, to: str | int, call: Call, timeout: float) -> None:
    """Begin to make a call by a policy; raise what keeps it from being made at all."""
    _made([(outcome, to)], policy, call, timeout)[0].begin()


def begin_many(outcomes: Iterable[tuple[Outcome, str]], policy: RetryPolicy, call: Call, timeout: float) -> None:
    """Call several workers so that the first time is one call to all; each is made once more by itself."""
    made = _made(outcomes, policy, call, timeout)
    try:
        for each in made:
            each.admit()
        first = made[0]
        function, args = first.request.function_and_args(first.timeout)
        own = [EachCall(each, each.to, call.keeps) for each in made]
        current.agent().call_each(own, function, args, call.kwargs, first.timeout, first.request.asked)
    except BaseException:
        for each in made:
            each.conclude()
        raise


def call_async(policy: RetryPolicy, to: str | int, call: Call, timeout: float) -> Future[Any]:
    """Begin to make a call by a policy; return a future of its value."""
    future: Future[Any] = Future()
    begin(future, policy, to, call, timeout)
    return future


def call_sync(policy: RetryPolicy, to: str | int, call: Call, timeout: float) -> Any:
    """Make a call by a policy, and wait for its value."""
    return wait_or_cancel(call_async(policy, to, call, timeout))


def wait_or_cancel(future: Future[Any]) -> Any:
    """Wait for the value; where this thread is interrupted, cancel the calls that the future stands for."""
    try:
        return future.wait()
    finally:
        if not future.done():  # this thread was interrupted
            future.cancel()


def await_workers(policy: RetryPolicy | None, workers: list[str | int], call: Call, timeout: float) -> float:
    """Wait here until all of them can be called, for values that will stay on them; return the time that is left.

    Raises:
        CallTimeout: one of them did not come in time.
    """
    if policy is None:
        return timeout
    limit = limit_of(timeout, current.agent().timeout)
    name = user_name(call.function if call.asked is None else call.asked)
    for to in workers:
        future: Future[Any] = Future()
        (asking,) = _made([(future, to)], RetryPolicy(True, True), Call(ping, None, None, None, name), limit)
        asking.begin()
        wait_or_cancel(future)
        limit = asking.left()
    return limit
