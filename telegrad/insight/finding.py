"""A finding: one cause of waits in a group."""

from __future__ import annotations

from typing import NamedTuple

NOTE = 10  # findings of this weight and below are not hangs

WEIGHTS = {
    "nobody": 100,  # no worker could be asked
    "silent": 95,  # a worker does not answer
    "deadlock": 90,
    "slot deadlock": 90,  # through the slots of a worker
    "lock deadlock": 88,  # through a lock, it seems
    "store": 85,  # no store is served
    "sizes": 85,  # the workers disagree about the group's size
    "missing": 80,  # workers have not joined
    "gone": 75,  # a lost worker that others still wait for
    "unknown": 75,  # no worker of that name ever joined
    "generations": 70,  # the workers belong to several generations of the group
    "barrier": 65,  # a worker has not come to a line where all others wait
    "lock": 60,  # held by another thread, it seems
    "backward": 55,  # a pass waits for user code, or for a worker without a thread in it
    "value": 55,  # of a reference: the call that makes it does not end
    "slots": 50,  # all taken by long calls
    "unfinished": 50,  # a call returned a future or a coroutine that does not end
    "shutdown": 45,  # a worker does not call shutdown
    "busy": 40,  # a call runs for long
    "asleep": 40,  # a call makes no progress
    "underway": 40,  # a call, or its response, has not arrived
    "room": 35,  # the limit of calls in flight is reached
    "turn": 35,  # a call waits for its actor, or to start
    "wait": 30,  # for something else
}


class Finding(NamedTuple):
    """One cause, and all nodes that wait for it."""

    kind: str
    weight: int
    workers: list[str]  # workers that have the cause
    waiting: list[str]  # workers that wait for it
    age: float  # seconds of the longest wait; 0 if unknown
    title: str
    details: list[str]
    stacks: dict[str, list[str]]  # of the threads concerned, innermost last


def status(findings: list[Finding]) -> int:
    """Return the exit code: 0 if nothing waits for long, 1 if something does, 2 if workers do not answer."""
    if any(finding.kind in ("silent", "nobody") for finding in findings):
        return 2
    return int(any(finding.weight > NOTE for finding in findings))
