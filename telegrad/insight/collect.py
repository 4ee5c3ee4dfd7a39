"""Collect the trace of a group: the recorded events of all workers, their clock offsets and optional torch profiles."""

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
from typing import Any, Self

from torch import profiler
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import record_function

from telegrad.errors import TelegradError, UsageError
from telegrad.ext.calls import known_as, profiling, user_name
from telegrad.ext.feedback import checks
from telegrad.ext.host import renewed, replacing
from telegrad.ext.workers import current
from telegrad.insight import chrome_trace
from telegrad.insight.chrome_trace import ClockOffset, Exchange, WorkerTrace
from telegrad.insight.history import Source
from telegrad.insight.seen_groups import group
from telegrad.reporting import SPARE
from telegrad.rpc import rpc_async, rpc_sync, workers

EXCHANGES = 50  # with one worker of each other clock, in each comparison
PATIENCE = 10.0  # seconds for a worker's answer; profiles have 60
MARKS = 20  # markers at each end of a profile, which relate the profiler's clock to perf_counter


# Clocks


@known_as("telegrad.insight.trace")
def clock_reading() -> tuple[float, str]:
    """Return this worker's perf_counter, and the id of its clock. Called remotely."""
    return perf_counter(), _which_clock()


def _which_clock() -> str:
    """Return an id of the clock that perf_counter reads, equal in all processes that share it: on Linux those of a boot
    and a time namespace. On other systems each process may have its own clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        return f"{platform.node()}/{os.getpid()}"
    with contextlib.suppress(OSError):  # Linux has time namespaces since 5.6
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    return boot


class ClockComparison:
    """Compares the clocks of all workers with this one's. Two looks, far apart, also give the drift."""

    def __init__(self) -> None:
        self.names = [worker.name for worker in workers()]
        self.times: dict[str, float] = {}  # the latest readings, by worker
        self._clocks: dict[str, str] = {}  # by worker
        self._exchanges: dict[str, list[Exchange]] = {}  # by clock

    def look(self) -> None:
        """Read all clocks, and repeatedly exchange times with one worker of each other clock."""
        # All workers whose clocks have the same id need one comparison. If the worker that is asked fails, the next one
        # with that clock is asked.
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
        """Return the offset of a worker's clock relative to this worker's."""
        clock = self._clocks.get(name)
        if clock in self._exchanges:
            return chrome_trace.estimate(self._exchanges[clock])
        if name == current.agent().name:
            return ClockOffset(0.0, 0.0, how=chrome_trace.REFERENCE)
        return ClockOffset(0.0, 0.0, how=chrome_trace.SAME if clock == _which_clock() else chrome_trace.UNKNOWN)


def _from_all(names: Iterable[str], function: Callable[..., Any], patience: float = PATIENCE) -> dict[str, Any]:
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


_lock = renewed(threading.Lock())  # guards _running
_running: list[profiler.profile] = []  # at most one


@known_as("telegrad.insight.trace")
def begin_profile() -> bool:
    """Start torch's profiler on this worker; return False if a profiler runs already. Called remotely."""
    # The profiler is one of the process. The lock is held while it starts, which takes about a second the first time: a
    # second trace at the same time must find it running.
    with _lock:
        if _running or profiling.enabled():
            return False
        # By default torch's profiler does not record all threads. Calls run on any thread of the agent.
        running = profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
        running.start()
        _running.append(running)
    _make_marks()
    return True


@known_as("telegrad.insight.trace")
def end_profile() -> bytes:
    """Return the profile of torch's profiler, compressed by gzip; empty if it did not run. Called remotely."""
    _make_marks()
    with _lock:
        if not _running:
            return b""
        running = _running.pop()
        running.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "profile.json")
        running.export_chrome_trace(path)
        with open(path, "rb") as file:
            return gzip.compress(file.read(), 1)


def _make_marks() -> None:
    # torch's profiler has a clock of its own. The name of a mark has the time of `perf_counter` right before the region
    # begins, so each two consecutive marks are an exchange (`offset_of_profile`). Of several, the one with the least
    # uncertainty counts: a thread may lose the processor between the two readings.
    for _ in range(MARKS):
        with record_function(chrome_trace.mark(perf_counter())):
            pass


OWN = frozenset(map(user_name, (clock_reading, begin_profile, end_profile)))  # calls to omit from traces


# Traces


class tracing:  # noqa: N801 - used like a function
    """`with tracing(path):` records all workers during the block, in a file for Perfetto (ui.perfetto.dev).

    After the block, `str()` of the object summarizes the file and the accuracy of the clocks.

    Args:
        path: the file; it is compressed if its name ends with .gz.
        profile: also run torch's profiler on all workers, and include its events.

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
        self._source = group()
        self._written = ""

    def __enter__(self) -> Self:
        self._comparison = ClockComparison()
        self._comparison.look()
        if self._profile:
            began = _from_all(self._comparison.names, begin_profile, 60)
            # Only these are ended later: a profiler that was running already belongs to the program, or to another
            # trace.
            self._profiled = [name for name in began if began[name]]
        self._after = self._comparison.times
        return self

    def __exit__(self, *_: object) -> None:
        profiles = _from_all(self._profiled, end_profile, 60) if self._profile else {}
        self._written = _record(self._path, self._source, self._comparison, self._after, profiles)

    def __str__(self) -> str:
        return self._written or f"a trace that will be written to {self._path}"


def trace(path: str | os.PathLike[str], seconds: float | None = None, profile: bool = False) -> str:
    """Write a trace for Perfetto: the latest events of all workers, or their events in the next seconds.

    Args:
        path: the file; it is compressed if its name ends with .gz.
        seconds: how long to record; if not given, the events recorded so far are written.
        profile: also run torch's profiler, which needs `seconds`.

    Returns:
        A summary of the file.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: `profile` without `seconds`, or negative `seconds`.

    Example:
        >>> told = telegrad.insight.trace("group.json")
    """
    checks.flag("profile", profile)
    if seconds is not None:
        checks.seconds("seconds", seconds, "0 for none")
    elif profile:
        raise UsageError("a profile needs a time: trace(path, seconds=5, profile=True), or `with tracing(path, ...)`")
    else:
        return _record(_place_for(path), group(), ClockComparison(), {}, {})
    with tracing(path, profile) as written:
        time.sleep(seconds)
    return str(written)


def trace_from_outside(path: str | os.PathLike[str], source: Source, seconds: float | None = None) -> str:
    """Do the same as `trace`, from a process in no group. Clocks of other hosts are compared by the recorded calls."""
    path = _place_for(path)
    accounts, silent = source.look()
    after: dict[str, float] = {}
    if seconds is not None:
        checks.seconds("seconds", seconds, "0 for none")
        after = {account["worker"]: account["clock"] for account in accounts}
        time.sleep(seconds)
    events = source.events(after)
    hosts = {account["worker"]: account["host"] for account in accounts if account["phase"] != SPARE}
    names = list(dict.fromkeys([*hosts, *sorted(events)]))
    offsets = chrome_trace.clocks_of(events, names[0], hosts) if names else {}
    told = _write(path, {name: WorkerTrace(events.get(name, []), offsets[name]) for name in names})
    others = {name: why for account in accounts for name, why in account["gone"].items()} | dict(silent)
    others |= {each["worker"]: "it is a spare, in no generation" for each in accounts if each["phase"] == SPARE}
    return told + "".join(f"\n  {name}: no events; {why}" for name, why in sorted(others.items()) if name not in names)


def _place_for(path: str | os.PathLike[str]) -> str:
    """Return the path as text; raise FileNotFoundError before the trace takes time if its folder does not exist."""
    folder = os.path.dirname(os.path.abspath(checks.path("path", path)))
    if not os.path.isdir(folder):
        raise FileNotFoundError(ENOENT, "there is no such folder", folder)
    return os.fspath(path)


def _record(
    path: str, source: Source, comparison: ClockComparison, after: Mapping[str, float], profiles: Mapping[str, bytes]
) -> str:
    events = source.events(after)  # first, because the exchanges are events as well
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
