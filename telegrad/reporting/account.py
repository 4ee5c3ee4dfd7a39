"""What a worker can tell of itself at one moment: plain values, which travel as JSON and are read without torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TypedDict, TypeVar

JOINING, MEMBER, LEAVING = "joining", "member", "leaving"  # phases of a worker's life in its group
RUNNING, QUEUED, GOING_ON = "running", "queued", "going on"  # states of a call that has come; the last: it has returned
# a future or a coroutine, whose end is awaited
MOST_ALIKE = 256  # calls that are listed of those that are alike


class Line(TypedDict):
    """A line of a program that a thread stands at."""

    file: str
    line: int
    function: str
    text: str  # the line itself, where it can be read


class _Alike(TypedDict, total=False):
    more: int  # how many there are like this one, younger, that are not listed


class CallOut(_Alike):
    """A call of this worker that was not answered yet."""

    to: str
    number: int  # with the caller's name it says at the callee which call this is
    function: str
    age: float  # seconds
    timeout: float  # 0: none
    thread: int | None  # which waits for it; None where nobody does in place


class CallIn(_Alike):
    """A call of another worker that has come, and was not answered yet."""

    caller: str
    number: int
    function: str  # may be empty where it was not opened yet
    age: float  # seconds since it began to run; 0 where it waits
    state: str
    thread: int | None  # which runs it


MEETINGS = ("barrier", "all_reduce", "process_group")  # functions that all workers of a group call, and wait in


class _Dated(TypedDict, total=False):
    age: float  # seconds, where it is known


class Wait(_Dated):
    """A wait of this package that a thread is in, but for calls, which are told of above."""

    what: str  # "shutdown", "serve", "backward", "future", "value", "init_rpc", "room", or what the user has called
    on: list[str]  # workers, by name; or "rank 2"
    about: str  # the rest, for people


class Thread(TypedDict):
    """A thread, unless it is one of this package's that has nothing to do."""

    number: int
    name: str
    at: Line | None  # the innermost line of the user's program, None where there is none
    stack: list[str]  # innermost last, of all code: file:line function
    wait: Wait | None
    asleep: bool | None  # whether the kernel has it asleep, where that is known


class PassOut(TypedDict):
    """A backward pass that this worker drives."""

    context: int
    number: int
    age: float
    owing: list[str]  # workers that have something to do for it


class Account(TypedDict):
    """What a worker tells of itself."""

    worker: str
    rank: int
    group: str  # the same for all of its members, and for no other group
    pid: int
    host: str
    program: str  # what runs, for people
    clock: float  # `perf_counter` at that moment
    time: float  # of day, in seconds
    phase: str
    phase_age: float
    idle: float  # seconds since it has called another worker, or ended a backward pass or a step, as far as it recalls
    missing: list[str]  # joining or leaving: who is waited for, by name, or "rank 2" where no name is known
    place: str  # of the store
    size: int | None  # of the group; None: workers come and go
    generation: int
    members: dict[str, str]  # all that it knows, by name, and their hosts
    gone: dict[str, str]  # of the group, who has died or left early, and why
    threads: list[Thread]
    calls_out: list[CallOut]
    calls_in: list[CallIn]
    slots: int  # calls that may run at once
    busy: int
    passes: list[PassOut]
    contexts: int
    references: dict[str, int]  # as debug_info() has them
    bytes_out: dict[str, int]  # of messages and tensors, by worker, since the start
    bytes_in: dict[str, int]
    calls_done: int  # of other workers, since the start
    memory: int  # resident bytes of the process
    shared: int  # bytes of shared memory that it has lent


C = TypeVar("C", CallOut, CallIn)


def listed(calls: Iterable[C], kin: Callable[[C], object]) -> list[C]:
    """Those that a thread waits for or runs, and some of each kin of the others; the last tells how many more."""
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
    """How many there are, with those that are not listed."""
    found: Counter[str] = Counter()
    for call in calls:
        found[by(call)] += 1 + call.get("more", 0)
    return found
