"""`torch.distributed.rpc.server_process_global_profiler`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.autograd import profiler_legacy, profiler_util

from telegrad._core.forks import renewed
from telegrad._core.worker import current
from telegrad.compat.profiler import Event, Options, Profiled

__all__: list[str] = []

profile: Any = profiler_legacy.profile
EventList: Any = profiler_util.EventList
FunctionEvent: Any = profiler_util.FunctionEvent

_lock = renewed(threading.Lock())  # guards _running and `_gathered` of its members
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


def _by_time(event: Any) -> tuple[float, float]:
    return event.time_range.start, -event.time_range.end


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
