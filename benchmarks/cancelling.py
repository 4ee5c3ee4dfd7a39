"""Benchmarks of cancellation: the time until the callee is notified."""

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

# At the callee, by the host's clock: start times and notification times.
begun: list[float] = []
heard: list[float] = []


async def unwanted() -> None:
    """Sleep until the call is cancelled."""
    begun.append(monotonic())
    try:
        await asyncio.sleep(PATIENCE)
    except asyncio.CancelledError:
        heard.append(monotonic())
        raise


def has_begun() -> None:
    """Wait until `unwanted` runs: a call that is cancelled before it begins never runs and gets no notification."""
    while not begun:
        sleep(1e-4)
    begun.clear()


def has_heard() -> float:
    while not heard:
        sleep(1e-4)
    return heard.pop()


def cancelled(rpc: Any, by_timeout: bool) -> float:
    """Return the median time in ms from `cancel`, or from the call's timeout, to the notification."""
    taken = []
    for _ in range(ROUNDS):
        start = monotonic()
        future = rpc.rpc_async(OTHER, unwanted, timeout=LIMIT if by_timeout else PATIENCE)
        future.heed()  # its result is never retrieved
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
