"""How soon a callee hears that a call is not wanted."""

from __future__ import annotations

import asyncio
import statistics
from functools import partial
from time import monotonic, sleep
from typing import Any

from benchmarks.measuring import OTHER, TELEGRAD, Row
from benchmarks.targets import Absolute

ROUNDS = 31
PATIENCE = 30.0
LIMIT = 0.05

# At the callee, by the clock of the host: when it began, and when it heard.
begun: list[float] = []
heard: list[float] = []


async def unwanted() -> None:
    """As long as it is wanted."""
    begun.append(monotonic())
    try:
        await asyncio.sleep(PATIENCE)
    except asyncio.CancelledError:
        heard.append(monotonic())
        raise


def has_begun() -> None:
    """Wait until it has: a call that has not never does once it is cancelled, and hears nothing."""
    while not begun:
        sleep(1e-4)
    begun.clear()


def has_heard() -> float:
    while not heard:
        sleep(1e-4)
    return heard.pop()


def cancelled(rpc: Any, by_timeout: bool) -> float:
    """The median of the time, in ms, from `cancel`, or from the moment in which the call is out of time."""
    taken = []
    for _ in range(ROUNDS):
        start = monotonic()
        future = rpc.rpc_async(OTHER, unwanted, timeout=LIMIT if by_timeout else PATIENCE)
        future.heed()  # nobody looks at it
        rpc.rpc_sync(OTHER, has_begun)
        if by_timeout:
            end = start + LIMIT
        else:
            end = monotonic()
            future.cancel()
        taken.append(rpc.rpc_sync(OTHER, has_heard) - end)
    return float(statistics.median(taken)) * 1e3


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
