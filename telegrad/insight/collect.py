"""The trace of a group: what all workers have recorded, their clocks and, where wanted, torch's profiler on each."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from errno import ENOENT
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import profiler
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import record_function

from telegrad.errors import TelegradError, UsageError
from telegrad.ext.arguments import checks
from telegrad.ext.calls import profiling, user_name
from telegrad.ext.files import replacing
from telegrad.ext.processes import renewed
from telegrad.ext.workers import current
from telegrad.insight.export import chrome_trace, clock_offsets
from telegrad.insight.export.chrome_trace import WorkerTrace
from telegrad.insight.export.clock_offsets import ClockOffset, Exchange
from telegrad.insight.reading.source import Source
from telegrad.insight.seen_groups import own_group
from telegrad.rpc import rpc_async, rpc_sync, workers

EXCHANGES = 50  # with a worker of each other clock, whenever clocks are compared
PATIENCE = 10.0  # seconds that a worker has for an answer, and a minute for its profile
MARKS = 20  # in a profile, when it begins and when it ends

if TYPE_CHECKING:
    from typing import Self

Names = Iterable[str]


# Clocks


def clock_reading() -> tuple[float, str]:
    """Return what this worker's perf_counter shows, and which clock that is; for remote calls."""
    return perf_counter(), _which_clock()


def _which_clock() -> str:
    """Return the same text in all processes whose perf_counter reads the same clock.

    On Linux it is the kernel's, the same for all processes of a boot and of a time namespace. Else it may be the
    process's own.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        return f"{platform.node()}/{os.getpid()}"
    with contextlib.suppress(OSError):  # Linux has had namespaces of time since 5.6
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    return boot


class ClockComparison:
    """The clocks of all workers beside this one's. To look twice, far apart, tells of their drift."""

    def __init__(self) -> None:
        self.names = [worker.name for worker in workers()]
        self.times: dict[str, float] = {}  # by worker, what its clock showed at the latest look
        self._clocks: dict[str, str] = {}  # by worker
        self._exchanges: dict[str, list[Exchange]] = {}  # by clock

    def look(self) -> None:
        """Read all clocks, and ask one worker of each clock that is not this worker's repeatedly."""
        readings = _from_all(self.names, clock_reading)
        self.times = {name: time for name, (time, _) in readings.items()}
        self._clocks |= {name: clock for name, (_, clock) in readings.items()}
        compared = {_which_clock()}
        for name, (_, clock) in readings.items():
            if clock not in compared:
                with contextlib.suppress(TelegradError):
                    for _ in range(EXCHANGES):
                        sent = perf_counter()
                        there, _ = rpc_sync(name, clock_reading, timeout=PATIENCE)
                        exchange = Exchange(sent, there, there, perf_counter())
                        self._exchanges.setdefault(clock, []).append(exchange)
                    compared.add(clock)

    def offset(self, name: str) -> ClockOffset:
        """Return the offset of a worker's clock from this worker's."""
        clock = self._clocks.get(name)
        if clock in self._exchanges:
            return clock_offsets.estimate(self._exchanges[clock])
        if name == current.agent().name:
            return ClockOffset(0.0, 0.0, how=clock_offsets.REFERENCE)
        same = clock == _which_clock()
        return ClockOffset(0.0, 0.0, how=clock_offsets.SAME if same else clock_offsets.UNKNOWN)


def _from_all(names: Names, function: Callable[..., Any], patience: float = PATIENCE) -> dict[str, Any]:
    """Call a function on all workers; return the values of those that answer."""
    calls = {}
    for name in names:
        with contextlib.suppress(TelegradError):
            calls[name] = rpc_async(name, function, timeout=patience)
    values = {}
    for name, call in calls.items():
        with contextlib.suppress(TelegradError):
            values[name] = call.wait()
    return values


# Profiles


_lock = renewed(threading.Lock())  # guards _running: one profile at a time
_running: profiler.profile | None = None


def begin_profile() -> bool:
    """Have torch's profiler watch this worker, for remote calls; return False where a profiler runs already."""
    global _running
    with _lock:
        if _running is not None or profiling.enabled():
            return False
        # Of all threads, since calls run on any.
        running = profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
        running.start()
        _running = running
    _make_marks()
    return True


def end_profile() -> bytes:
    """Return what torch's profiler has seen, packed by gzip, or nothing where it did not run; for remote calls."""
    global _running
    _make_marks()
    with _lock:
        running, _running = _running, None
        if running is None:
            return b""
        running.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "profile.json")
        running.export_chrome_trace(path)
        with open(path, "rb") as file:
            return gzip.compress(file.read(), 1)


def _make_marks() -> None:
    for _ in range(MARKS):
        with record_function(clock_offsets.mark(perf_counter())):
            pass


OWN = frozenset(map(user_name, (clock_reading, begin_profile, end_profile)))  # calls that no trace shows


# Traces


class tracing:  # noqa: N801 - used like a function
    """`with tracing(path):` writes what all workers do meanwhile to a file for Perfetto (ui.perfetto.dev).

    As a text it tells what was written, and how exact the clocks are.

    Args:
        path: the file; one that ends with .gz is packed.
        profile: have torch's profiler run on all workers, too; what it sees stands in the file.

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> with telegrad.insight.tracing("calls.json.gz") as written:
        ...     total = rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
    """

    def __init__(self, path: str | os.PathLike[str], profile: bool = False) -> None:
        self._path = _place_for(path)
        checks.flag("profile", profile)
        self._profile = profile
        self._source = own_group()
        self._written = ""

    def __enter__(self) -> Self:
        self._comparison = ClockComparison()
        self._comparison.look()
        if self._profile:
            began = _from_all(self._comparison.names, begin_profile, 60)
            self._profiled = [name for name in began if began[name]]
        self._after = self._comparison.times
        return self

    def __exit__(self, *_: object) -> None:
        profiles = _from_all(self._profiled, end_profile, 60) if self._profile else {}
        self._written = _record(self._path, self._source, self._comparison, self._after, profiles)

    def __str__(self) -> str:
        return self._written or f"a trace that will be written to {self._path}"


def trace(path: str | os.PathLike[str], seconds: float | None = None, profile: bool = False) -> str:
    """Write what all workers have recorded lately to a file for Perfetto, or what they do in the next seconds.

    Args:
        path: the file; one that ends with .gz is packed.
        seconds: how long to watch; left out, what has been recorded until now is written.
        profile: have torch's profiler watch, too, which needs `seconds`.

    Returns:
        What was written, in words.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: `profile` without `seconds`, or less than none.

    Example:
        >>> told = telegrad.insight.trace("group.json")
    """
    checks.flag("profile", profile)
    if seconds is not None:
        checks.seconds("seconds", seconds, "0 for none")
    elif profile:
        raise UsageError("a profile needs a time: trace(path, seconds=5, profile=True), or `with tracing(path, ...)`")
    else:
        return _record(_place_for(path), own_group(), ClockComparison(), {}, {})
    with tracing(path, profile) as written:
        time.sleep(seconds)
    return str(written)


def trace_from_outside(path: str | os.PathLike[str], source: Source, seconds: float | None = None) -> str:
    """As `trace`, from a process in no group: clocks of other hosts are compared by the calls that were recorded."""
    path = _place_for(path)
    accounts, silent = source.look()
    after: dict[str, float] = {}
    if seconds is not None:
        checks.seconds("seconds", seconds, "0 for none")
        after = {account["worker"]: account["clock"] for account in accounts}
        time.sleep(seconds)
    events = source.events(after)
    hosts = {account["worker"]: account["host"] for account in accounts}
    names = list(dict.fromkeys([*hosts, *sorted(events)]))
    offsets = chrome_trace.clocks_of(events, names[0], hosts) if names else {}
    told = _write(path, {name: WorkerTrace(events.get(name, []), offsets[name]) for name in names})
    lost = {name: why for account in accounts for name, why in account["gone"].items()} | dict(silent)
    return told + "".join(f"\n  {name}: nothing; {why}" for name, why in sorted(lost.items()) if name not in names)


def _place_for(path: str | os.PathLike[str]) -> str:
    """Return a path whose folder exists, before the trace takes any time.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folder = os.path.dirname(os.path.abspath(checks.path("path", path)))
    if not os.path.isdir(folder):
        raise FileNotFoundError(ENOENT, "there is no such folder", folder)
    return os.fspath(path)


def _record(
    path: str, source: Source, comparison: ClockComparison, after: Mapping[str, float], profiles: Mapping[str, bytes]
) -> str:
    """Write what all workers have recorded since `after`, and return a summary."""
    events = source.events(after)  # before the exchanges, which are events as well
    comparison.look()
    opened = {name: json.loads(gzip.decompress(packed)) for name, packed in profiles.items() if packed}
    names = comparison.names
    return _write(path, {n: WorkerTrace(events.get(n, []), comparison.offset(n), opened.get(n)) for n in names})


def _write(path: str, workers: Mapping[str, WorkerTrace]) -> str:
    file = chrome_trace.merge(workers, OWN)
    data = json.dumps(file, separators=(",", ":")).encode()
    with replacing(path) as out:
        out.write(gzip.compress(data) if path.endswith(".gz") else data)
    return f"{path}: {chrome_trace.summary(file)}"
