"""The record of each worker while the network fails: one line of JSON for each event, in a file per worker.

All namespaces have one kernel, so `time.monotonic()` is one clock for all workers.
"""

import json
import pathlib
import threading
from typing import NamedTuple

# The acts of workers.
CALLED = "called"  # the worker called `other`; `outcome` is "" if it answered
SERVED = "served"  # the worker served a call of `other`
OWNED = "owned"  # the worker acted as the owner of the claim, with `token`; at `at` it checked that it holds the lease
WROTE = "wrote"  # the worker wrote the number `token` to its key by compare-and-set; `outcome` is one of those below
SAW = "saw"  # workers() returned `seen`
JOINED, LEFT, LOST = "on_join", "on_leave", "on_lost"  # a callback reported `other`
TOLD = "told"  # the worker learned that it was declared lost
RAN = "ran"  # the process had the processor: written each TICK

DONE, REFUSED, UNKNOWN = "done", "refused", "unknown"
TICK = 0.1  # seconds


class Event(NamedTuple):
    """An act of a worker."""

    at: float  # when it ended
    worker: str
    act: str
    began: float = 0.0
    other: str = ""
    token: int = 0
    outcome: str = ""
    seen: tuple[str, ...] = ()


class Fault(NamedTuple):
    """An injected fault."""

    begins: float
    ends: float
    evidence: int  # packets that were dropped, or processes that were stopped or killed
    cut: frozenset[tuple[str, str]] = frozenset()  # workers of which the first could send nothing to the second
    away: frozenset[str] = frozenset()  # workers that could not reach the directory


class Final(NamedTuple):
    """The content of the directory at the end."""

    at: float  # time of the request
    members: frozenset[str]
    numbers: dict[str, int]  # by worker, the last number that it wrote
    claim: int  # the token of the claim; 0 if it has no owner


class Recorder:
    """A writer that appends events to a file, for any thread."""

    def __init__(self, path: str, worker: str) -> None:
        self._worker = worker
        self._lock = threading.Lock()  # guards the file
        self._file = open(path, "a", buffering=1)  # noqa: SIM115

    def add(self, at: float, act: str, **fields: object) -> None:
        line = json.dumps({"at": at, "worker": self._worker, "act": act, **fields})
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()


def read(folder: pathlib.Path) -> list[Event]:
    """Return the events of all workers, in their order."""
    lines = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    return sorted(Event(**{**fields, "seen": tuple(fields.get("seen", ()))}) for fields in lines)
