"""Child processes that answer over a pipe within a time limit and never outlive the benchmark.

A child may be stopped (SIGSTOP) while it waits for its turn, so only SIGKILL ends it reliably. The kernel also sends
SIGKILL when the benchmark itself is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

_PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """A child crashed, hung or raised. The text names the failure in one line."""


@functools.cache
def _warm() -> Any:
    """Return a fork server that has imported torch, which takes seconds, but neither library's RPC."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "benchmarks.rows"])
    return context


class Child:
    """A process that runs `target(pipe, *args)`. With `fresh`, it is a new interpreter instead of a fork.

    With `threads`, it is a new interpreter too, because OMP_NUM_THREADS only has an effect at the start of a process.
    """

    def __init__(
        self, target: Callable[..., None], *args: Any, fresh: bool = False, threads: int | None = None
    ) -> None:
        context = mp.get_context("spawn") if fresh or threads is not None else _warm()
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        # Not daemonic, because a peer's process has its own children. The creator of this object kills it.
        self._process = context.Process(target=_run, args=(target, theirs, args))
        with _thread_number(threads):
            self._process.start()
        assert self._process.pid is not None
        self._pid = self._process.pid
        theirs.close()

    def processor_time(self) -> float:
        """Return the processor time of the child in seconds (Linux only)."""
        return time.clock_gettime((~self._pid << 3) | 2)  # the clock id of clock_getcpuclockid(3)

    def tell(self, value: Any) -> None:
        with contextlib.suppress(OSError):  # `wait_answer` reports the death of the child
            self._pipe.send(value)

    def wait_answer(self, patience: float, beside: Sequence[Child] = ()) -> Any:
        """Return the child's answer.

        Raises:
            Failed: the child raised, died or did not answer in time, or a child of `beside` died.
        """
        ends = {child._process.sentinel: child for child in (self, *beside)}
        ready = wait([self._pipe, *ends], patience)
        if not ready:
            raise Failed(f"hung: no answer within {patience:g} s")
        if self._pipe not in ready and not self._pipe.poll():
            ended = next(ends[each] for each in ready if each in ends)
            if ended._pipe.poll():
                ended.wait_answer(patience)  # raises the error with which it has ended
            raise Failed(ended.cause_of_death())
        try:
            worked, value = self._pipe.recv()
        except (EOFError, OSError):
            raise Failed(self.cause_of_death()) from None
        if not worked:
            print(value, file=sys.stderr)
            raise Failed(value.strip().splitlines()[-1])
        return value

    def cause_of_death(self) -> str:
        self._process.join(1)
        code = self._process.exitcode
        return f"crashed: {signal.Signals(-code).name}" if code and code < 0 else f"ended with status {code}"

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def join(self, patience: float) -> None:
        self._process.join(patience)

    def kill_group(self) -> None:
        """Kill the child and, if it leads a process group, that whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self.kill()

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()

    @property
    def ended(self) -> bool:
        return not self._process.is_alive()


@contextlib.contextmanager
def _thread_number(threads: int | None) -> Iterator[None]:
    """Set OMP_NUM_THREADS for processes that start in this block, as `torchrun` does."""
    if threads is None:
        yield
        return
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextlib.contextmanager
def children_killed() -> Iterator[list[Child]]:
    """Yield a list of children, and kill all of them at the end."""
    children: list[Child] = []
    try:
        yield children
    finally:
        for child in children:
            child.kill()


def _run(target: Callable[..., None], pipe: Connection, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all foreground processes; the parent kills this one
    _die_with_the_benchmark()
    warnings.showwarning = lambda *_, **__: None  # a filter does not suffice: torch shows some always
    target(pipe, *args)


def _die_with_the_benchmark() -> None:
    """End this process with the benchmark, however the benchmark ends.

    The fork server exits when no process holds its pipe any more. The kernel then kills this child.
    """
    with contextlib.suppress(AttributeError, TypeError, OSError):
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def answer_all(pipe: Connection, run: Callable[[Any], Any]) -> None:
    """Answer each request with `run(request)`, until the request is None or the pipe is closed."""
    with contextlib.suppress(EOFError, OSError):
        while (asked := pipe.recv()) is not None:
            try:
                answer = True, run(asked)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send(answer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
