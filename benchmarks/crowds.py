"""Benchmarks of many workers that call at once, and of one worker that calls many."""

from __future__ import annotations

import importlib
import statistics
from functools import partial
from itertools import cycle, islice
from time import perf_counter, sleep, thread_time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.calls import calls_per_second, nothing, take
from benchmarks.measuring import MB, OTHER, TELEGRAD, Row, times
from benchmarks.targets import Absolute, OfPeer, OfRow

if TYPE_CHECKING:
    from telegrad._core.calls.futures import Future

SIZES = (2, 8, 32)
WINDOW = 31  # calls in flight per worker in every group: one to each other worker of the largest group

# Functions of the other workers


def call_one(library: str, callee: str, window: int, total: int) -> None:
    calls_per_second(importlib.import_module(library), window, total, callee)


def call_others(library: str, size: int, total: int) -> None:
    """Call the other workers in turn."""
    rpc = importlib.import_module(library)
    me = rpc.get_worker_info().name
    others = cycle(name for name in (f"worker{rank}" for rank in range(size)) if name != me)
    for _ in range(total // WINDOW):
        torch.futures.wait_all([rpc.rpc_async(other, nothing) for other in islice(others, WINDOW)])


# Rows


def callers_per_second(rpc: Any, callers: int, total: int = 5000) -> float:
    """Return the calls per second of workers 0 to `callers` - 1, which all call worker `callers`."""
    arguments = (rpc.__name__, f"worker{callers}", 1000, total)
    start = perf_counter()
    others = [rpc.rpc_async(f"worker{rank}", call_one, arguments) for rank in range(1, callers)]
    call_one(*arguments)
    torch.futures.wait_all(others)
    return callers * total / (perf_counter() - start)


def all_to_all(rpc: Any, size: int, calls: int = 32 * WINDOW * 8) -> float:
    """Return the µs per call while all workers call each other."""

    def round_of(total: int) -> None:
        arguments = (rpc.__name__, size, total)
        others = [rpc.rpc_async(f"worker{rank}", call_others, arguments) for rank in range(1, size)]
        call_others(*arguments)
        torch.futures.wait_all(others)

    round_of(WINDOW)  # opens all connections
    each = calls // size
    start = perf_counter()
    round_of(each)
    return (perf_counter() - start) / (each * size) * 1e6


def _call_each(names: list[str], function: Any, *args: Any) -> list[Future[Any]]:
    from telegrad._core.agent.call_each import EachCall
    from telegrad._core.agent.pending_call import PreparedCall
    from telegrad._core.calls.futures import Future
    from telegrad._core.worker import current

    futures: list[Future[Any]] = [Future() for _ in names]
    current.agent().call_each(list(map(EachCall, futures, names)), PreparedCall(function, args))
    return futures


def fanout_in_writes(rpc: Any, size: int, rounds: int = 200) -> float:
    """Return the processor time to send an empty call to many workers, relative to plain writes of a frame to each."""
    from telegrad._core.transport.link import Link
    from telegrad._core.wire.messages import RELEASE, Message, encode, pack_numbers
    from telegrad._core.worker import current

    names = [f"worker{rank}" for rank in range(1, size + 1)]
    frame = encode(Message(RELEASE, body=pack_numbers([1])))  # for a block that was never lent: callees ignore it

    def write() -> list[Future[Any]]:
        for name in names:
            link = current.agent()._connections.peer(name).link
            assert isinstance(link, Link)
            link._sock.send(frame)
        return []

    spent: dict[str, list[float]] = {"calls": [], "writes": []}
    for future in _call_each(names, nothing):
        future.wait()
    for _ in range(rounds):
        for what, begin in (("calls", partial(_call_each, names, nothing)), ("writes", write)):
            start = thread_time()
            begun = begin()
            spent[what].append(thread_time() - start)
            for future in begun:
                future.wait()
            sleep(2e-3)  # until all workers wait again
    return statistics.median(spent["calls"]) / statistics.median(spent["writes"])


def fanout_of_memory(rpc: Any, size: int, bytes_: int) -> float:
    """Return the time to send a large argument to `size` workers of this host, relative to one worker."""
    tensor = torch.ones(bytes_ // 4)

    def round_of(names: list[str]) -> None:
        for future in _call_each(names, take, tensor):
            future.wait()

    all_, one = [f"worker{rank}" for rank in range(1, size + 1)], [OTHER]
    to_all, to_one = (statistics.median(times(20, partial(round_of, names))) for names in (all_, one))
    return to_all / to_one


def _name(size: int) -> str:
    return f"all to all, {size} workers, per call"


CROWDS = [
    Row(
        "rpc_async, 4 callers of one",
        "calls/s",
        True,
        partial(callers_per_second, callers=4),
        workers=5,
        targets=(OfPeer(4),),
    ),
    *(
        Row(
            _name(size),
            "µs",
            False,
            partial(all_to_all, size=size),
            workers=size,
            patience=90,  # torch's RPC takes half a minute to connect the largest group
            targets=() if size == SIZES[0] else (OfRow(1.5, _name(SIZES[0])),),
        )
        for size in SIZES
    ),
    Row(
        "empty call to 32 workers, sending",
        "writes",
        False,
        partial(fanout_in_writes, size=32),
        workers=33,
        targets=(Absolute(2),),
        libraries=(TELEGRAD,),
    ),
    Row(
        "64 MB argument to 4 workers",
        "of one",
        False,
        partial(fanout_of_memory, size=4, bytes_=64 * MB),
        workers=5,
        targets=(Absolute(1.3),),
        libraries=(TELEGRAD,),
    ),
]
