"""Barriers and reductions that each worker of a group calls, and that end once all have called.

The first worker of the group manages the meeting. The others call it, and get the result when all have arrived. The
members of a meeting are the members of the group when the first worker arrives. A worker that arrives a second time
waits for the next meeting.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import reduce
from time import monotonic
from typing import Any, NamedTuple, Protocol

from telegrad.errors import CallTimeout, PeerLost, TelegradError, UsageError
from telegrad.ext.arguments import checks
from telegrad.ext.calls import ASYNC_MARK, Agent, Future, current_call, limit_of, runs_as
from telegrad.ext.texts import Wait
from telegrad.ext.workers import Identity, WorkerInfo, current, listed

ASK = 0.5  # seconds between questions to the first worker about missing workers
PATIENCE = 5.0  # seconds to wait for an answer

Op = Callable[[Any, Any], Any]
Key = tuple[str, str, str]  # the called function, the description of the group, a name

_numbers = itertools.count()  # numbers of this process's arrivals; `next` is atomic


class Participants(Protocol):
    """The part of a group that a meeting needs."""

    @property
    def description(self) -> str:
        """Return the same text on all workers."""

    @property
    def names(self) -> list[str]: ...

    def __contains__(self, worker: str) -> bool: ...


def meet(kind: str, group: Participants, name: str, value: Any, timeout: float, op: Op | None = None) -> Any:
    """Wait for all workers of the group. Return their names and values, or the values combined by `op` in that order.

    Raises:
        UsageError: this worker is not in the group.
        CallTimeout: some workers did not arrive in time.
        PeerLost: a worker died, or left, before it arrived.
    """
    agent = current.agent()
    limit = limit_of(timeout, agent.timeout)
    checks.text("name", name, empty=True)
    if op is not None:
        checks.function("op", op, "a function of two values")
    members = group.names
    if agent.name not in members:
        raise UsageError(f"{kind} must be called by the workers of the group, and {agent.name!r} is not in {group!r}")
    key, keeper, number = (kind, group.description, name), members[0], next(_numbers)
    missing: list[str] = []  # in the keeper's last answer

    def ask(patience: float, withdraws: bool = False) -> list[str] | None:
        try:
            said: list[str] | None = agent.call(keeper, who_is_missing, (number, withdraws), None, patience)
        except TelegradError:  # the keeper is lost, and then `met` fails, or it is stopped
            return None
        return said

    def text() -> str:
        return f"{spelled(*key)}: {listed(list(map(repr, missing))) or 'the others'} did not arrive yet"

    until = monotonic() + (limit or threading.TIMEOUT_MAX)
    met: Future[Any] = agent.call_async(keeper, arrive, (key, number, group, value, op), None, 0)
    met.heed()
    try:
        with Wait(kind, text, lambda: missing, worker=agent.name) as wait:
            while not agent.wait_for(met, max(0.0, min(until - monotonic(), ASK))):
                if (left := until - monotonic()) > 0:
                    missing = ask(min(left, PATIENCE)) or []
                    wait.look()
                    continue
                patient_until = monotonic() + PATIENCE
                late = ask(PATIENCE, withdraws=True)
                if late is None:  # all arrived just now, or the keeper does not answer
                    if agent.wait_for(met, max(0.0, patient_until - monotonic())):
                        break
                    why = f"worker {keeper!r}, which tracks the arrivals, does not answer"
                else:
                    why = f"{listed(list(map(repr, late)))} did not arrive"
                raise CallTimeout(
                    f"{spelled(*key)}: after {limit:g} s {why}. "
                    "`python -m telegrad why` shows what they are doing; a longer timeout= waits longer"
                )
        return met.wait()
    finally:
        met.cancel()  # withdraws the arrival if this thread timed out or was interrupted


def spelled(kind: str, group: str, name: str) -> str:
    return f"{kind}{f' {name!r}' if name else ''} of the group ({group})"


def add(first: Any, second: Any) -> Any:
    return first + second


# On the worker that manages a meeting


class CollectiveArrival(NamedTuple):
    """One worker in one meeting. Several threads of a worker may wait, each in a different meeting."""

    worker: Identity
    number: int


class Collective:
    """The workers that a meeting waits for, and those that have arrived."""

    def __init__(self, members: list[str]) -> None:
        self.members = members
        self.arrived: dict[
            str, tuple[CollectiveArrival, Any, Future[Any]]
        ] = {}  # with the value, and the future of the result
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
        self._lock = threading.Lock()  # guards all fields below
        self._meetings: dict[Key, list[Collective]] = {}  # pending meetings, in the order in which they began
        self._listens = False

    def listen(self) -> None:
        """Subscribe to workers leaving the group."""
        with self._lock:
            listens, self._listens = self._listens, True
        if not listens:
            current.here().membership.on_leave(self._on_leave)

    def arrive(
        self, key: Key, arrival: CollectiveArrival, members: list[str], value: Any, op: Op | None
    ) -> Future[Any]:
        met: Future[Any] = Future()
        met.follows = _Place(self, arrival)
        name = arrival.worker.name
        with self._lock:
            meetings = self._meetings.setdefault(key, [])
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

    def _on_leave(self, who: WorkerInfo, how: str) -> None:
        with self._lock:
            hopeless = [(key, each) for key, kept in self._meetings.items() for each in kept if each.awaits(who.name)]
            for each in hopeless:
                self._end(*each)
        for _, meeting in hopeless:
            for *_, met in meeting.arrived.values():
                met.set_exception(_absent(who.name, "it has left the group" if how == "left" else "it was lost"))


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
        made = reduce(op, values) if op is not None else list(zip(meeting.members, values, strict=True))
    except BaseException as error:
        for *_, met in arrived:
            met.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        for *_, met in arrived:
            met.set_result(made)


def _absent(name: str, why: str) -> PeerLost:
    return PeerLost(f"worker {name!r}, for which all wait here, will not arrive: {why}")


def arrive(key: Key, number: int, group: Participants, value: Any, op: Op | None) -> Future[Any]:
    """Record that the caller has arrived. Return a future of the result."""
    here, arrival = current.here(), _arrival(number)
    name = arrival.worker.name
    if name not in group:
        here.membership.refresh()  # the worker may have joined just now
    members, there = group.names, {worker.name for worker in here.membership.view().workers}
    if name not in members:
        raise UsageError(f"worker {name!r} is not in {group!r}, as worker {here.agent.name!r} sees it")
    meetings: CollectiveManager = here.attached(CollectiveManager)
    meetings.listen()
    for each in members:
        if each not in there:
            raise _absent(each, "it is no longer in the group")
    return meetings.arrive(key, arrival, members, value, op)


def who_is_missing(number: int, withdraws: bool) -> list[str] | None:
    return current.here().attached(CollectiveManager).missing(_arrival(number), withdraws)


def _arrival(number: int) -> CollectiveArrival:
    """Return the arrival of the worker whose call this thread serves."""
    return CollectiveArrival(current_call().caller.identity, number)


setattr(arrive, ASYNC_MARK, True)
runs_as(arrive, lambda key, *_: spelled(*key))
