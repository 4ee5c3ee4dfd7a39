"""Collective operations of the workers of a group.

Barriers and reductions that each worker calls end once all have called. The first worker of the group manages the
meeting. The others call it, and get the result when all have arrived. The members of a meeting are the members of the
group when the first worker arrives. A worker that arrives a second time waits for the next meeting.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad.errors import CallTimeout, InvalidArgument, PeerLost, TelegradError, UsageError
from telegrad.ext.calls import (
    ASYNC_MARK,
    DEFAULT,
    Agent,
    EachCall,
    Future,
    PreparedCall,
    current_call,
    folded,
    known_as,
    limit_of,
    runs_as,
    user_name,
)
from telegrad.ext.feedback import Wait, checks
from telegrad.ext.values import describe, rebuild
from telegrad.ext.workers import Identity, WorkerInfo, current, listed, reach_tcp, serve_tcp
from telegrad.groups.group_calls import GroupFuture, group_error

if TYPE_CHECKING:
    import torch.distributed as dist

ASK = 0.5  # seconds between questions to the first worker about missing workers
PATIENCE = 5.0  # seconds to wait for an answer
LONGEST = 1800.0  # seconds for a process group, if the caller sets no limit: torch requires one
# Subtrees of each worker in a reduction. A worker receives this many values one after the other, and the tree has
# log(n) / log(BRANCHES) levels. Their product is least for BRANCHES = e, and 3 is the nearest integer.
BRANCHES = 3
# Each worker gives the workers below it this part of its own time. In the rest, it reports which worker below was late,
# before the worker above gives up on it. A larger rest would fail functions that end well within the caller's timeout.
PASSED_ON = 0.95

Op = Callable[[Any, Any], Any]
Combined = tuple[list[Any], dict[str, bytes]]  # one value, or none if all failed; and descriptions of errors
Key = tuple[str, str, str]  # the called function, the description of the group, a name

_numbers = itertools.count()  # numbers of this process's arrivals; `next` is atomic


class Participants:
    """The part of a group that a meeting needs."""

    __slots__ = ()

    @property
    def description(self) -> str:
        """A text of how the group was made, the same on all workers."""
        raise NotImplementedError

    @property
    def names(self) -> list[str]:
        raise NotImplementedError

    def __contains__(self, worker: str | int | WorkerInfo) -> bool:
        raise NotImplementedError


def meet(kind: str, group: Participants, name: str, value: Any, timeout: float, op: Op | None = None) -> Any:
    """Wait for all workers of the group. Return their names and values, or the values combined by `op` in that order.

    Raises:
        UsageError: this worker is not in the group.
        CallTimeout: some workers did not arrive in time.
        PeerLost: a worker was lost, or left, before it arrived; or, in an elastic group, has called shutdown.
    """
    agent, turning = current.agent(), current.here().turning
    limit = limit_of(timeout, agent.timeout)
    checks.text("name", name, empty=True)
    if op is not None:
        checks.function("op", op, "a function of two values")
    members = group.names
    if agent.name not in members:
        raise UsageError(f"{kind} must be called by the workers of the group, and {agent.name!r} is not in {group!r}")
    key, keeper, number = (kind, group.description, name), members[0], next(_numbers)
    what = spelled(*key)
    missing: list[str] = []  # in the keeper's last answer

    def ask(patience: float, question: Callable[..., Any], *args: Any, of: str = keeper) -> Any:
        with contextlib.suppress(TelegradError):  # the keeper is lost, and then `met` fails, or it is stopped
            return agent.call(of, question, args, None, patience, what)
        return None

    text = lambda: f"{what}: {listed([*map(repr, missing)] or ['others'])} did not arrive yet"  # noqa: E731
    # The call has no timeout of its own: this thread keeps the time, since it can name the missing workers.
    until = monotonic() + (limit or threading.TIMEOUT_MAX)
    met = agent.begin(keeper, PreparedCall(arrive, (key, number, group, value, op), None, None, what), 0)
    met.heed()
    try:
        with Wait(kind, text, lambda: missing, worker=agent.name) as wait:
            while not agent.wait_for(met, max(0.0, min(until - monotonic(), ASK))):
                if (left := until - monotonic()) > 0:
                    left = min(left, PATIENCE)
                    # Before the missing workers: one that leaves arrived before it called shutdown(), or never does.
                    leaving = (ask(left, who_leaves, of=turning.leader) if turning is not None else None) or []
                    missing = ask(left, who_is_missing, number) or []
                    # If this worker is in shutdown() itself, it serves a call that arrives here, and others may, too.
                    for name in set(leaving).intersection(missing) if agent.name not in leaving else ():
                        raise PeerLost(f"{what}: worker {name!r} will not arrive: it has called shutdown()")
                    wait.look()
                    continue
                # The first worker decides in one step: either this arrival is withdrawn, or all have arrived and the
                # result is under way. So a worker that raises CallTimeout was not counted, if the first worker answers.
                patient_until = monotonic() + PATIENCE
                late = ask(PATIENCE, who_is_missing, number, True)
                if late is None:  # all arrived just now, or the keeper does not answer
                    if agent.wait_for(met, max(0.0, patient_until - monotonic())):
                        break
                    why = f"worker {keeper!r}, which tracks the arrivals, does not answer"
                else:
                    why = f"{listed(list(map(repr, late)))} did not arrive"
                raise CallTimeout(
                    f"{what}: after {limit:g} s {why}. "
                    "`python -m telegrad why` shows what they are doing; a longer timeout= waits longer"
                )
        return met.wait()
    finally:
        met.cancel()  # withdraws the arrival if this thread timed out or was interrupted


def spelled(kind: str, group: str, name: str) -> str:
    return f"{kind}{f' {name!r}' if name else ''} of the group ({group})"


# On the worker that manages a meeting


class CollectiveArrival(NamedTuple):
    """One worker in one meeting. Several threads of a worker may wait, each in a different meeting."""

    worker: Identity
    number: int


class Collective:
    """The workers that a meeting waits for, and those that have arrived."""

    def __init__(self, members: list[str]) -> None:
        self.members = members
        # by worker, with the value, and the future of the result
        self.arrived: dict[str, tuple[CollectiveArrival, Any, Future[Any]]] = {}
        self.withdrew: set[str] = set()

    def awaits(self, name: str) -> bool:
        return name in self.members and name not in self.arrived

    @property
    def missing(self) -> list[str]:
        """Return the workers that never arrived, or if all did, those that withdrew."""
        missing = [name for name in self.members if name not in self.arrived]
        return [name for name in missing if name not in self.withdrew] or missing


class CollectiveManager:
    def __init__(self, agent: Agent) -> None:
        self._lock = threading.Lock()  # guards _meetings
        self._meetings: dict[Key, list[Collective]] = {}  # pending meetings, in the order in which they began
        self._listens = False

    def listen(self) -> None:
        """Subscribe to workers leaving the group."""
        # The flag is set once this has succeeded. If two threads do it at the same time, the second `give_up` of a
        # worker finds nothing to end.
        if not self._listens:
            whys = {"left": "it has left the group", "lost": "it was lost"}
            current.here().membership.on_leave(lambda who, how: self.give_up(who.name, whys[how]))
            self._listens = True

    def arrive(
        self, key: Key, arrival: CollectiveArrival, members: list[str], value: Any, op: Op | None
    ) -> Future[Any]:
        met: Future[Any] = Future()
        met.follows = _Place(self, arrival)
        name = arrival.worker.name
        with self._lock:
            meetings = self._meetings.setdefault(key, [])
            # A worker joins the oldest meeting in which it has not arrived. So a second arrival, as of a worker that is
            # ahead, belongs to the next meeting.
            meeting = next((each for each in meetings if each.awaits(name)), None)
            if meeting is None:
                meeting = Collective(members)
                meetings.append(meeting)
            meeting.arrived[name] = arrival, value, met
            meeting.withdrew.discard(name)
            over = not meeting.missing
            if over:
                self._end(key, meeting)
        if over:
            # Without the lock: `op` is a function of the program.
            _conclude(meeting, op)
        return met

    def missing(self, arrival: CollectiveArrival, withdraws: bool = False) -> list[str] | None:
        """Return the workers that an arrival waits for, or None if it no longer waits. Withdraw it if asked to."""
        name = arrival.worker.name
        with self._lock:
            pending = ((key, meeting) for key, meetings in self._meetings.items() for meeting in meetings)
            found = (each for each in pending if each[1].arrived.get(name, (None,))[0] == arrival)
            key, meeting = next(found, (None, None))
            if key is None or meeting is None:
                return None
            missing = meeting.missing
            if not withdraws:
                return missing
            *_, met = meeting.arrived.pop(name)
            # The meeting continues to wait for this worker, which may call again.
            meeting.withdrew.add(name)
            if not meeting.arrived:
                self._end(key, meeting)
        met.set_result(None)  # no thread waits for it
        return missing

    def _end(self, key: Key, meeting: Collective) -> None:
        """Remove a meeting. The caller holds the lock."""
        self._meetings[key].remove(meeting)
        if not self._meetings[key]:
            del self._meetings[key]

    def give_up(self, name: str, why: str) -> None:
        """End the meetings that wait for a worker, with an error for all that have arrived."""
        with self._lock:
            hopeless = [(key, each) for key, kept in self._meetings.items() for each in kept if each.awaits(name)]
            for each in hopeless:
                self._end(*each)
        for _, meeting in hopeless:
            for *_, met in meeting.arrived.values():
                met.set_exception(PeerLost(f"worker {name!r}, for which all wait here, will not arrive: {why}"))


class _Place(NamedTuple):
    """A worker's arrival in a meeting, which is withdrawn if the call that made it is cancelled."""

    meetings: CollectiveManager
    arrival: CollectiveArrival

    def cancel(self) -> bool:
        return self.meetings.missing(self.arrival, withdraws=True) is not None


def _conclude(meeting: Collective, op: Op | None) -> None:
    arrived = [meeting.arrived[name] for name in meeting.members]
    values = [value for _, value, _ in arrived]
    try:
        made = functools.reduce(op, values) if op is not None else list(zip(meeting.members, values, strict=True))
    except BaseException as error:
        for *_, met in arrived:
            met.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        for *_, met in arrived:
            met.set_result(made)


def arrive(key: Key, number: int, group: Participants, value: Any, op: Op | None) -> Future[Any]:
    """Record that the caller has arrived. Return a future of the result."""
    here, arrival = current.here(), _arrival(number)
    name = arrival.worker.name
    if name not in group:
        here.membership.refresh()  # the worker may have joined just now
    members = group.names
    if name not in members:
        raise UsageError(f"worker {name!r} is not in {group!r}, as worker {here.agent.name!r} sees it")
    meetings: CollectiveManager = here.attached(CollectiveManager)
    meetings.listen()
    met = meetings.arrive(key, arrival, members, value, op)
    # Look after the arrival: a member that left before it was not in a meeting yet when `give_up` was called.
    there = {worker.name for worker in here.membership.view().workers}
    for each in members:
        if each not in there:
            meetings.give_up(each, "it is no longer in the group")
    return met


def who_is_missing(number: int, withdraws: bool = False) -> list[str] | None:
    return current.here().attached(CollectiveManager).missing(_arrival(number), withdraws)


def who_leaves() -> list[str]:
    """Return the workers of this elastic group that have called shutdown(), if this worker leads."""
    return turning.leaving() if (turning := current.here().turning) is not None else []


def _arrival(number: int) -> CollectiveArrival:
    """Return the arrival of the worker whose call this thread serves."""
    return CollectiveArrival(current_call().caller.identity, number)


setattr(arrive, ASYNC_MARK, True)
runs_as(arrive, lambda key, *_: spelled(*key))


# Reductions of calls: the workers of a group combine the results of a function on each, and the caller gets one value
#
# The workers form a tree. The first worker is its root; the others are divided into parts of about equal size, and each
# part is a subtree. Each worker calls itself with the function, and the roots of its subtrees with its own arguments.
# Then it combines its own value and theirs, which keeps the order of the group. It answers with the result, and with
# the errors of all failed workers in its tree.


def begin_reduction(
    version: int, workers: Sequence[WorkerInfo], call: PreparedCall, timeout: float, combine: Op
) -> GroupFuture[Any]:
    checks.function("reduce", combine, "a function of two values, such as torch.add")
    agent = current.agent()
    limit = limit_of(timeout, agent.timeout)
    future = ReducedFuture(agent, version, [worker.name for worker in workers], user_name(call.users))
    args = future.workers, call.function, call.args, call.kwargs, combine, limit
    root = EachCall(future._slots[0], future.workers[0])
    agent.call_each([root], PreparedCall(reduced, args, keeps=call.keeps, asked=future._function), limit)
    return future


class ReducedFuture(GroupFuture[Any]):
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
def reduced(workers: list[str], function: Any, args: Any, kwargs: Any, reduce: Op, timeout: float) -> Combined:
    """Reduce the tree below this worker, which is one of `workers`. `timeout` is that of the original caller."""
    agent = current.agent()
    tree, depth = tree_of(len(workers), workers.index(agent.name))
    limit = timeout * PASSED_ON ** (depth + 1)  # 0 is no limit
    below = parts(tree)
    own: Future[Any] = Future()
    coming: list[Future[Combined]] = [Future() for _ in below]
    heads = [workers[part.start] for part in below]
    given = workers, function, args, kwargs, reduce, timeout
    # Start the subtrees before this worker's own function, which then runs at the same time as theirs.
    agent.call_each(map(EachCall, coming, heads), PreparedCall(reduced, given, asked=user_name(function)), limit)
    agent.call_each([EachCall(own, agent.name)], PreparedCall(function, args, kwargs), limit)
    errors: dict[str, bytes] = {}
    values: list[Any] = []
    try:
        values.append(own.wait())
    except Exception as error:
        errors[agent.name] = describe(error, agent.name, "", agent.shares_program(*workers))
    for part, future in zip(below, coming, strict=True):
        try:
            more, failed = future.wait()
            # In the order of the group, not of arrival: the function need not be commutative.
            values += more
            errors |= failed
        except Exception as error:
            errors |= _lost(error, [workers[place] for place in part])
    try:
        return ([functools.reduce(reduce, values)] if values else []), errors
    except Exception as error:
        # No value of this tree reaches the worker above. The workers below keep errors of their own.
        why = describe(error, agent.name, user_name(reduce), agent.shares_program(*workers))
        return [], _lost(error, [workers[place] for place in tree]) | errors | {agent.name: why}


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
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


def tree_of(size: int, place: int) -> tuple[range, int]:
    """Return the tree whose root is an index, within the tree of `size` indices, and its depth."""
    tree, depth = range(size), 0
    while tree.start != place:
        tree = next(part for part in parts(tree) if place in part)
        depth += 1
    return tree, depth


# Process groups of `torch.distributed`, whose collectives are fast and synchronous


@folded
def process_group(group: Participants, backend: str = "gloo", timeout: float = DEFAULT) -> dist.ProcessGroup:
    """As `telegrad.process_group`."""
    import torch.distributed as dist  # when a program wants one: torch may be built without it
    from torch.distributed import distributed_c10d as c10d

    checks.text("backend", backend, "the name of a backend of torch.distributed")
    if ":" not in backend and backend.lower() not in dist.Backend.backend_list:
        known = ", ".join(each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED)
        raise InvalidArgument(f"torch.distributed has no backend {checks.short_repr(backend)}; it has {known}")
    worker = current.here()
    limit = datetime.timedelta(seconds=limit_of(timeout, worker.agent.timeout) or LONGEST)
    brings = None
    if group.names[:1] == [worker.me.name]:
        address = worker.me.tcp[0]
        store, port = serve_tcp(address, 0)
        # The key names the process group. It is random, as a name must not occur twice in a process.
        brings = address, port, secrets.token_hex(8)
    met = meet("process_group", group, backend, brings, timeout)
    names = [name for name, _ in met]
    place = met[0][1]
    if place is None:
        raise UsageError(
            f"the workers disagree about the group: {names[0]!r} is not the first member of {group!r} in its own view"
        )
    address, port, key = place
    if brings is None:
        store = reach_tcp(address, port, limit)
    made: dist.ProcessGroup
    # As torch makes its default group, without registering it as the default. Torch has no public API for this.
    made, _ = c10d._new_process_group_helper(
        len(names),
        names.index(worker.me.name),
        [],
        dist.Backend(backend),
        store,
        c10d.GroupName(f"telegrad-{key}"),
        timeout=limit,
        group_desc=", ".join(names),
    )
    c10d._world.pg_group_ranks[made] = {place: place for place in range(len(names))}

    # torch keeps it until it is destroyed. If the program does that, its threads and sockets must not stay until this
    # worker leaves.
    kept = weakref.ref(made)

    def destroy() -> None:
        if (left := kept()) is not None:
            with contextlib.suppress(ValueError, AssertionError):  # the program has destroyed it already
                dist.destroy_process_group(left)

    worker.at_end.append(destroy)
    return made
