"""What users say of a call that shall not fail at once, and calls that are made so: the one place that reads it.

wait_for_worker   the call waits while its worker is not there, up to its timeout
idempotent        it is made once more where it may have run; a callee that lives runs it once all the same
"""

from __future__ import annotations

from functools import partial
from typing import Any

from telegrad import checks
from telegrad.agent.deadlines import limit_of
from telegrad.agent.futures import Future, Outcome
from telegrad.agent.naming import user_name
from telegrad.rpc import current
from telegrad.rpc.conversion import Call
from telegrad.rpc.lobby import Manner
from telegrad.rpc.once import Desk, once
from telegrad.rpc.persistent import Asked, Persistent
from telegrad.rpc.returns import Presence, Returns, hello
from telegrad.rpc.worker import Worker

by_default = False  # whether calls of a worker of this process wait without being told to; set once


def serve(worker: Worker) -> None:
    """Have a worker take such calls, and make them."""
    global by_default
    agent = worker.agent
    agent.run_at_once(hello)
    worker.at_gone.append(worker.attached(Desk).gone)
    returns = worker.attached(Returns)
    returns.may_come = partial(_may_come, worker)
    worker.at_end.append(returns.close)
    by_default = by_default or agent.settings.wait_for_worker


def _may_come(worker: Worker, to: str | int) -> bool:
    """Whether a worker that is not there may be so later: in a group of fixed size one that is lost stays away."""
    membership = worker.membership
    return not membership.is_fixed or any(to in (each.name, each.id) for each in membership.view().workers)


def manner(wait_for_worker: bool | None, idempotent: bool) -> Manner | None:
    """How a call is to be made; None: as ever. Ask where any of both is given, or `by_default`."""
    checks.flag("wait_for_worker", wait_for_worker, none=True)
    checks.flag("idempotent", idempotent)
    waits = current.agent().settings.wait_for_worker if wait_for_worker is None else wait_for_worker
    return Manner(waits, idempotent) if waits or idempotent else None


def call_sync(manner: Manner, to: str | int, call: Call, timeout: float) -> Any:
    """Make a call in that manner, and wait for its value."""
    return wait_or_cancel(call_async(manner, to, call, timeout))


def wait_or_cancel(future: Future[Any]) -> Any:
    """Wait for the value; where this thread is interrupted, cancel the calls that the future stands for."""
    try:
        return future.wait()
    finally:
        if not future.done():  # this thread was interrupted
            future.cancel()


def call_async(manner: Manner, to: str | int, call: Call, timeout: float) -> Future[Any]:
    """Begin to make a call in that manner; a future of its value."""
    future: Future[Any] = Future()
    begin(future, manner, to, call, timeout)
    return future


def begin(outcome: Outcome, manner: Manner, to: str | int, call: Call, timeout: float) -> None:
    """Begin to make a call in that manner; raises what keeps it from being made at all."""
    made(outcome, manner, to, call, timeout, number_of(manner)).begin()


def number_of(manner: Manner) -> int:
    """A number for a call, or for all calls to a group, under which each callee knows it; 0 where it needs none."""
    return next(_returns().numbers) if manner.repeats else 0


def made(outcome: Outcome, manner: Manner, to: str | int, call: Call, timeout: float, number: int) -> Persistent:
    """A call in that manner, which has not begun."""
    agent = current.agent()
    limit = limit_of(timeout, agent.timeout)
    make = partial(asked, call, number)
    return Persistent(_returns(), to, make, limit, manner, number, outcome)


def asked(call: Call, number: int, left: float) -> Asked:
    """What is called, when there is so much time left."""
    wanted = call.function if call.asked is None else call.asked
    if not number:
        return Asked(call.function, call.args, call.kwargs, call.keeps, wanted)
    args = (number, float(left), call.function, *(call.args or ()))
    return Asked(once, args, call.kwargs, call.keeps, wanted)


def await_workers(manner: Manner | None, workers: list[str | int], call: Call, timeout: float) -> float:
    """Wait here until all of them can be called, for what will stay on them; the time that is left.

    Raises:
        CallTimeout: one of them did not come in time.
    """
    limit = timeout
    if manner is None:
        return limit
    limit = limit_of(timeout, current.agent().timeout)
    what = user_name(call.function if call.asked is None else call.asked)
    for to in workers:
        presence = Presence(_returns(), to, limit, f"{what} on worker {to!r}")
        presence.await_it()
        limit = presence.left()
    return limit


def _returns() -> Returns:
    return current.here().attached(Returns)
