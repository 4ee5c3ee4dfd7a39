"""Benchmark of the event recorder of each worker."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.calls import nothing
from benchmarks.measuring import OTHER, TELEGRAD, Row, times
from benchmarks.targets import Absolute

ROUNDS = 10
CALLS = 1000  # per round, with and without the recorder


def record(on: bool) -> None:
    """Turn the recorder of this worker on or off."""
    from telegrad.reporting.dump import recorder  # here: rows are imported before a library is chosen

    (recorder.begin if on else recorder.end)()


def recorded_call(rpc: Any) -> float:
    """Return the time of an empty call that both ends record, relative to one without recording."""

    def call() -> None:
        rpc.rpc_sync(OTHER, nothing)

    ratios = []
    for _ in range(ROUNDS):
        with_it = statistics.median(times(CALLS, call))
        _on_both(rpc, False)
        without = statistics.median(times(CALLS, call))
        _on_both(rpc, True)
        ratios.append(with_it / without)
    return statistics.median(ratios)


def _on_both(rpc: Any, on: bool) -> None:
    rpc.rpc_sync(OTHER, record, (on,))
    record(on)


RECORDING = [
    Row(
        "empty rpc_sync, recorded, to not",
        "times",
        False,
        recorded_call,
        targets=(Absolute(1.03),),
        libraries=(TELEGRAD,),
    )
]
