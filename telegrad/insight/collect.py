"""The trace of a group: what all workers have recorded, their clocks and, where wanted, torch's profiler on each."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from errno import ENOENT
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import profiler
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import record_function

from telegrad import checks
from telegrad.agent import profiling
from telegrad.agent.naming import user_name
from telegrad.atfork import renewed
from telegrad.errors import TelegradError, UsageError
from telegrad.insight import clocks, timeline
from telegrad.insight.clocks import Exchange, Reading, Relation
from telegrad.insight.source import Source
from telegrad.insight.sources import own_group
from telegrad.insight.timeline import Recorded
from telegrad.private_files import replacing
from telegrad.rpc import current, rpc_async, rpc_sync, workers

EXCHANGES = 50  # with each worker, whenever clocks are compared
PATIENCE = 10.0  # seconds that a worker has for an answer, and a minute for its profile
MARKS = 20  # in a profile, when it begins and when it ends

if TYPE_CHECKING:
    from typing import Self

Names = Iterable[str]


# Clocks


def clock_reading() -> Reading:
    """What this worker's clocks show now; for remote calls."""
    return Reading(perf_counter(), time.time(), _which_clock())


def _which_clock() -> str:
    """On Linux perf_counter is the kernel's, the same for all processes that share a boot and a namespace of time."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        return ""
    with contextlib.suppress(OSError):  # before Linux 5.6 there was one for all
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    return boot


def measure(name: str, times: int = EXCHANGES) -> list[Exchange]:
    """Ask a worker for its clock so many times."""
    found = []
    for _ in range(times):
        sent = perf_counter()
        there = rpc_sync(name, clock_reading, timeout=PATIENCE).time
        found.append(Exchange(sent, there, there, perf_counter()))
    return found


def align(names: Names) -> dict[str, Relation]:
    """How the clocks of these workers relate to this worker's; those who do not answer are UNKNOWN."""
    comparison = Comparison(names)
    comparison.look()
    return comparison.relations()


class Comparison:
    """The clocks of workers beside this one's. To look twice, far apart, tells of their drift."""

    def __init__(self, names: Names) -> None:
        self._names = list(names)
        self.readings: dict[str, Reading] = {}  # of the latest look
        self._exchanges: dict[str, list[Exchange]] = {}

    def look(self) -> None:
        """Read all clocks; workers whose clock is another than this one's take part in exchanges."""
        self.readings = _from_all(self._names, clock_reading)
        own = _which_clock()
        for name, reading in self.readings.items():
            if not own or reading.clock != own:
                with contextlib.suppress(TelegradError):
                    self._exchanges.setdefault(name, []).extend(measure(name))

    def relations(self) -> dict[str, Relation]:
        """How the clocks relate to this worker's."""
        return {name: self._relation(name) for name in self._names}

    def _relation(self, name: str) -> Relation:
        if name == current.agent().name:
            return Relation(0.0, 0.0, how=clocks.REFERENCE)
        if name in self._exchanges:
            return clocks.relate(self._exchanges[name])
        return Relation(0.0, 0.0, how=clocks.SAME if name in self.readings else clocks.UNKNOWN)


def _from_all(names: Names, function: Callable[..., Any], patience: float = PATIENCE) -> dict[str, Any]:
    """Call a function on all; the values of those who answer."""
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


class _Profiling:
    """Torch's profiler on this worker."""

    def __init__(self) -> None:
        self._lock = renewed(threading.Lock())  # guards _running: one at a time
        self._running: profiler.profile | None = None

    def begin(self) -> bool:
        """Whether it runs now: not where a profiler runs already, of this tracing or of the program itself."""
        with self._lock:
            if self._running is not None or profiling.enabled():
                return False
            # Of all threads, since calls run on any.
            running = profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
            running.start()
            self._running = running
        _make_marks()
        return True

    def end(self) -> bytes:
        """What it has seen, as a file that is packed by gzip; empty where it did not run."""
        _make_marks()
        with self._lock:
            running, self._running = self._running, None
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
        with record_function(clocks.mark(perf_counter())):
            pass


_profiling = _Profiling()


def begin_profile() -> bool:
    """Have torch's profiler watch this worker; for remote calls."""
    return _profiling.begin()


def end_profile() -> bytes:
    """What torch's profiler has seen on this worker; for remote calls."""
    return _profiling.end()


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
        self._names = [worker.name for worker in workers()]
        self._comparison = Comparison(self._names)
        self._comparison.look()
        if self._profile:
            self._profiled = [name for name, began in _from_all(self._names, begin_profile, 60).items() if began]
        self._after = {name: reading.time for name, reading in self._comparison.readings.items()}
        return self

    def __exit__(self, *_: object) -> None:
        profiles = _from_all(self._profiled, end_profile, 60) if self._profile else {}
        recorded = _recorded(self._names, self._source, self._after, self._comparison, profiles)
        self._written = _write(self._path, recorded)

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
    path = _place_for(path)
    checks.flag("profile", profile)
    if seconds is None:
        if profile:
            raise UsageError(
                "a profile needs a time: trace(path, seconds=5, profile=True), or `with tracing(path, ...)`"
            )
        names = [worker.name for worker in workers()]
        return _write(path, _recorded(names, own_group(), {}, Comparison(names), {}))
    _check(seconds)
    with tracing(path, profile) as written:
        time.sleep(seconds)
    return str(written)


def trace_from_outside(path: str | os.PathLike[str], source: Source, seconds: float | None = None) -> str:
    """As `trace`, for who is in no group: clocks of other hosts are compared by the calls that were recorded."""
    path = _place_for(path)
    accounts, silent = source.look()
    after: dict[str, float] = {}
    if seconds is not None:
        _check(seconds)
        after = {account["worker"]: account["clock"] for account in accounts}
        time.sleep(seconds)
    events = source.events(after)
    hosts = {account["worker"]: account["host"] for account in accounts}
    names = list(dict.fromkeys([*hosts, *sorted(events)]))
    relations = timeline.clocks_of(events, names[0], hosts) if names else {}
    told = _write(path, {name: Recorded(events.get(name, []), relations[name]) for name in names})
    lost = {name: why for account in accounts for name, why in account["gone"].items()} | dict(silent)
    return told + "".join(f"\n  {name}: nothing; {why}" for name, why in sorted(lost.items()) if name not in names)


def _place_for(path: str | os.PathLike[str]) -> str:
    """Where a file is to be written; known to be a place for it before anybody waits.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folder = os.path.dirname(os.path.abspath(checks.path("path", path)))
    if not os.path.isdir(folder):
        raise FileNotFoundError(ENOENT, "there is no such folder", folder)
    return os.fspath(path)


def _check(seconds: float) -> None:
    checks.seconds("seconds", seconds, "0 for none")


def _recorded(
    names: Names, source: Source, after: dict[str, float], comparison: Comparison, profiles: dict[str, bytes]
) -> dict[str, Recorded]:
    """What is known of all workers of this group."""
    events = source.events(after)  # before the exchanges, which are events as well
    comparison.look()
    relations = comparison.relations()
    opened = {name: json.loads(gzip.decompress(packed)) for name, packed in profiles.items() if packed}
    return {name: Recorded(events.get(name, []), relations[name], opened.get(name)) for name in names}


def _write(path: str, recorded: dict[str, Recorded]) -> str:
    file = timeline.joined(recorded, OWN)
    data = json.dumps(file, separators=(",", ":")).encode()
    with replacing(path) as out:
        out.write(gzip.compress(data) if path.endswith(".gz") else data)
    return f"{path}: {timeline.summary(file)}"
