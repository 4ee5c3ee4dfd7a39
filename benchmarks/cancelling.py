"""How soon a callee hears that a call is not wanted."""

from __future__ import annotations

import asyncio
import statistics
from functools import partial
from time import monotonic, sleep
from typing import Any

from benchmarks.calls import nothing
from benchmarks.measuring import OTHER, TELEGRAD, Row
from benchmarks.targets import Absolute

ROUNDS = 31
PATIENCE = 30.0

heard: list[float] = []  # at the callee: when, by the clock of the host


async def unwanted() -> None:
    """As long as it is wanted."""
    try:
        await asyncio.sleep(PATIENCE)
    except asyncio.CancelledError:
        heard.append(monotonic())
        raise


def last_heard(count: int) -> float:
    """When the last of so many calls was cancelled."""
    while len(heard) < count:
        sleep(1e-4)
    return heard[-1]


def cancelled(rpc: Any, by_timeout: bool) -> float:
    """The median of the time, in ms, from `cancel`, or from the moment in which the call is out of time."""
    taken = []
    start = rpc.rpc_sync(OTHER, heard_so_far)
    for count in range(1, ROUNDS + 1):
        begun = monotonic()
        future = rpc.rpc_async(OTHER, unwanted, timeout=0.02 if by_timeout else PATIENCE)
        future.heed()  # nobody looks at it
        rpc.rpc_sync(OTHER, nothing)
        if by_timeout:
            end = begun + 0.02
        else:
            end = monotonic()
            future.cancel()
        taken.append(rpc.rpc_sync(OTHER, last_heard, (start + count,)) - end)
    return float(statistics.median(taken)) * 1e3


def heard_so_far() -> int:
    return len(heard)


CANCELLING = [
    Row(
        name,
        "ms",
        False,
        partial(cancelled, by_timeout=by_timeout),
        ("host", "tcp"),
        targets=(Absolute(10),),
        libraries=(TELEGRAD,),
    )
    for name, by_timeout in (("cancel, until the callee knows", False), ("timeout, until the callee knows", True))
]
