"""Churn: workers join and leave continuously: `python -m benchmarks.churn [--rate 5] [--seconds 600] [--life 2]`.

The workers are forked from a process that has imported all modules. Each worker joins, calls the driver ten times a
second, serves its calls, and leaves after about `--life` seconds: every second worker by `shutdown()`, the others by
`shutdown(graceful=False)`. Prints the join times for each part of the run. At the end, prints how many calls succeeded
and how many failed because a worker had left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.scale import free_port

PARTS = 10  # of the run, one printed row each
GRACE = 20.0  # seconds for the last workers to leave


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=5.0, help="joins per second")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--life", type=float, default=2.0, help="seconds between joining and leaving, on average")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # forked children of a process with operator threads would hang
    import telegrad.rpc  # noqa: F401 - before the forks

    port = free_port()
    with tempfile.TemporaryDirectory() as folder, reports(folder) as (report, read):
        stop, stopped = os.pipe()
        driver = fork(lambda: drive(port, stop, report))
        while not any("driver" in each for each in read()):
            time.sleep(0.01)
        spawn(chosen.rate, chosen.seconds, partial(member, port, chosen.life, report))
        os.write(stopped, b".")
        os.waitpid(driver, 0)
        tell(read(), chosen.seconds)


@contextmanager
def reports(folder: str) -> Iterator[tuple[Callable[[dict[str, Any]], None], Callable[[], list[dict[str, Any]]]]]:
    """Yield a function that adds a report from any process, and a function that reads all reports."""
    path = os.path.join(folder, "reports")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def report(what: dict[str, Any]) -> None:
        os.write(descriptor, json.dumps(what).encode() + b"\n")

    def read() -> list[dict[str, Any]]:
        with open(path) as file:
            return [json.loads(line) for line in file]

    try:
        yield report, read
    finally:
        os.close(descriptor)


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def spawn(rate: float, seconds: float, work: Callable[[int], None]) -> None:
    """Start a worker every 1/rate seconds, and wait for all workers."""
    began, alive = time.monotonic(), set[int]()
    for number in range(int(rate * seconds)):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        alive.add(fork(partial(work, number)))
        alive -= ended(alive)
    give_up = time.monotonic() + GRACE
    while alive and time.monotonic() < give_up:
        time.sleep(0.05)
        alive -= ended(alive)
    for pid in alive:
        print(f"process {pid} has not left within {GRACE:g} s")
        os.kill(pid, 9)


def ended(pids: set[int]) -> set[int]:
    return {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}


def join(port: int, **me: Any) -> None:
    from telegrad import rpc

    options = rpc.TelegradOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=20)
    rpc.init_rpc(rpc_backend_options=options, **me)


def member(port: int, life: float, report: Callable[[dict[str, Any]], None], number: int) -> None:
    from telegrad import rpc

    random.seed(number)
    began = time.monotonic()
    try:
        join(port, role="actor")
    except Exception as error:
        report({"join failed": f"{type(error).__name__}: {error}"[:200]})
        return
    report({"joined": time.monotonic(), "took": time.monotonic() - began})
    outcomes = Counter[str]()
    end = time.monotonic() + life * random.uniform(0.5, 1.5)
    while time.monotonic() < end:
        call("driver", outcomes)
        time.sleep(0.1)
    began = time.monotonic()
    rpc.shutdown(graceful=bool(number % 2))
    report({"calls of workers": outcomes, "leave": time.monotonic() - began})


def call(name: str, outcomes: Counter[str]) -> None:
    from telegrad import rpc

    try:
        outcomes["answered" if rpc.rpc_sync(name, abs, (-1,)) == 1 else "wrong"] += 1
    except Exception as error:
        outcomes[type(error).__name__] += 1


def drive(port: int, stop: int, report: Callable[[dict[str, Any]], None]) -> None:
    """Call all current workers until the pipe `stop` is readable."""
    from telegrad import rpc

    join(port, name="driver", rank=0)
    report({"driver": True})
    os.set_blocking(stop, False)
    outcomes, most = Counter[str](), 0
    while not stopped(stop):
        names = [worker.name for worker in rpc.workers() if worker.name != "driver"]
        most = max(most, len(names))
        for name in names:
            call(name, outcomes)
        time.sleep(0.05)
    report({"calls of the driver": outcomes, "most at once": most, "left": [each.name for each in rpc.workers()]})
    rpc.shutdown(graceful=False)


def stopped(descriptor: int) -> bool:
    try:
        return bool(os.read(descriptor, 1))
    except BlockingIOError:
        return False


def tell(found: list[dict[str, Any]], seconds: float) -> None:
    joins = [each for each in found if "took" in each]
    first = min(each["joined"] for each in joins)
    for part in range(PARTS):
        begin, end = first + seconds * part / PARTS, first + seconds * (part + 1) / PARTS
        times = sorted(1e3 * each["took"] for each in joins if begin <= each["joined"] < end)
        if times:
            print(
                f"from {begin - first:4.0f} s: {len(times):4} joins, median {statistics.median(times):6.1f} ms, "
                f"99%: {times[len(times) * 99 // 100]:6.1f} ms"
            )
    outcomes = Counter[str]()
    for each in found:
        outcomes.update(each.get("calls of workers", {}))
    leaves = [1e3 * each["leave"] for each in found if "leave" in each]
    print(f"leaving: median {statistics.median(leaves):.1f} ms, at most {max(leaves):.1f} ms")
    print(f"calls of workers: {dict(outcomes)}")
    for each in found:
        if "join failed" in each or "calls of the driver" in each:
            print(each)


if __name__ == "__main__":
    os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp())
    main()
