"""Large groups on one host: `python -m benchmarks.scale [COUNT ...] [--kinds dynamic fixed torch] [--save]`.

The workers are forked from a process that has imported all modules, so imports are not measured. torch's RPC is
measured for comparison in a fixed-size group, its only kind; it fails on many machines with 48 or more workers.

    start       until all workers have joined and know all others
    first       first call from one worker to all workers, including the new connections
    later       later calls from one worker to all workers, the median of five rounds
    barrier     a barrier of all workers
    memory      PSS of a worker
    directory   processor time of the directory's process until all have joined, the requests that it served, and the
                bytes sent and received
    detection   from the kill of a worker until `on_lost` is called on another worker
    shutdown    until all processes have exited

`--save` writes the figures to benchmarks/results/scale.json, and draws docs/scale.png.
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
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from telegrad._core.stores.directory_client import EmbeddedDirectory

COUNTS = (8, 64, 256, 512)
KINDS = ("dynamic", "fixed", "torch")
TIMEOUT = 120.0
RESULTS = pathlib.Path(__file__).parent / "results" / "scale.json"
COLUMNS = (  # columns of a row: name, printed unit, and factor from seconds or bytes to that unit
    ("start", "s", 1.0),
    ("first", "ms", 1e3),
    ("later", "ms", 1e3),
    ("barrier", "ms", 1e3),
    ("memory", "MB", 1e-6),
    ("directory", "s", 1.0),
    ("requests", "", 1.0),
    ("bytes", "MB", 1e-6),
    ("detection", "s", 1.0),
    ("shutdown", "s", 1.0),
)
BYTES_ACKED = 120  # its offset in Linux's struct tcp_info; the bytes received follow it
Row = dict[str, Any]


class Pipes:
    """Pipes between the measuring process and its workers."""

    def __init__(self) -> None:
        self.begin, self.told, self.end = os.pipe(), os.pipe(), os.pipe()
        self._heard: list[dict[str, Any]] = []

    def tell(self, what: dict[str, Any]) -> None:
        os.write(self.told[1], json.dumps(what).encode().ljust(512))

    def hear(self, what: str) -> dict[str, Any]:
        """Return the next message with this key, or with an error."""
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
    parser.add_argument("--save", action="store_true", help="keep the figures and draw them")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # forked children of a process with operator threads would hang
    import telegrad.rpc  # noqa: F401 - before the forks

    rows = []
    print(f"{'workers':>8} {'kind':>8}", *(f"{f'{name} {unit}':>12}" for name, unit, _ in COLUMNS))
    for count in chosen.counts:
        for kind in chosen.kinds:
            row = measure(count, kind, chosen.threads)
            print(f"{count:>8} {kind:>8}", *cells(row), flush=True)
            rows.append({"workers": count, "kind": kind, **row})
    if chosen.save:
        from benchmarks.scale_plot import draw

        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        draw(rows)


def cells(row: Row) -> list[str]:
    if "error" in row:
        return [row["error"]]
    return [
        f"{row[name] * factor:>12.{0 if name == 'requests' else 3}f}" if name in row else " " * 12
        for name, _, factor in COLUMNS
    ]


def measure(count: int, kind: str, threads: int) -> Row:
    """Run one group. Return its figures in seconds and bytes, or an error."""
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
        return {"error": f"not within {TIMEOUT + 30:g} s"}
    finally:
        signal.alarm(0)


def _too_late(*_: object) -> None:
    raise TimeoutError


def measured(count: int, kind: str, pids: list[int], pipes: Pipes) -> Row:
    time.sleep(0.5 + count / 200)  # until all workers wait
    began = time.perf_counter()
    os.write(pipes.begin[1], b"." * count)
    reports = [pipes.hear("joined") for _ in range(count)]
    row: Row = {"start": time.perf_counter() - began}
    failed = [report["error"] for report in reports if "error" in report]
    if failed:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return {"error": f"{len(failed)} failed: {failed[0][:60]}"}
    if kind == "dynamic":
        row |= {name: sum(report[name] for report in reports) for name in ("requests", "bytes")}
    row |= pipes.hear("first")
    if kind != "torch":
        os.write(pipes.begin[1], b"." * count)
        row |= pipes.hear("barrier")
    row["memory"] = statistics.median(pss(pid) for pid in pids)
    if kind != "torch":
        os.write(pipes.begin[1], b".")  # worker 0 now waits for a lost worker
        pipes.hear("ready")
        killed = time.perf_counter()
        os.kill(pids[-1], signal.SIGKILL)
        pipes.hear("lost")
        row["detection"] = time.perf_counter() - killed
    began = time.perf_counter()
    os.write(pipes.end[1], b"." * count)
    for pid in pids:
        os.waitpid(pid, 0)
    return {**row, "shutdown": time.perf_counter() - began}


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

    asked = count_requests()
    place = f"tcp://127.0.0.1:{port}"
    options = rpc.TelegradOptions(init_method=place, num_worker_threads=threads, rpc_timeout=TIMEOUT)
    if kind == "fixed":
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=count, rpc_backend_options=options)
    else:
        rpc.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options)
        rpc.wait_for_workers(count, timeout=TIMEOUT)
    server = {"directory": cpu_of_server()} if rank == 0 and kind == "dynamic" else {}
    pipes.tell({"joined": rank, "requests": sum(asked.values()), "bytes": sum(map(bytes_of, asked))})
    if rank == 0:
        pipes.tell({**calls(count, lambda name: rpc.rpc_async(name, abs, (-1,))), **server})
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
        pipes.tell(calls(count, lambda name: rpc.rpc_async(name, abs, args=(-1,))))
    os.read(pipes.end[0], 1)
    rpc.shutdown(graceful=False)


def calls(count: int, call: Callable[[str], Any]) -> dict[str, float]:
    """Call all workers six times. Return the time of the first round, and the median of the others."""
    taken = []
    for _ in range(6):
        began = time.perf_counter()
        futures = [call(f"w{rank}") for rank in range(count)]
        for future in futures:
            future.wait()
        taken.append(time.perf_counter() - began)
    return {"first": taken[0], "later": statistics.median(taken[1:])}


def count_requests() -> Counter[EmbeddedDirectory]:
    """Count the directory requests of this process from now on."""
    asked, ask = Counter[EmbeddedDirectory](), EmbeddedDirectory._ask

    def counted(directory: EmbeddedDirectory, *arguments: Any, **named: Any) -> Any:
        asked[directory] += 1
        return ask(directory, *arguments, **named)

    EmbeddedDirectory._ask = counted  # type: ignore[assignment, method-assign]
    return asked


def bytes_of(directory: EmbeddedDirectory) -> int:
    """Return the number of bytes sent and received by the connections of a client."""
    total = 0
    for session in (*directory._sessions._idle[0], *directory._sessions._used):
        if session._sock is not None:
            info = session._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 16)
            total += sum(struct.unpack_from("<QQ", info, BYTES_ACKED))
    return total


def cpu_of_server() -> float:
    """Return the processor time of this process's child that serves the directory, in seconds."""
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and b"directory.server" in (path.parent / "cmdline").read_bytes():
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            continue
    return 0.0


def pss(pid: int) -> float:
    """Return the memory of a process in bytes (PSS). A shared page counts in proportion."""
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024.0 * int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp())
    main()
