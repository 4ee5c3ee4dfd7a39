"""Where all workers of a group meet: each calls the same, and goes on once all have.

The first worker of the group keeps the meeting (`gatherings`): the others call it, and are answered when all are there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import reduce
from time import monotonic
from typing import Any, NamedTuple, Protocol

from telegrad import checks
from telegrad.agent.agent import Agent
from telegrad.agent.deadlines import limit_of
from telegrad.agent.futures import Future
from telegrad.agent.naming import runs_as
from telegrad.agent.server import ASYNC_MARK
from telegrad.errors import CallTimeout, PeerLost, TelegradError, UsageError
from telegrad.group.members import Identity, WorkerInfo, listed
from telegrad.progress import Wait
from telegrad.rpc import current
from telegrad.rpc.feeding import current_call
from telegrad.rpc.gatherings import Gatherings, Key, Meeting

ASK = 0.5  # seconds between questions who is missing
PATIENCE = 5.0  # seconds for an answer to these

_numbers = itertools.count()  # of arrivals of this process; `next` is atomic


class Party(Protocol):
    """A group, as far as it meets."""

    @property
    def said(self) -> str:
        """How it was made: the same wherever it is."""

    @property
    def names(self) -> list[str]: ...

    def __contains__(self, worker: str) -> bool: ...


def meet(
    kind: str,
    group: Party,
    name: str,
    brings: Any,
    timeout: float,
    op: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Wait for all of the group: what each has brought, by its name and in their order, or what `op` makes of it.

    Raises:
        UsageError: this worker is not in the group.
        CallTimeout: not all came in time.
        PeerLost: one has died, or left, before it came.
    """
    limit = limit_of(timeout, current.agent().timeout)
    checks.text("name", name, empty=True)
    if op is not None:
        checks.function("op", op, "a function of two values")
    agent, members = current.agent(), group.names
    if agent.name not in members:
        raise UsageError(f"{kind} is called by the workers of the group, and {agent.name!r} is not in {group!r}")
    return _Attendee(agent, Key(kind, group.said, name), members[0]).wait(group, brings, limit, op)


class _Attendee:
    """One worker that waits for the others."""

    def __init__(self, agent: Agent, key: Key, keeper: str) -> None:
        self._agent = agent
        self._key = key
        self._keeper = keeper
        self._number = next(_numbers)
        self._missing: list[str] = []  # as the keeper said when it was last asked; replaced as a whole

    def wait(self, group: Party, brings: Any, limit: float, op: Callable[[Any, Any], Any] | None) -> Any:
        agent, keeper = self._agent, self._keeper
        until = monotonic() + (limit or threading.TIMEOUT_MAX)
        met: Future[Any] = agent.call_async(keeper, arrive, (self._key, self._number, group, brings, op), None, 0)
        met.heed()
        try:
            with Wait(self._key.kind, self._text, lambda: self._missing, worker=agent.name) as wait:
                while not agent.wait_for(met, max(0.0, min(until - monotonic(), ASK))):
                    if (left := until - monotonic()) <= 0:
                        self._give_up(met, limit)
                        break
                    self._missing = self._ask(who_is_missing, min(left, PATIENCE)) or []
                    wait.look()
            return met.wait()
        finally:
            met.cancel()  # where this thread gave up or was interrupted, its arrival does not count

    def _give_up(self, met: Future[Any], limit: float) -> None:
        """The time is over: raise CallTimeout, unless all have come in that moment, or the keeper was lost."""
        until = monotonic() + PATIENCE
        missing = self._ask(withdraw, PATIENCE)
        if missing is not None:
            why = f"{listed(list(map(repr, missing)))} did not come"
        elif self._agent.wait_for(met, max(0.0, until - monotonic())):
            return
        else:
            why = f"worker {self._keeper!r}, which knows who has come, does not answer"
        raise CallTimeout(
            f"{spelled(self._key)}: after {limit:g} s {why}. "
            "`python -m telegrad why` says what they are at; a longer timeout= waits longer"
        )

    def _ask(self, question: Callable[..., list[str] | None], timeout: float) -> list[str] | None:
        try:
            said: list[str] | None = self._agent.call(self._keeper, question, (self._number,), None, timeout)
        except TelegradError:  # the keeper is lost, as its answer will tell, or is stopped
            return None
        return said

    def _text(self) -> str:
        late = listed([repr(name) for name in self._missing]) if self._missing else "the others"
        return f"{spelled(self._key)}: {late} did not come yet"


def spelled(key: Key) -> str:
    name = f" {key.name!r}" if key.name else ""
    return f"{key.kind}{name} of the group ({key.group})"


def add(first: Any, second: Any) -> Any:
    return first + second


# On the worker that keeps a meeting


class Arrival(NamedTuple):
    """One worker in one meeting; several threads of a worker may wait, each in a meeting of its own."""

    who: Identity
    number: int


class Keeper:
    """The meetings that one worker keeps."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards all below
        self._gatherings = Gatherings()
        self._waiting: dict[Meeting, dict[Arrival, Future[Any]]] = {}
        self._listens = False

    def listen(self) -> None:
        """Hear of those who leave."""
        with self._lock:
            listens, self._listens = self._listens, True
        if not listens:
            current.here().membership.on_leave(self._gone)

    def arrive(
        self, key: Key, arrival: Arrival, members: list[str], brings: Any, op: Callable[[Any, Any], Any] | None
    ) -> Future[Any]:
        met: Future[Any] = Future()
        met.follows = _Place(self, arrival)
        with self._lock:
            meeting = self._gatherings.arrive(key, arrival.who.name, brings, members)
            waiting = self._waiting.setdefault(meeting, {})
            waiting[arrival] = met
            over = not meeting.missing
            if over:
                del self._waiting[meeting]
        if over:
            _conclude(meeting, waiting, op)
        return met

    def missing(self, arrival: Arrival) -> list[str] | None:
        with self._lock:
            meeting = self._meeting_of(arrival)
            return None if meeting is None else meeting.late

    def withdraw(self, arrival: Arrival) -> list[str] | None:
        with self._lock:
            meeting = self._meeting_of(arrival)
            if meeting is None:
                return None
            late = meeting.late
            self._gatherings.withdraw(arrival.who.name, meeting)
            met = self._waiting[meeting].pop(arrival)
            if not self._waiting[meeting]:
                del self._waiting[meeting]
        met.set_result(None)  # it is not waited for
        return late

    def _meeting_of(self, arrival: Arrival) -> Meeting | None:
        """With the lock held: return the meeting in which this arrival waits."""
        return next((meeting for meeting, waiting in self._waiting.items() if arrival in waiting), None)

    def _gone(self, who: WorkerInfo, how: str) -> None:
        with self._lock:
            hopeless = [self._waiting.pop(meeting, {}) for meeting in self._gatherings.gone(who.name)]
        for waiting in hopeless:
            for met in waiting.values():
                met.set_exception(_absent(who.name, "it has left the group" if how == "left" else "it was lost"))


class _Place(NamedTuple):
    """Of someone in a meeting: where its call is cancelled, it counts as one who has not come."""

    keeper: Keeper
    arrival: Arrival

    def cancel(self) -> bool:
        return self.keeper.withdraw(self.arrival) is not None


def _conclude(meeting: Meeting, waiting: dict[Arrival, Future[Any]], op: Callable[[Any, Any], Any] | None) -> None:
    brought = meeting.brought()
    try:
        made = reduce(op, brought) if op is not None else list(zip(meeting.members, brought, strict=True))
    except BaseException as error:
        for met in waiting.values():
            met.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        for met in waiting.values():
            met.set_result(made)


def _absent(name: str, why: str) -> PeerLost:
    return PeerLost(f"worker {name!r}, which all wait for here, will not come: {why}")


def arrive(key: Key, number: int, group: Party, brings: Any, op: Callable[[Any, Any], Any] | None) -> Future[Any]:
    """Someone has come; a future of what all have brought."""
    here = current.here()
    arrival = _arrival(number)
    who = arrival.who.name
    if who not in group:
        here.membership.refresh()  # it has joined just now
    members, there = group.names, {worker.name for worker in here.membership.view().workers}
    if who not in members:
        raise UsageError(f"worker {who!r} is not in {group!r}, as worker {here.agent.name!r} sees it")
    keeper: Keeper = here.attached(Keeper)
    keeper.listen()
    for name in members:
        if name not in there:
            raise _absent(name, "it is no longer in the group")
    return keeper.arrive(Key(*key), arrival, members, brings, op)


def who_is_missing(number: int) -> list[str] | None:
    """Return the workers that the caller waits for; None if it waits no more."""
    keeper: Keeper = current.here().attached(Keeper)
    return keeper.missing(_arrival(number))


def withdraw(number: int) -> list[str] | None:
    """Withdraw the caller's arrival; return the workers that were missing, or None if it waits no more."""
    keeper: Keeper = current.here().attached(Keeper)
    return keeper.withdraw(_arrival(number))


def _arrival(number: int) -> Arrival:
    """Return that of the worker whose call this thread serves."""
    return Arrival(current_call().caller.identity, number)


setattr(arrive, ASYNC_MARK, True)
runs_as(arrive, lambda key, *_: spelled(Key(*key)))
