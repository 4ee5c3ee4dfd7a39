"""Reductions: the workers of a group combine the results of a function on each, and the caller gets one value.

The workers form a tree. The first worker is its root; the others are divided into parts of about equal size, and each
part is a subtree. Each worker calls itself with the function, and the roots of its subtrees with its own arguments.
Then it combines its own value and theirs, which keeps the order of the group. It answers with the result, and with the
errors of all failed workers in its tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

from telegrad.errors import CallTimeout, PeerLost, UsageError
from telegrad.ext.arguments import checks
from telegrad.ext.calls import Agent, EachCall, Future, PreparedCall, known_as, limit_of, user_name
from telegrad.ext.values import describe, rebuild
from telegrad.ext.workers import WorkerInfo, current
from telegrad.groups.group_calls import GroupFuture, group_error

BRANCHES = 3  # each level costs this many values, and there are log(n) / log(BRANCHES) levels: the cost is least for e
# a worker reserves this part of its time, or these seconds, to report which worker below was late
SPARE, ENOUGH = 0.05, 0.5

Combine = Callable[[Any, Any], Any]
Combined = tuple[list[Any], dict[str, bytes]]  # one value, or none if all failed; and descriptions of errors


def begin(
    version: int, workers: Sequence[WorkerInfo], call: PreparedCall, timeout: float, combine: Combine
) -> GroupFuture:
    checks.function("reduce", combine, "a function of two values, such as torch.add")
    agent = current.agent()
    limit = limit_of(timeout, agent.timeout)
    future = ReducedFuture(agent, version, [worker.name for worker in workers], user_name(call.users))
    args = future.workers, call.function, call.args, call.kwargs, combine, limit
    root = EachCall(future._slots[0], future.workers[0])
    agent.call_each([root], PreparedCall(reduced, args, keeps=call.keeps, asked=call.users), limit)
    return future


class ReducedFuture(GroupFuture):
    """A future of one value, which the workers of a group compute together."""

    def __init__(self, agent: Agent, version: int, workers: Sequence[str], about: str) -> None:
        super().__init__(agent, version, workers, workers[:1], about)
        self._errors: dict[str, BaseException] = {}  # stored before the future is done

    def _end(self) -> None:
        (root,) = self._slots
        values, errors = root.value if root.error is None else ([], _lost(root.error, self.workers))
        self._errors = {name: rebuild(error) for name, error in errors.items()}
        if self._errors:
            error = group_error(self._function, self._errors, len(self.workers), {})
            error.reduced = next(iter(values), None)
            self.set_exception(error)
        else:
            self._agent.streams.adopt(values[0])
            self.set_result(values[0])

    def errors(self) -> dict[str, BaseException]:
        """Wait for all calls. Return the errors of the failed ones, by worker."""
        self._wait_for_all()
        return dict(self._errors)

    def _check_has_several(self) -> None:
        raise UsageError("the values of a reduction are combined on the way: wait() returns the single result")


@known_as("a reduction")
def reduced(workers: list[str], function: Any, args: Any, kwargs: Any, combine: Combine, timeout: float) -> Combined:
    """Reduce the tree below this worker, which is one of `workers`. `timeout` is that of the original caller."""
    agent = current.agent()
    tree, depth = tree_of(len(workers), workers.index(agent.name))
    limit = timeout
    for _ in range(depth + 1):  # each level has less time than the one above; 0 is no limit
        limit -= max(SPARE * limit, min(ENOUGH, limit / 4))
    below = parts(tree)
    own: Future[Any] = Future()
    coming: list[Future[Combined]] = [Future() for _ in below]
    heads = [workers[part.start] for part in below]
    given = workers, function, args, kwargs, combine, timeout
    agent.call_each(map(EachCall, coming, heads), PreparedCall(reduced, given, asked=function), limit)
    agent.call_each([EachCall(own, agent.name)], PreparedCall(function, args, kwargs), limit)
    errors: dict[str, bytes] = {}
    values: list[Any] = []
    try:
        values.append(own.wait())
    except Exception as error:
        errors[agent.name] = describe(error, agent.name)
    for part, future in zip(below, coming, strict=True):
        try:
            more, failed = future.wait()
            values += more
            errors |= failed
        except Exception as error:
            errors |= _lost(error, [workers[place] for place in part])
    try:
        return ([reduce(combine, values)] if values else []), errors
    except Exception as error:
        errors[agent.name] = describe(error, agent.name, user_name(combine))
        return [], errors


def _lost(error: BaseException, workers: Sequence[str]) -> dict[str, bytes]:
    """Return the errors of a tree whose root, the first of these workers, did not answer."""
    root, *below = workers
    kind = CallTimeout if isinstance(error, CallTimeout) else PeerLost
    why = kind(f"its result was lost at worker {root!r}, which failed: {type(error).__name__}")
    return {root: describe(error, root)} | {name: describe(why, root) for name in below}


def parts(tree: range) -> list[range]:
    """Return the subtrees below the root of a tree of indices."""
    first, rest = tree.start + 1, len(tree) - 1
    count = min(BRANCHES, rest)
    cuts = [first + rest * each // count for each in range(count + 1)] if count else [first]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def tree_of(size: int, place: int) -> tuple[range, int]:
    """Return the tree whose root is an index, within the tree of `size` indices, and its depth."""
    tree, depth = range(size), 0
    while tree.start != place:
        tree = next(part for part in parts(tree) if place in part)
        depth += 1
    return tree, depth
