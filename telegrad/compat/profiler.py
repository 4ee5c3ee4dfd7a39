"""The legacy profiler (`torch.autograd.profiler_legacy`) across workers, like torch's.

A profiled call asks its callee to profile the function, and then fetches the callee's events. They are added to the
caller's profile under names that begin with the call's name: `rpc_sync#f(a -> b)#remote_op: aten::add`. torch has no
way to add events to a running profiler. So they are kept separately, per thread, and added when torch parses its
records.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from torch.autograd import profiler_legacy, profiler_util

from telegrad._core.agent.call_server import ASYNC_MARK, Deferred
from telegrad._core.agent.incoming import its_future
from telegrad._core.calls import profiling
from telegrad._core.calls.call_names import known_as, runs_as, user_name
from telegrad._core.forks import renewed
from telegrad._core.references import remember
from telegrad._core.worker import current
from telegrad.errors import TelegradError

REMOTE = "#remote_op: "
PLAIN = (False,) * 6  # options of a profiler that was created before the mode was on
MOST_KEPT = 1024  # reports that were not fetched
_FIELDS = (
    *("id", "name", "trace_name", "thread", "fwd_thread", "input_shapes", "stack", "scope", "cpu_memory_usage"),
    *("device_memory_usage", "is_async", "sequence_nr", "device_type", "flops", "node_id", "is_legacy"),
)

Event = dict[str, Any]  # the arguments of a FunctionEvent
Options = tuple[bool, ...]  # the options of a ProfilerConfig, and True if CUDA is profiled

_enable = profiler_legacy._enable_profiler_legacy  # type: ignore[attr-defined]
_disable = profiler_legacy._disable_profiler_legacy  # type: ignore[attr-defined]
_parse: Any = profiler_legacy._parse_legacy_records
profile: Any = profiler_legacy.profile
EventList: Any = profiler_util.EventList
FunctionEvent: Any = profiler_util.FunctionEvent
_LEGACY = torch._C._profiler.ActiveProfilerType.LEGACY
_enabled = profiling.enabled
_kind = torch._C._autograd._profiler_type


class ProfilerSession:
    """One profiler that runs on one thread."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.events: list[Event] = []  # of calls to other workers, and of the functions that ran there
        self.start = perf_counter()

    def now(self) -> float:
        """Return the microseconds since the session began."""
        return (perf_counter() - self.start) * 1e6

    def add_call(self, name: str, began: float, is_async: bool, there: list[Event]) -> None:
        """Add an ended call; `there` has the callee's events."""
        ended = self.now()
        call = {
            "id": next(_ids),
            "name": name,
            "thread": threading.get_native_id(),
            "start_us": began,
            "end_us": ended,
            "is_async": is_async,
            "is_remote": False,
            "is_legacy": True,
            "node_id": _rank(),
        }
        lasted = max((event["end_us"] for event in there), default=0.0)
        # Centred in the call, because the two hosts' clocks are unrelated.
        shift = began + max(ended - began - lasted, 0.0) / 2
        self.events.append(call)
        for event in there:
            times = {key: event[key] + shift for key in ("start_us", "end_us")}
            names = {key: f"{name}{REMOTE}{event[key]}" for key in ("name", "trace_name") if event.get(key)}
            self.events.append({**event, **times, **names, "is_remote": True})


_ids = itertools.count(1 << 40)  # distinct from torch's ids
_here = threading.local()  # .session


def session() -> ProfilerSession | None:
    """Return the session of the legacy profiler that runs on this thread; None if none does."""
    if _enabled() and _kind() == _LEGACY:
        found: ProfilerSession | None = getattr(_here, "session", None)
        return found
    return None


def _rank() -> int:
    try:
        return current.here().agent.me.id  # not of `current.worker`: a call may be served before init_rpc has set that
    except TelegradError:  # this process is in no group
        return -1


# Replacements of the functions that the profiler calls


def ProfilerConfig(state: Any, *options: Any) -> Any:  # noqa: N802
    """Return torch's own config; store the options, because they cannot be read from it."""
    # torch makes the config right before it enables the profiler, on the same thread, so one value for each thread is
    # enough.
    *flags, _ = options
    _here.options = (*flags, state == torch.autograd.ProfilerState.CUDA)  # type: ignore[attr-defined]
    return torch.autograd.ProfilerConfig(state, *options)  # type: ignore[attr-defined]


def _enable_profiler_legacy(config: Any) -> None:
    _enable(config)
    _here.session = ProfilerSession(getattr(_here, "options", PLAIN))


def _parse_legacy_records(thread_records: Any) -> list[Any]:
    """Return torch's events of this thread's profiler, and those of calls made during it."""
    events: list[Any] = _parse(thread_records)
    for event in events:
        if event.node_id == -1:
            event.node_id = _rank()
    ended: ProfilerSession | None = _here.__dict__.pop("session", None)
    if ended is not None:
        events += [FunctionEvent(**event) for event in ended.events]
    return sorted(events, key=_by_time)


def _by_time(event: Any) -> tuple[float, float]:
    return event.time_range.start, -event.time_range.end


# At the callee


_lock = renewed(threading.Lock())  # guards _reports, _running and `_gathered` of its members
_reports: dict[str, list[Event]] = {}  # of profiled calls, until their callers fetch them


def _keep_report(token: str, events: list[Event]) -> None:
    with _lock:
        remember(_reports, token, events, MOST_KEPT)


@known_as("torch.autograd.profiler.profile")
def fetch_report(token: str) -> list[Event]:
    """Return the events of one call. Called remotely by its caller."""
    with _lock:
        return _reports.pop(token, [])


def profile_and_run(token: str, options: Options, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `function` and return its result; its events can be fetched once its value is known."""
    run = Profiled(options)
    try:
        result = run(function, *args, **kwargs)
    except BaseException:
        _keep_report(token, run.events())
        raise
    if not hasattr(function, ASYNC_MARK):
        _keep_report(token, run.events())
        return result
    future = its_future(function, result)
    if isinstance(future, torch._C.Future):
        # This callback is added before the one that sends the answer, so the report is kept when the caller fetches it.
        future.add_done_callback(lambda _: _keep_report(token, run.events()))
    return Deferred(future, function)


runs_as(profile_and_run, lambda token, options, function, *args: user_name(function, args))


class Profiled:
    """Runs one function under its own profiler."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._local: list[Event] = []

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        *flags, on_cuda = self._options
        states = torch.autograd.ProfilerState  # type: ignore[attr-defined]
        experimental = torch._C._profiler._ExperimentalConfig()
        _enable_profiler_legacy(ProfilerConfig(states.CUDA if on_cuda else states.CPU, *flags, experimental))
        self._session: ProfilerSession = _here.session
        try:
            return function(*args, **kwargs)
        finally:
            # Without the session, the parser adds no events of calls. Calls of the function may still be under way
            # here, and add theirs to the session later; `events` takes both.
            del _here.session
            self._local = [_as_event(event) for event in _parse_legacy_records(_disable())]

    def events(self) -> list[Event]:
        """Return the events so far."""
        return self._local + self._session.events


def _as_event(event: Any) -> Event:
    times = {"start_us": event.time_range.start, "end_us": event.time_range.end}
    fields = {name: getattr(event, name) for name in _FIELDS}
    return {**fields, **times, "is_remote": event.is_remote}


# `torch.distributed.rpc.server_process_global_profiler`


_running: list[_server_process_global_profile] = []


class _server_process_global_profile(profile):  # type: ignore[misc]  # noqa: N801 - its name there
    """While it is entered, on any thread, each call from another worker is profiled separately."""

    entered: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gathered: list[list[Event]] = []
        self.process_global_function_events: list[list[Any]] = []

    def __enter__(self) -> Any:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("Profiler context manager is not reentrant")
        self.entered = True
        with _lock:
            _running.append(self)
        current.agent().wrap_calls(_profiled)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.enabled:
            return
        with _lock:
            _running.remove(self)
            if not _running:
                current.agent().wrap_calls(None)
        self.process_global_function_events = [
            sorted((FunctionEvent(**event) for event in events), key=_by_time) for events in self._gathered
        ]
        self.function_events = EventList(
            list(itertools.chain.from_iterable(self.process_global_function_events)),
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
        )
        self.function_events._build_tree()

    def _options(self) -> Options:
        return self.record_shapes, self.profile_memory, False, False, False, self.use_cuda


def _profiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`; all profilers that are entered at the time of a run record it."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            watching = list(_running)
        if not watching:
            return function(*args, **kwargs)
        once = Profiled(tuple(map(any, zip(*(each._options() for each in watching), strict=True))))
        try:
            return once(function, *args, **kwargs)
        finally:
            with _lock:
                for each in watching:
                    if each in _running:
                        each._gathered.append(once.events())

    return run
