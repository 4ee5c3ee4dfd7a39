"""Child processes that answer over a pipe within a time, and that never outlive the benchmark.

A child may be stopped (SIGSTOP) while it waits for its turn, so only SIGKILL ends it for sure; the kernel sends that,
too, when the benchmark itself is killed.
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
    """What was asked of a child crashed, hung or raised; the text says which, in a line."""


@functools.cache
def _warm() -> Any:
    """Children are forked from a parent that has imported torch, which takes seconds, and neither library's worker."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "benchmarks.rows"])
    return context


class Child:
    """A process that runs `target(pipe, *args)`; `fresh`: in an interpreter of its own, not forked.

    With `threads` it is one, too: only what the environment says at its start holds for all of its threads.
    """

    def __init__(
        self, target: Callable[..., None], *args: Any, fresh: bool = False, threads: int | None = None
    ) -> None:
        context = mp.get_context("spawn") if fresh or threads is not None else _warm()
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        # Not daemonic, since a peer's process has children of its own; whoever makes one kills it.
        self._process = context.Process(target=_run, args=(target, theirs, args))
        with _thread_number(threads):
            self._process.start()
        assert self._process.pid is not None
        self._pid = self._process.pid
        theirs.close()

    def processor_time(self) -> float:
        """Return the seconds that its threads have run; on Linux."""
        return time.clock_gettime((~self._pid << 3) | 2)  # the clock that clock_getcpuclockid(3) names

    def tell(self, value: Any) -> None:
        with contextlib.suppress(OSError):  # that it died shows when its answer is awaited
            self._pipe.send(value)

    def wait_answer(self, patience: float, beside: Sequence[Child] = ()) -> Any:
        """What the child answered, while all `beside` live.

        Raises:
            Failed: it raised, died or did not answer in time, or another one died.
        """
        ends = {child._process.sentinel: child for child in (self, *beside)}
        ready = wait([self._pipe, *ends], patience)
        if not ready:
            raise Failed(f"hung: no answer within {patience:g} s")
        if self._pipe not in ready and not self._pipe.poll():
            raise Failed(next(ends[each].cause_of_death() for each in ready if each in ends))
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
        """Kill it, and all that it started, where it leads a process group."""
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
    """As `torchrun` sets it for the processes that it starts."""
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
    """A list for children, all of which are killed in the end."""
    children: list[Child] = []
    try:
        yield children
    finally:
        for child in children:
            child.kill()


def _run(target: Callable[..., None], pipe: Connection, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground; the benchmark tidies up
    _die_with_the_benchmark()
    warnings.simplefilter("ignore")
    target(pipe, *args)


def _die_with_the_benchmark() -> None:
    """However that ends: the fork server goes when nobody holds its pipe any more, and the kernel then kills this."""
    with contextlib.suppress(AttributeError, TypeError, OSError):
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def answer_all(pipe: Connection, run: Callable[[Any], Any]) -> None:
    """Answer with `run` of each thing that comes, until None does or nobody is left to ask."""
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
