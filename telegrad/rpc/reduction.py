"""Reductions: workers combine what a function gives on each along a tree (`trees`), and one value comes back.

Each worker calls itself with the function, and those below it with the same as it was called with; then it combines
what comes, in order, and answers with that and with the errors of all who failed below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, NoReturn

from telegrad import checks
from telegrad.agent.agent import Agent
from telegrad.agent.deadlines import limit_of
from telegrad.agent.fanout import EachCall
from telegrad.agent.futures import Future
from telegrad.agent.naming import known_as, user_name
from telegrad.errors import CallTimeout, PeerLost, UsageError
from telegrad.group.members import WorkerInfo
from telegrad.rpc import current
from telegrad.rpc.conversion import Call
from telegrad.rpc.groupcalls import GroupFuture, group_error
from telegrad.rpc.trees import parts, tree_of
from telegrad.wire.failures import describe, rebuild

SPARE, ENOUGH = 0.05, 0.5  # of its own time, or else seconds, that a worker keeps to tell who below it was late


class Plan(NamedTuple):
    """What all of the workers get."""

    workers: list[str]
    function: Any
    args: Any
    kwargs: Any
    combine: Callable[[Any, Any], Any]
    timeout: float  # that of the caller


class Part(NamedTuple):
    """What a tree of workers came to."""

    values: list[Any]  # the one, or none where all have failed
    errors: dict[str, bytes]  # described


def begin(
    version: int, workers: Sequence[WorkerInfo], call: Call, timeout: float, combine: Callable[[Any, Any], Any]
) -> GroupFuture:
    """Call all of them along a tree."""
    checks.function("reduce", combine, "a function of two values, such as torch.add")
    agent = current.agent()
    limit = limit_of(timeout, agent.timeout)
    asked = call.function if call.asked is None else call.asked
    future = ReducedFuture(agent, version, [worker.name for worker in workers], user_name(asked))
    plan = Plan(future.workers, call.function, call.args, call.kwargs, combine, limit)
    root = EachCall(future._shares[0], future.workers[0], call.keeps)
    agent.call_each([root], reduced, plan, None, limit, asked)
    return future


class ReducedFuture(GroupFuture):
    """A future of one value, which the workers of a group make together."""

    def __init__(self, agent: Agent, version: int, workers: Sequence[str], about: str) -> None:
        super().__init__(agent, version, workers, workers[:1], about)
        self._errors: dict[str, BaseException] = {}  # stored before this is done

    def _end(self) -> None:
        (root,) = self._shares
        part: Part = root.value if root.error is None else Part([], lost(root.error, self.workers))
        self._errors = {name: rebuild(error) for name, error in part.errors.items()}
        if self._errors:
            error = group_error(self._function, self._errors, len(self.workers), {})
            error.reduced = next(iter(part.values), None)
            self.set_exception(error)
        else:
            self._agent.streams.adopt(part.values[0])
            self.set_result(part.values[0])

    def errors(self) -> dict[str, BaseException]:
        """The errors of those that failed, by worker; waits for all."""
        self._wait_for_all()
        return dict(self._errors)

    def results(self) -> NoReturn:
        raise _no_values()

    def first(self, n: int = 1) -> NoReturn:
        raise _no_values()

    def as_completed(self) -> NoReturn:
        raise _no_values()


def _no_values() -> UsageError:
    return UsageError("the values of a reduction have come together on their way: wait() gives the one that there is")


@known_as("a reduction")
def reduced(*given: Any) -> Part:
    """On each worker: what its tree comes to."""
    plan, agent = Plan(*given), current.agent()
    tree, depth = tree_of(len(plan.workers), plan.workers.index(agent.name))
    limit = reduce(lambda limit, _: _for_below(limit), range(depth + 1), plan.timeout)
    below = parts(tree)
    own: Future[Any] = Future()
    coming: list[Future[Part]] = [Future() for _ in below]
    heads = [plan.workers[part.start] for part in below]
    agent.call_each(map(EachCall, coming, heads), reduced, given, None, limit, plan.function)
    agent.call_each([EachCall(own, agent.name)], plan.function, plan.args, plan.kwargs, limit)
    errors: dict[str, bytes] = {}
    values: list[Any] = []
    try:
        values.append(own.wait())
    except Exception as error:
        errors[agent.name] = describe(error, agent.name)
    for part, future in zip(below, coming, strict=True):
        try:
            more = future.wait()
            values += more.values
            errors |= more.errors
        except Exception as error:
            errors |= lost(error, [plan.workers[place] for place in part])
    return Part(_combined(values, plan.combine, errors, agent.name), errors)


def _for_below(limit: float) -> float:
    """The time that a worker gives to those below it; 0 is no limit."""
    return limit - max(SPARE * limit, min(ENOUGH, limit / 4))


def _combined(values: list[Any], combine: Callable[[Any, Any], Any], errors: dict[str, bytes], here: str) -> list[Any]:
    if not values:
        return []
    value, *others = values
    try:
        for other in others:
            value = combine(value, other)
    except Exception as error:
        errors[here] = describe(error, here, user_name(combine))
        return []
    return [value]


def lost(error: BaseException, workers: Sequence[str]) -> dict[str, bytes]:
    """The errors of a tree whose root, the first of these, did not answer."""
    root, *below = workers
    kind = CallTimeout if isinstance(error, CallTimeout) else PeerLost
    why = kind(f"what it gave was lost on its way over worker {root!r}, which failed: {type(error).__name__}")
    return {root: describe(error, root)} | {name: describe(why, root) for name in below}
