"""Many workers on one host: `python -m benchmarks.scale [COUNT ...] [--kinds dynamic fixed torch]`.

The workers are forked from a process that has imported all, so what is measured is the start of the group. torch's RPC
is measured beside it, in a group of fixed size, as it has no other; from 48 workers on it fails on many machines.

    start       from the moment at which all begin until all have joined, and know all others
    first       one worker calls all for the first time, each over a connection of its own, and has all answers
    later       the same again: the median of five
    barrier     of all workers
    memory      PSS of a worker
    directory   processor time of the directory's process until all had joined
    detection   from the kill of a worker until another one's `on_lost` is called
    shutdown    until all processes have ended
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

COUNTS = (8, 64, 256, 512)
KINDS = ("dynamic", "fixed", "torch")
TIMEOUT = 120.0
ROW = "{:>9} {:>8} {:>9} {:>10} {:>10} {:>11} {:>10} {:>12} {:>12} {:>11}"
HEAD = ("workers", "kind", "start s", "first ms", "later ms", "barrier ms", "memory MB", "directory s", "detection s")


class Pipes:
    """Between the process that measures and its workers."""

    def __init__(self) -> None:
        self.begin, self.told, self.end = os.pipe(), os.pipe(), os.pipe()
        self._heard: list[dict[str, Any]] = []

    def tell(self, what: dict[str, Any]) -> None:
        os.write(self.told[1], json.dumps(what).encode().ljust(512))

    def hear(self, what: str) -> dict[str, Any]:
        """Return the next message that has this key, or tells of an error."""
        while True:
            for message in self._heard:
                if what in message or "error" in message:
                    self._heard.remove(message)
                    return message
            self._heard.append(json.loads(os.read(self.told[0], 512)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", type=int, nargs="*", default=COUNTS)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--threads", type=int, default=4, help="num_worker_threads")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # the children of a process whose operators have threads would hang
    import telegrad.rpc  # noqa: F401 - before the forks

    print(ROW.format(*HEAD, "shutdown s"))
    for count in chosen.counts:
        for kind in chosen.kinds:
            print(ROW.format(count, kind, *measure(count, kind, chosen.threads)), flush=True)


def measure(count: int, kind: str, threads: int) -> list[str]:
    """Run one group; return the cells of its row."""
    pipes, port = Pipes(), free_port()
    sys.stdout.flush()
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(int(TIMEOUT) + 30)
    pids = [fork(rank, count, kind, port, threads, pipes) for rank in range(count)]
    try:
        return measured(count, kind, pids, pipes)
    except TimeoutError:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        return [f"not within {TIMEOUT + 30:g} s", *[""] * 7]
    finally:
        signal.alarm(0)


def _too_late(*_: object) -> None:
    raise TimeoutError


def measured(count: int, kind: str, pids: list[int], pipes: Pipes) -> list[str]:
    time.sleep(0.5 + count / 200)  # until all wait
    began = time.perf_counter()
    os.write(pipes.begin[1], b"." * count)
    reports = [pipes.hear("joined") for _ in range(count)]
    start = time.perf_counter() - began
    failed = [report["error"] for report in reports if "error" in report]
    if failed:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return [f"{len(failed)} failed: {failed[0][:60]}", *[""] * 7]
    cells = pipes.hear("first")
    if kind != "torch":
        os.write(pipes.begin[1], b"." * count)
        cells["barrier"] = pipes.hear("barrier")["barrier"]
    memory = statistics.median(pss(pid) for pid in pids)
    detection = ""
    if kind != "torch":
        os.write(pipes.begin[1], b".")  # worker 0 waits for the loss of one
        pipes.hear("ready")
        killed = time.perf_counter()
        os.kill(pids[-1], signal.SIGKILL)
        pipes.hear("lost")
        detection = f"{time.perf_counter() - killed:.3f}"
    began = time.perf_counter()
    os.write(pipes.end[1], b"." * count)
    for pid in pids:
        os.waitpid(pid, 0)
    row = [
        f"{start:.2f}",
        *(f"{1e3 * cells[name]:.1f}" for name in ("first", "later")),
        said(cells.get("barrier", 0.0)),
    ]
    return [*row, f"{memory:.1f}", cells["directory"], detection, f"{time.perf_counter() - began:.2f}"]


def said(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds else ""


def fork(rank: int, count: int, kind: str, port: int, threads: int, pipes: Pipes) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        os.read(pipes.begin[0], 1)
        work = work_of_torch if kind == "torch" else work_of_telegrad
        work(rank, count, kind, port, threads, pipes)
    except BaseException as error:
        pipes.tell({"error": f"{type(error).__name__}: {error}"[:300]})
        signal.pause()
    os._exit(0)


def work_of_telegrad(rank: int, count: int, kind: str, port: int, threads: int, pipes: Pipes) -> None:
    from telegrad import rpc

    place = f"tcp://127.0.0.1:{port}"
    options = rpc.TelegradOptions(init_method=place, num_worker_threads=threads, rpc_timeout=TIMEOUT)
    if kind == "fixed":
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=count, rpc_backend_options=options)
    else:
        rpc.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options)
        rpc.wait_for_workers(count, timeout=TIMEOUT)
    server = cpu_of_server()
    pipes.tell({"joined": rank})
    if rank == 0:
        cells = calls(count, lambda name: rpc.rpc_async(name, abs, (-1,)))
        pipes.tell({**cells, "directory": server if kind == "dynamic" else ""})
    os.read(pipes.begin[0], 1)
    everyone = rpc.group([f"w{other}" for other in range(count)])
    everyone.barrier(timeout=TIMEOUT)
    began = time.perf_counter()
    everyone.barrier(timeout=TIMEOUT)
    if rank == 0:
        pipes.tell({"barrier": time.perf_counter() - began})
        os.read(pipes.begin[0], 1)
        lost = threading.Event()
        rpc.on_lost(lambda *_: lost.set())
        pipes.tell({"ready": True})
        lost.wait()
        pipes.tell({"lost": True})
    os.read(pipes.end[0], 1)
    rpc.shutdown(graceful=False)


def work_of_torch(rank: int, count: int, kind: str, port: int, threads: int, pipes: Pipes) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=threads, rpc_timeout=TIMEOUT
    )
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=count, rpc_backend_options=options)
    pipes.tell({"joined": rank})
    if rank == 0:
        cells = calls(count, lambda name: rpc.rpc_async(name, abs, args=(-1,)))
        pipes.tell({**cells, "directory": ""})
    os.read(pipes.end[0], 1)
    rpc.shutdown(graceful=False)


def calls(count: int, call: Callable[[str], Any]) -> dict[str, float]:
    """Call all, for the first time and then more."""
    taken = []
    for _ in range(6):
        began = time.perf_counter()
        futures = [call(f"w{rank}") for rank in range(count)]
        for future in futures:
            future.wait()
        taken.append(time.perf_counter() - began)
    return {"first": taken[0], "later": statistics.median(taken[1:])}


def cpu_of_server() -> str:
    """Return the processor time of the child of this process that serves the directory, in seconds."""
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and b"directory.server" in (path.parent / "cmdline").read_bytes():
                return f"{(int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK'):.2f}"
        except (OSError, ValueError):
            continue
    return ""


def pss(pid: int) -> float:
    """Return the memory of a process in MB, in which each shared page counts for its part."""
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]) / 1024


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp())
    main()
