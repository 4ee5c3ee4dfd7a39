"""Processes of this host: how they start, import and end, and their state as the kernel reports it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

# Before `-m`, which otherwise searches the current folder for modules first, where other users may have planted some.
SAFE_PATH = ["-P"]

_AT_PARENTS_END, _NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def signal_at_parents_end(number: int) -> None:
    """Make Linux send a signal to this process when the thread that started it has ended."""
    if _prctl is not None:
        _prctl(_AT_PARENTS_END, number)


def name_process(name: str) -> None:
    """Have `ps -o comm` and `top` show the first 15 bytes of a name for this process, on Linux."""
    if _prctl is not None:
        _prctl(_NAME, name.encode())


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_cores(workers: int) -> dict[str, str]:
    """Return thread-count variables for `workers` processes that share this host."""
    threads = max(1, processors() // max(1, workers))
    return {"OMP_NUM_THREADS": str(threads)}


def new_session_options() -> dict[str, Any]:
    """Return Popen arguments that keep Ctrl-C in a terminal or notebook from reaching the new process."""
    if os.name == "nt":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined]
    return {"start_new_session": True}


def describe_exit(code: int) -> str:
    """Return how a process has ended, as text for people."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder of telegrad


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Delay garbage collection to the end of the `with`."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            # The two calls move all objects to the oldest generation, so that the next collection does not traverse the
            # new ones. Not if the program has frozen objects itself: `unfreeze` would return those to the collector.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


STOPPED = "Tt"  # process states: stopped by a signal, or by a debugger


def state_of(pid: int) -> tuple[str, int] | None:
    """Return the state of a process and the CPU ticks that it has used, or None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the name of the program in parentheses. It may contain spaces and parentheses, so
            # split what follows the last one. The first field there is the state, the 12th and 13th are user and system
            # time.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[11]) + int(fields[12])


class Stops:
    """Detects a stopped process. Running for less than the time between two checks may go unnoticed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used = -1  # ticks, if it was stopped at the last check

    def look(self) -> bool:
        """Return True if the process is stopped and has not run since an earlier check that found it stopped."""
        # The ticks show whether a process that is stopped at two checks has run in between. If so, it is not counted as
        # stopped until the next check.
        found = state_of(self._pid) if self._pid else None
        before = self._used
        self._used = found[1] if found is not None and found[0] in STOPPED else -1
        return self._used >= 0 and before in (-1, self._used)


def stopped(pid: int) -> str:
    return f"its process is stopped (SIGSTOP, or a debugger); kill -CONT {pid} lets it continue"
