"""Introspection of a worker. This file describes the report of its state at one moment: plain values, sent as JSON and
read without torch; and figures of reports: rates, how urgent a worker's troubles are, and the series of ten minutes.

An answer comes from another process, which may run another version or not be a worker at all; a file may be damaged. So
all answers pass through `decode`, which checks their form and sizes and sanitizes their texts. Code that uses the
result can rely on these types, and print each text.
"""

from __future__ import annotations

import json
import types
import typing
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar, Union

from telegrad.ext.events import Event, events
from telegrad.ext.feedback import safe

JOINING, MEMBER, LEAVING = "joining", "member", "leaving"  # phases of a worker's life in its group
SPARE = "spare"  # instead of `joining`: it waits for the next generation of an elastic group
# States of an incoming call; UNFINISHED: the function has returned a future or a coroutine that is not done yet.
RUNNING, QUEUED, UNFINISHED = "running", "queued", "going on"
MOST_ALIKE = 256  # maximum number of similar calls in a list

ACCOUNT, GROUP, EVENTS, GROUP_EVENTS, DUMP = "account", "group", "events", "group events", "dump"  # topics
CALL = "call"
FILE = "file"  # the content of a dump, a file that `reporting/introspection.py` writes
LARGEST_FILE = 16 << 20  # bytes of a dump; the oldest events are dropped from a larger one

LONGEST_TEXT = 4096  # characters; longer texts are cut
MOST_ITEMS = 100_000  # in one list or dictionary
LARGEST_NUMBER = 1 << 64

_Check = Callable[[Any, str], Any]


class SourceLine(TypedDict):
    """The line of a program that a thread executes."""

    file: str
    line: int
    function: str
    text: str  # the source line, if it can be read


class CallOut(TypedDict):
    """An outgoing call of this worker without a response."""

    to: str
    number: int  # identifies the call at the callee, together with the caller's name
    function: str
    age: float  # seconds
    timeout: float  # 0: none
    thread: int | None  # the thread that waits for it; None if no thread waits
    more: NotRequired[int]  # number of younger calls like this one that are not listed


class CallIn(TypedDict):
    """An incoming call that was not answered yet."""

    caller: str
    number: int
    function: str  # may be empty if the call was not decoded yet
    age: float  # seconds since it began to run; 0 while it waits
    state: str
    thread: int | None  # the thread or the coroutine that runs it
    cancelled: NotRequired[bool]  # True if it was cancelled; its function may still run
    more: NotRequired[int]  # number of younger calls like this one that are not listed


COROUTINE = "coroutine"  # the name of a ThreadState that is a coroutine
BEGIN = "begin"  # the wait of a coroutine that its event loop has not begun
EVENT_LOOP = "telegrad-asyncio"  # the name of the thread that runs a worker's coroutines
ASKS = "asks"  # the wait of a thread of the program that asks for the report

# Functions that all workers of a group call, and that wait for each other.
MEETINGS = ("barrier", "all_reduce", "process_group")
NEXT = "next generation"  # the wait of a spare, until a generation that runs ends: no hang
MOVES = "move to the next generation"  # the wait of a member of an elastic group
JOINS = ("init_rpc", "store", NEXT)  # waits of a worker that joins


class WaitState(TypedDict):
    """A wait of this package that a thread is in, except waits for calls, which `CallOut` lists."""

    what: str  # "shutdown", "serve", "backward", "future", "value", one of JOINS, "room", or the called function
    on: list[str]  # workers, by name; or "rank 2"
    about: str  # further text for the user
    age: NotRequired[float]  # seconds, if known


class ThreadState(TypedDict):
    """A thread, except this package's idle threads; or a coroutine that waits in a call."""

    number: int
    name: str
    at: SourceLine | None  # the innermost line of the user's program; None if there is none
    stack: list[str]  # all frames as "file:line function", innermost last
    wait: WaitState | None
    asleep: bool | None  # True if the kernel has it asleep; None if unknown
    holds: NotRequired[list[str]]  # the objects, such as locks, of the `with` statements around its lines
    # True for a daemon thread that runs no function of the program, as those of notebooks and debuggers: it may hold a
    # lock, but its wait is not one of the program.
    foreign: NotRequired[bool]
    awaits: NotRequired[list[int]]  # the threads that it joins, or for whose results in a pool it waits
    objects: NotRequired[dict[str, int]]  # the identities of objects that its functions may lock, as far as known


class PassOut(TypedDict):
    """A backward pass that this worker drives."""

    context: int
    number: int
    age: float
    owing: list[str]  # workers that have not finished their part


class ReferenceKind(TypedDict):
    """References of a worker that are alike."""

    kind: str  # the type of its own values; the owner of the values of others
    number: int
    age: float  # seconds, of the oldest; of values of others at least, as far as recorded
    line: str  # of the program, where they were created; "" if it was not recorded


class LogLine(TypedDict):
    """A warning or an error that the worker's process has logged."""

    number: int
    age: float
    level: str
    logger: str
    text: str


class WorkerState(TypedDict):
    worker: str
    rank: int
    group: str  # the same for all members and spares of the group, and for no other group
    pid: int
    host: str
    program: str  # the program that runs, for users
    clock: float  # `perf_counter` at that moment
    time: float  # wall-clock time in seconds
    phase: str
    phase_age: float
    idle: float  # seconds since this worker's last own call, backward pass or step ended, as far as recorded
    missing: list[str]  # workers it waits for while joining or leaving, by name, or "rank 2" if the name is unknown
    place: str  # address of the store
    size: int | None  # of the group; None: membership is dynamic
    generation: int
    members: dict[str, str]  # hosts of the known members, by name
    gone: dict[str, str]  # members that were lost or left early, and why
    threads: list[ThreadState]
    calls_out: list[CallOut]
    calls_in: list[CallIn]
    slots: int  # calls that may run at once
    busy: int
    passes: list[PassOut]
    contexts: int
    references: dict[str, int]  # the counts of debug_info()
    bytes_out: dict[str, int]  # of messages and tensors, by worker, since the start
    bytes_in: dict[str, int]
    calls_done: int  # calls served for other workers since the start
    memory: int  # resident bytes of the process
    shared: int  # bytes of shared memory that it has lent
    # Workers of earlier versions do not report these.
    processes: NotRequired[dict[str, int]]  # of its own host's members, also gone ones, by name, as far as known
    processor: NotRequired[float]  # seconds of processor time of the process
    devices: NotRequired[dict[str, int]]  # bytes that torch has allocated on each accelerator that it uses
    kinds: NotRequired[list[ReferenceKind]]  # the most numerous ones
    log: NotRequired[list[LogLine]]  # the latest lines


C = TypeVar("C", CallOut, CallIn)


def listed(calls: Iterable[C], kin: Callable[[C], object]) -> list[C]:
    """Return calls with a thread, and up to MOST_ALIKE of each other kind; the last one has the number of the rest."""
    # A worker may have thousands of similar calls in flight for which no thread waits. Threads are few, and
    # `telegrad why` needs each call that one of them waits for or runs.
    found: list[C] = []
    alike: dict[object, list[C]] = defaultdict(list)
    for call in calls:
        lot = alike[kin(call)]
        if call["thread"] is not None:
            found.append(call)
        elif len(lot) < MOST_ALIKE:
            found.append(call)
            lot.append(call)
        else:
            lot[-1]["more"] = lot[-1].get("more", 0) + 1
    return found


def counts(calls: Iterable[C], by: Callable[[C], str]) -> Counter[str]:
    """Return the number of calls per key, including those that are not listed."""
    found: Counter[str] = Counter()
    for call in calls:
        found[by(call)] += 1 + call.get("more", 0)
    return found


# Decoding


class Malformed(ValueError):
    """An answer that no worker sends."""


def decode(topic: str, data: bytes) -> Any:
    """Decode the answer to a question about `topic`; raise Malformed if the answer has another form."""
    # Without `parse_constant`, `json` would accept NaN and Infinity, which are not JSON. It raises RecursionError for
    # deeply nested lists.
    try:
        value = json.loads(data.decode(), parse_constant=_refuse)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not valid JSON: {safe(str(error))[:200]}") from None
    return checked(topic, value)


def checked(topic: str, value: Any) -> Any:
    """Check a parsed answer, or this worker's own; return it with sanitized texts; raise Malformed as `decode` does."""
    check: _Check = _CHECKS.get(topic, _none)  # a worker answers null to an unknown topic
    return check(value, topic)


def _refuse(name: str) -> None:
    raise Malformed(f"{name} is not a number")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{where} is not a string")
    return safe(value if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]}...")


def _integer(value: Any, where: str) -> int:
    # JSON has integers of any length, of which some could not be converted to a float later.
    if not isinstance(value, int) or abs(value) > LARGEST_NUMBER:
        raise Malformed(f"{where} is not an integer")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, float) and isfinite(value):
        return value
    return _integer(value, where)


def _truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise Malformed(f"{where} is neither true nor false")
    return value


def _none(value: Any, where: str) -> None:
    if value is not None:
        raise Malformed(f"{where} has an unexpected type")


def _list_of(check: _Check) -> _Check:
    def checked(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list) or len(value) > MOST_ITEMS:
            raise Malformed(f"{where} is not a list, or has more than {MOST_ITEMS} items")
        return [check(each, where) for each in value]

    return checked


def _dict_of(check: _Check) -> _Check:
    def checked(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MOST_ITEMS:
            raise Malformed(f"{where} is not a dictionary, or has more than {MOST_ITEMS} items")
        return {_text(key, where): check(each, where) for key, each in value.items()}

    return checked


def _optional(check: _Check) -> _Check:
    return lambda value, where: None if value is None else check(value, where)


def _fields(checks: dict[str, _Check], required: frozenset[str]) -> _Check:
    """Return a check of a TypedDict. It drops unknown fields, because newer versions send more."""

    def checked(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Malformed(f"{where} is not a dictionary")
        if missing := required - value.keys():
            raise Malformed(f"{where} has no {min(missing)}")
        return {name: check(value[name], f"{where}.{name}") for name, check in checks.items() if name in value}

    return checked


_PLAIN: dict[Any, _Check] = {str: _text, int: _integer, float: _number, bool: _truth}


def _check_for(kind: Any) -> _Check:
    """Return the check for one of the types above."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return _list_of(_check_for(inner[0]))
    if origin is dict:
        return _dict_of(_check_for(inner[1]))
    if origin in (Union, types.UnionType):
        return _optional(_check_for(inner[0]))  # of `X | None`
    if origin is NotRequired:
        return _check_for(inner[0])
    # Not `__required_keys__`: Python does not see `NotRequired` for it if annotations are strings, as in this file.
    fields = typing.get_type_hints(kind, include_extras=True)
    required = frozenset(name for name, each in fields.items() if typing.get_origin(each) is not NotRequired)
    return _fields({name: _check_for(each) for name, each in fields.items()}, required)


# Events


_SCALAR = _optional(lambda value, where: (_text if isinstance(value, str) else _number)(value, where))
_AFTER_TIMES: dict[str, tuple[_Check, ...]] = {  # the fields after the times, as in `_core/events.py`
    events.CALLED: (_text, _integer, _text, _integer, _text),
    events.RAN: (_text, _integer, _text, _text),
    events.CONNECTED: (_text, _text),
    events.LOST: (_text, _text),
    events.JOINED: (_text, _integer, _SCALAR),
    events.LEFT: (_text,),
    events.MADE: (_text, _SCALAR),
    events.FREED: (_SCALAR,),
    events.BACKWARD_PASS: (_SCALAR, _SCALAR, _text),
    events.BACKWARD_TASKS: (_SCALAR, _SCALAR, _SCALAR),
    events.STAGED: (_SCALAR, _text, _integer, _integer),
    events.STEPPED: (_SCALAR, _text),
    events.NOTED: (_text, _text),
}


def _events(value: Any, where: str) -> list[Event]:
    """Check events; drop unknown kinds."""
    if not isinstance(value, list) or len(value) > MOST_ITEMS:
        raise Malformed(f"{where} are not a list, or more than {MOST_ITEMS}")
    found = []
    for each in value:
        if not isinstance(each, list | tuple) or not each or not isinstance(each[0], str):
            raise Malformed(f"{where} have an item that is not an event")
        # A newer version may record further kinds, and append fields to known ones. Both are dropped.
        checks = _AFTER_TIMES.get(each[0])
        if checks is None:
            continue
        if len(each) < 3 + len(checks):
            raise Malformed(f"{where} have an event with too few fields")
        times = _number(each[1], where), _number(each[2], where)
        found.append((each[0], *times, *(check(part, where) for check, part in zip(checks, each[3:], strict=False))))
    return found


_account = _check_for(WorkerState)
_CHECKS: dict[str, _Check] = {
    ACCOUNT: _account,
    GROUP: _fields({"accounts": _list_of(_account), "silent": _dict_of(_text)}, frozenset(["accounts", "silent"])),
    EVENTS: _events,
    GROUP_EVENTS: _dict_of(_events),
    DUMP: _text,
    CALL: _text,
    FILE: _fields({"reason": _text, "account": _account, "events": _events}, frozenset(["account", "events"])),
}


# Figures: no I/O, since times are part of the states and points


KEPT_TIME = 600.0  # seconds that are kept
LATEST = 60.0  # seconds of which each look is kept
PART = 10.0  # seconds of a point before that
LONG_CALL = 10.0  # seconds after which an outgoing call is a sign of trouble
MOST_LATEST = 600  # points of the latest time: looks may be more frequent than those of the dashboard

# A time, calls served, calls failed, bytes sent and received (all per second), resident bytes, processors used.
TIME, CALLS, FAILED, BYTES, MEMORY, PROCESSOR = range(6)
Point = list[float]


class Rate(NamedTuple):
    """The rates of a worker, per second."""

    calls: float  # calls served for other workers
    sent: float  # bytes
    received: float
    processor: float | None = None  # processors in use; None: unknown

    @classmethod
    def between(cls, old: WorkerState, new: WorkerState, seconds: float) -> Rate:
        """Return the rates between two states of a process; those of a counter that started again are 0."""
        known = "processor" in new and "processor" in old
        return cls(
            max(0, new["calls_done"] - old["calls_done"]) / seconds,
            max(0, sum(new["bytes_out"].values()) - sum(old["bytes_out"].values())) / seconds,
            max(0, sum(new["bytes_in"].values()) - sum(old["bytes_in"].values())) / seconds,
            (new["processor"] - old["processor"]) / seconds if known else None,
        )


def trouble(account: WorkerState) -> float:
    """Return how urgent a worker is: 0 if it has no trouble, at most 1e11."""
    if account["missing"]:
        return 1e11  # it waits for others to join or leave
    if account["busy"] >= account["slots"] > 0:
        return 1e10
    oldest = oldest_call(account)
    return oldest if oldest >= LONG_CALL else 0.0


def oldest_call(account: WorkerState) -> float:
    """Return the age of the oldest outgoing call; 0 without calls."""
    return max((call["age"] for call in account["calls_out"]), default=0.0)


class Series:
    """Ten minutes of a worker's figures: each look of the last minute, and one point for each ten seconds before."""

    def __init__(self) -> None:
        self._latest: deque[Point] = deque(maxlen=MOST_LATEST)
        self._before: deque[Point] = deque(maxlen=int((KEPT_TIME - LATEST) / PART))

    def add(self, point: Point) -> None:
        """Add the newest point, and merge points that are older than LATEST."""
        self._latest.append(point)
        # Whole parts of the clock are merged at a time, so that the points of different workers have the same limits.
        # The mean is taken of rates; of memory the largest value, since a mean would hide a short peak.
        while (part := self._latest[0][TIME] // PART) < (point[TIME] - LATEST) // PART:
            merged: list[Point] = []
            while self._latest[0][TIME] // PART == part:
                merged.append(self._latest.popleft())
            means = [sum(values) / len(merged) for values in zip(*merged, strict=True)]
            means[TIME], means[MEMORY] = merged[-1][TIME], max(each[MEMORY] for each in merged)
            self._before.append(means)

    @property
    def newest(self) -> Point:
        return self._latest[-1]

    def after(self, time: float) -> list[Point]:
        """Return the points after a time. Merged points have the time of their last one, so none comes again."""
        since = max(time, self.newest[TIME] - KEPT_TIME)
        return [each for each in (*self._before, *self._latest) if each[TIME] > since]
