"""Retries: calls that wait for their worker, or are repeated if they may have run.

    wait_for_worker   the call waits while its worker is absent, up to its timeout
    idempotent        the call is repeated if it may have run; a live callee runs it once (`idempotency`)

A failed call waits in the queue of its worker. After growing pauses, the first call in the queue is made again, to the
worker that has the name by then. Once there is a connection, the others follow. One that may have run also backs off.
So one call finds out whether the worker is there, and any number of waiting calls costs no more look-ups than one.

A call ends in one of several threads: the one that reads its answer, the timer thread (timeout), one that cancels it,
one that closes this worker. `conclude` decides under the lock of `Retries` which of them completes the outcome. The
lock is never held while a call is made, cancelled or completed.

Cancelling needs no lock. The cancelling thread stores `_cancelled`, and then looks for an attempt in flight and for the
call in the queue. A thread that repeats the call, or puts it into the queue, reads `_cancelled` after that. So at least
one of the two threads ends the call. During the first attempt, only a served call can cancel this one; it holds the
attempt itself, too (`pending_call.begin_call`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from time import monotonic, perf_counter
from typing import Any

from telegrad._core import checks
from telegrad._core.agent.agent import Agent
from telegrad._core.agent.call_each import EachCall
from telegrad._core.agent.pending_call import SEARCH_PAUSE, PendingCall, PreparedCall
from telegrad._core.calls.call_context import CallerContext, DerivedTimeout, NestedCall
from telegrad._core.calls.call_names import known_as, user_name
from telegrad._core.calls.cancelling import Served, serving
from telegrad._core.calls.futures import Future, Outcome, Signal
from telegrad._core.calls.settings import limit_of
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.pickling.remote_text import folded
from telegrad._core.rpc.idempotency import AnswerAcknowledged, IdempotentCalls, run_once
from telegrad._core.rpc.retry_queue import Failure, RetryPolicy, RetryQueue, backoff, classify, should_retry
from telegrad._core.texts import Wait
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CallCancelled, CallTimeout, ShutDown, TelegradError

by_default: list[bool] = []  # not empty once calls of a worker in this process wait by default


class Retries:
    """The retried calls of one worker, and thread-safe access to their queue."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.numbers = itertools.count(1)  # of idempotent calls; `next` is atomic
        self.may_come: Callable[[str | int], bool] = lambda to: True
        self.lock = threading.Lock()  # guards the queue, and ensures that a call ends once
        self.queue: RetryQueue[RetriedCall] = RetryQueue()
        self._due = inf  # when the queue must be looked at; changed under the lock
        agent.ticking.append(self._tick)
        agent.busy.append(lambda: not self.queue.empty)

    def wait(self, call: RetriedCall, pause: float, why: str) -> bool:
        """Put a call in the queue; return False if this worker leaves."""
        with self.lock:
            if not self.queue.wait(call, monotonic(), pause, why):
                return False
            upcoming = self.queue.next_of(call)
            self._due = min(self._due, upcoming)
        self.agent.wake_at(upcoming)
        return True

    def look_now(self) -> None:
        with self.lock:
            self._due = 0.0
        self.agent.wake_at(monotonic())

    def withdraw(self, call: RetriedCall) -> bool:
        with self.lock:
            return self.queue.withdraw(call)

    def _tick(self, now: float) -> float:
        if now < self._due:
            return self._due
        with self.lock:
            late, due = self.queue.expired(now), self.queue.due(now)
            # Each look goes through all calls, of which many may wait.
            upcoming = self._due = max(self.queue.next(), now + SEARCH_PAUSE)
        for call, why in late:
            self.agent.later(call.fail, call.too_late(why))
        for to in due:
            self.agent.run(self._attempt, to, False)  # on a reactor thread, since it may have to query the store
        return upcoming

    def _attempt(self, to: str | int) -> None:
        """Make the first waiting call to a worker; if there is a connection then, also make the others."""
        with self.lock:
            ready = self.queue.ready(to, monotonic())
        for call in ready:
            with self.lock:
                begun = self.queue.begin(call)
            if begun:
                call.again()
                pending = call.call
                # It has failed at once, or waits for a connection. The others would do the same.
                if pending is None or pending.peer.link is None:
                    break

    def close(self) -> None:
        """Fail the waiting calls: this worker leaves."""
        with self.lock:
            waiting = self.queue.close()
        for call in waiting:
            call.fail(self.over(call))

    def over(self, call: RetriedCall) -> ShutDown:
        """Return the error of a call that waits as this worker leaves."""
        return ShutDown(f"worker {self.agent.name!r} shut down while {call.described} was waiting for that worker")


class RetriedCall:
    """A call that is made repeatedly by its policy: the outcome of each attempt, and the call of its own outcome. Later
    attempts run in the context of the code that started the call. `Retries` calls `again` and `fail`."""

    quick = False
    about: str

    def __init__(
        self,
        retries: Retries,
        each: tuple[Outcome, str | int],
        made: PreparedCall,
        policy: RetryPolicy,
        number: int,
        timeout: float,
    ) -> None:
        """`each` is the outcome and the callee; `number` that of an idempotent call, which the callee knows, or 0."""
        self.outcome, self.to = each
        self.timeout = timeout
        self._made = made
        self._policy = policy
        self._number = number
        self._begun = monotonic()
        self.begun = perf_counter()  # of the last attempt that has failed
        self.parent: Served | None = None  # the served call that made this one
        self.done = False
        self.over = Signal()  # set once the outcome is complete
        self._retries = retries
        self._context = CallerContext()
        self._last: PendingCall | None = None  # the last attempt, unless it could not be made
        self._cancelled = ""  # the reason, if cancelled
        self._lost: BaseException | None = None  # the first failure after which it may have run
        self._repeats = 0

    @property
    def until(self) -> float:
        return self._begun + self.timeout if self.timeout else inf

    def limit(self, timeout: float) -> None:
        """Set the timeout to the time left of the parent call."""
        self.timeout = timeout

    def left(self) -> float:
        """Return the seconds left; 0 for no limit."""
        # A late call has a millisecond, since 0 would be no limit. It then times out like any other.
        return max(1e-3, self.until - monotonic()) if self.timeout else 0.0

    # Attempts

    def admit(self) -> None:
        """Register with the outcome, which can end this call from now on, and with the parent call."""
        parent = serving.get()
        if parent is not None:
            parent.admit(self)
        self.outcome.call = self
        if parent is not None:
            parent.hold(self)

    def begin(self) -> None:
        """Make the first attempt; raise an error that no retry can fix."""
        self.admit()
        try:
            self._make(self.timeout)
        except BaseException as error:
            if not isinstance(error, Exception) or not self._goes_on(error):
                self.conclude()
                raise

    def again(self) -> None:
        """Make another attempt; call this on a thread that may run user code."""
        try:
            left = DerivedTimeout.of(self.left(), f"the {self.timeout:g} s of this call") if self.timeout else 0.0
            self._context.run(self._make, left)
        except BaseException as error:
            self.set_exception(error)
            if not isinstance(error, Exception):
                raise
        if self._cancelled and (call := self.call) is not None:  # cancelled after `_make` checked
            call.cancel()

    def _make(self, left: float) -> None:
        if self._cancelled:
            raise CallCancelled(self._cancelled)
        self._last = None
        try:
            self._retries.agent.call_for(self, self.to, self.attempt(left), left)
        except BaseException:
            self._last = None
            raise

    def attempt(self, left: float) -> PreparedCall:
        """Return the call to send, with this much time left."""
        made = self._made
        if not self._number:
            return made
        args = self._number, float(left), made.function, *(made.args or ())
        return PreparedCall(run_once, args, made.kwargs, made.keeps, made.users)

    # Results

    def set_result(self, result: Any) -> None:
        if self.conclude(answered=True):
            self._settle()
            self.outcome.set_result(result)
            # After the outcome: a thread that waits in `help` returns to code that takes the value from it.
            self.over.set_result()

    def set_exception(self, result: Any) -> None:
        if not self._goes_on(result):
            if self._policy.waits and self._retries.queue.closed and self._classify(result) is Failure.NOT_RUN:
                result = self._retries.over(self)  # an attempt has failed as this worker leaves
            # Of a cancelled call, the loss of the worker or of the way to it is reported as the cancellation. A final
            # failure, such as an exception of the function, is reported as it is.
            is_final = not self._cancelled or self._classify(result) is Failure.FINAL
            self.fail(result if is_final else CallCancelled(self._cancelled))

    def _goes_on(self, error: BaseException) -> bool:
        """Queue another attempt after this failure; return True if there will be one."""
        failure, retries = self._classify(error), self._retries
        if self._cancelled or retries.agent.closed:
            return False
        if not should_retry(self._policy, failure, self._lost is not None):
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
        if self._cancelled and retries.withdraw(self):  # cancelled after the check above
            self.fail(CallCancelled(self._cancelled))
        return True

    def _classify(self, error: BaseException) -> Failure:
        """As `classify`. A call that was answered has run, whatever its function raised."""
        return Failure.FINAL if self._last is not None and self._last.answer is not None else classify(error)

    def fail(self, error: BaseException) -> None:
        is_final = self._classify(error) is Failure.FINAL
        if not self.conclude():
            return
        if is_final:
            self._settle()
        if self._lost is not None:  # then it may have run
            # The last error says that the worker was not there, from which a program concludes that the call has not
            # run. So raise the earlier loss, with this error as its cause.
            if classify(error) is Failure.NOT_RUN:
                error, self._lost = self._lost, error
            error.__cause__ = error.__cause__ or self._lost
        self.outcome.about, self.outcome.begun = self.described, self.begun
        self.outcome.set_exception(error.with_traceback(None))
        self.over.set_result()

    def conclude(self, answered: bool = False) -> bool:
        """Mark the call as ended; return True if the outcome is to be completed now."""
        # Both in one step, so that a tick or an attempt of another thread finds the call either waiting or ended.
        with self._retries.lock:
            done, self.done = self.done, True
            waited = self._retries.queue.end(self, answered)
        if waited and answered:
            self._retries.look_now()  # for others that wait for the worker
        if not done:
            if self.parent is not None:
                self.parent.ended(self)
            self.outcome.call = None
        return not done

    def _settle(self) -> None:
        """Notify the callee that it can drop the answer."""
        # An error is ignored: a callee that does not get this drops the answer when the call has timed out.
        if self._number and self._last is not None:
            who = self._last.peer.identity
            with contextlib.suppress(TelegradError):
                settled = AnswerAcknowledged(self._number)
                self._retries.agent.notify(who.name, settled, who.incarnation, patient=True)

    # Interfaces: outcome of an attempt, call of the own outcome, nested call of a parent

    @property
    def call(self) -> PendingCall | None:
        """The attempt in flight."""
        last = self._last
        return None if last is None or last.done else last

    @call.setter
    def call(self, call: PendingCall | None) -> None:
        # The agent stores None when an attempt has ended. `_classify` and `_settle` still need that attempt.
        self._last = call or self._last

    @property
    def described(self) -> str:
        return f"{user_name(self._made.users)} on worker {self.to!r}"

    @property
    def in_turn(self) -> NestedCall | None:
        call = self.call
        return None if call is None else call.in_turn

    def help(self) -> None:
        """Wait for the end; read the answer on this thread if possible; log long waits."""
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
        """Cancel the call; return False if it is over."""
        if self.done:
            return False
        self._cancelled = f"{self.described} was cancelled{why and ': '}{why}"
        call = self.call
        if (call is None or not call.cancel(why)) and self._retries.withdraw(self):
            self.fail(CallCancelled(self._cancelled))
        return True

    def too_late(self, why: str) -> CallTimeout:
        return CallTimeout(
            f"{self.described} timed out: the worker could not be called within the set timeout ({self.timeout:g} s). "
            f"{why}"
        )

    def __repr__(self) -> str:
        return f"<persistent call of {self.described}: {'over' if self.done else self._last or 'not made yet'}>"


# Interface for the layers above


@known_as("checking whether the worker can be reached")
def ping() -> None:
    """Return, which shows the caller that this worker is reachable."""


def serve(worker: Worker) -> None:
    """Enable retries on a worker, as caller and as callee."""
    worker.agent.run_at_once(ping)
    calls = worker.attached(IdempotentCalls)
    worker.at_gone.append(calls.gone)
    worker.at_return.append(calls.returned)
    retries = worker.attached(Retries)
    retries.may_come = partial(_may_come, worker)
    worker.at_end.append(retries.close)
    if worker.agent.settings.wait_for_worker:
        by_default[:] = [True]


def _may_come(worker: Worker, to: str | int) -> bool:
    """Return True if an absent worker may appear later. A worker that a fixed group has lost does not return."""
    membership = worker.membership
    return not membership.is_fixed or any(to in (each.name, each.id) for each in membership.view().workers)


def policy_of(wait_for_worker: bool | None, idempotent: bool) -> RetryPolicy | None:
    """Return the policy of a call, None for a plain one. Call this if an argument is given, or if `by_default`."""
    checks.flag("wait_for_worker", wait_for_worker, none=True)
    checks.flag("idempotent", idempotent)
    waits = current.agent().settings.wait_for_worker if wait_for_worker is None else wait_for_worker
    return RetryPolicy(waits, idempotent) if waits or idempotent else None


def _made(
    outcomes: Iterable[tuple[Outcome, str | int]], policy: RetryPolicy, call: PreparedCall, timeout: float
) -> list[RetriedCall]:
    """Create calls without starting them. They share one number, since each callee has its own table."""
    retries = current.here().attached(Retries)
    limit = limit_of(timeout, retries.agent.timeout)
    # A `ping` may run any number of times.
    number = next(retries.numbers) if policy.repeats and call.function is not ping else 0
    return [RetriedCall(retries, each, call, policy, number, limit) for each in outcomes]


def begin(outcome: Outcome, policy: RetryPolicy, to: str | int, call: PreparedCall, timeout: float) -> None:
    """Start a call with a policy; raise an error that no retry can fix."""
    _made([(outcome, to)], policy, call, timeout)[0].begin()


def begin_many(
    outcomes: Iterable[tuple[Outcome, str]], policy: RetryPolicy, call: PreparedCall, timeout: float
) -> None:
    """Call several workers with a policy. The first attempt is one call to all; each call is retried separately."""
    made = _made(outcomes, policy, call, timeout)
    try:
        for each in made:
            each.admit()
        timeout = made[0].timeout
        callees = [EachCall(each, each.to) for each in made]
        current.agent().call_each(callees, made[0].attempt(timeout), timeout)
    except BaseException:
        for each in made:
            each.conclude()
        raise


def call_async(policy: RetryPolicy, to: str | int, call: PreparedCall, timeout: float) -> Future[Any]:
    future: Future[Any] = Future()
    begin(future, policy, to, call, timeout)
    return future


def call_sync(policy: RetryPolicy, to: str | int, call: PreparedCall, timeout: float) -> Any:
    return wait_or_cancel(call_async(policy, to, call, timeout))


@folded
def wait_or_cancel(future: Future[Any]) -> Any:
    """Wait for the value; if this thread is interrupted, cancel the future's calls."""
    try:
        return future.wait()
    finally:
        if not future.done():  # this thread was interrupted, which is what its caller learns
            future.heed()
            future.cancel()


def await_workers(policy: RetryPolicy | None, workers: list[str | int], call: PreparedCall, timeout: float) -> float:
    """Wait until all workers are reachable; return the time left; raise CallTimeout if one does not come in time."""
    if policy is None:
        return timeout
    limit = limit_of(timeout, current.agent().timeout)
    name = user_name(call.users)
    for to in workers:
        future: Future[Any] = Future()
        (asking,) = _made([(future, to)], RetryPolicy(True, True), PreparedCall(ping, asked=name), limit)
        asking.begin()
        wait_or_cancel(future)
        limit = asking.left()
    return limit
