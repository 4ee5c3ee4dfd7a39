"""A cause of waits that was found in a group."""

from __future__ import annotations

from typing import NamedTuple

NOTE = 10  # findings of this weight and below are no hangs

WEIGHTS = {
    "nobody": 100,  # no worker could be asked
    "silent": 95,  # a worker does not answer
    "deadlock": 90,
    "slot deadlock": 90,  # through the slots of a worker
    "lock deadlock": 88,  # through a lock, it seems
    "store": 85,  # nobody serves it
    "sizes": 85,  # of the group, which the workers do not agree on
    "missing": 80,  # workers have not come
    "gone": 75,  # a worker that others still wait for
    "unknown": 75,  # no worker of that name was ever there
    "generations": 70,  # of the group: the workers are of several
    "barrier": 65,  # a worker has not come to where all others wait
    "lock": 60,  # held by another thread, it seems
    "backward": 55,  # a pass waits for user code, or for a worker that is not at it
    "value": 55,  # of a reference: the call that makes it does not end
    "slots": 50,  # all taken by calls that run long
    "unfinished": 50,  # a call has returned a future or a coroutine that does not end
    "shutdown": 45,  # a worker does not call it
    "busy": 40,  # a call runs on and on
    "asleep": 40,  # a call stands still
    "underway": 40,  # a call has not arrived, or its answer has not
    "room": 35,  # for more calls in flight
    "turn": 35,  # of an actor, or to run at all
    "wait": 30,  # for something else
}


class Finding(NamedTuple):
    """One cause, and all that wait for it."""

    kind: str
    weight: int
    workers: list[str]  # where the cause is
    waiting: list[str]  # workers that wait for it
    age: float  # seconds, of the longest wait; 0 where it is not known
    title: str
    details: list[str]
    stacks: dict[str, list[str]]  # of the threads concerned, innermost last


def status(findings: list[Finding]) -> int:
    """Return the exit code: 0 where nothing waits for long, 1 where something does, 2 where workers do not answer."""
    if any(finding.kind in ("silent", "nobody") for finding in findings):
        return 2
    return int(any(finding.weight > NOTE for finding in findings))
