"""Benchmarks of the observation of calls: by the event recorder of each worker, and by OpenTelemetry."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.calls import nothing
from benchmarks.measuring import OTHER, TELEGRAD, Row, times
from benchmarks.targets import Absolute

ROUNDS = 10
CALLS = 1000  # per round, with and without observation


def record(on: bool) -> None:
    """Turn the recorder of this worker on or off."""
    from telegrad.reporting.process_state import recorder  # here: rows are imported before a library is chosen

    (recorder.begin if on else recorder.end)()


def trace(on: bool) -> None:
    """Turn spans and metrics of this worker on or off. The SDK in Python makes them; nothing exports them."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    from telegrad.insight import opentelemetry

    if on:
        opentelemetry.instrument(TracerProvider(), MeterProvider())
    else:
        opentelemetry.uninstrument()


def turn_both(rpc: Any, turn: Callable[[bool], None], on: bool) -> None:
    rpc.rpc_sync(OTHER, turn, (on,))
    turn(on)


def without_and_with(rpc: Any, turn: Callable[[bool], None]) -> Iterator[tuple[float, float]]:
    """Yield for each round the time of an empty call that nothing observes, and of one that both ends observe."""

    def median(on: bool) -> float:
        turn_both(rpc, turn, on)
        return statistics.median(times(CALLS, lambda: rpc.rpc_sync(OTHER, nothing)))

    for _ in range(ROUNDS):
        yield median(False), median(True)


def recorded_call(rpc: Any) -> float:
    """Return the time of an empty call that both ends record, as they do by default, relative to one without."""
    return statistics.median(with_it / without for without, with_it in without_and_with(rpc, record))


def traced_call(rpc: Any) -> float:
    """Return the µs that OpenTelemetry adds to an empty call, at both ends together."""
    try:
        return statistics.median(with_it - without for without, with_it in without_and_with(rpc, trace)) * 1e6
    finally:
        turn_both(rpc, trace, False)


RECORDING = [
    Row(
        "empty rpc_sync, recorded, to not",
        "times",
        False,
        recorded_call,
        targets=(Absolute(1.03),),
        libraries=(TELEGRAD,),
    ),
    Row(
        "empty rpc_sync, added by OpenTelemetry",
        "µs",
        False,
        traced_call,
        targets=(Absolute(60.0),),
        libraries=(TELEGRAD,),
    ),
]
