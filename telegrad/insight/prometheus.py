"""Metrics of one worker for Prometheus: its state at a scrape, and counts of its events.

Events are counted as they happen, by `EventCounters`; everything else is read at a scrape.
"""

import contextlib
import socket
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

from telegrad.errors import TelegradError, UsageError
from telegrad.ext.events import BACKWARD_PASS, CALLED, CONNECTED, FREED, LOST, MADE, RAN, STAGED, STEPPED, Event, events
from telegrad.ext.host import loopback, renewed
from telegrad.ext.workers import current
from telegrad.insight.phrases import function_label
from telegrad.insight.web import BoundedServer
from telegrad.reporting import (
    ASKS,
    JOINING,
    LEAVING,
    MEMBER,
    QUEUED,
    RUNNING,
    SPARE,
    UNFINISHED,
    WorkerState,
    counts,
    oldest_call,
)
from telegrad.reporting.introspection import introspection_of
from telegrad.version import VERSION

try:
    from prometheus_client import REGISTRY, CollectorRegistry, MetricsHandler
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics for Prometheus need its client: pip install 'telegrad[prometheus]'") from error


OTHER = "other"
OK = "ok"  # the outcome of a successful event
MOST = {"function": 100, "peer": 256, "outcome": 32, "optimizer": 100}
MOST_FOUND = 10_000
BOUNDS = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

# By kind of event: its labels, and the getter of its kind and of their values.
KINDS: dict[str, tuple[tuple[str, ...], Any]] = {
    CALLED: (("function", "peer", "outcome"), itemgetter(0, 5, 3, 7)),
    RAN: (("function", "peer", "outcome"), itemgetter(0, 5, 3, 6)),
    CONNECTED: (("how",), itemgetter(0, 4)),
    LOST: (("peer",), itemgetter(0, 3)),
    MADE: (("peer",), itemgetter(0, 3)),
    FREED: ((), itemgetter(slice(0, 1))),
    BACKWARD_PASS: (("outcome",), itemgetter(0, 5)),
    STAGED: (("stage", "action"), itemgetter(0, 5, 4)),
    STEPPED: (("optimizer",), itemgetter(0, 4)),
}

CALL = ("function", "peer", "outcome")
COUNT, SUM, SIZE, DURATION = "count", "sum", "size", "duration"

# Metrics of events: name, text, kind of event, labels, and the figure that is reported.
OF_EVENTS = (
    ("calls", "Calls of this worker that have ended", CALLED, CALL, COUNT),
    ("call_duration_seconds", "Duration of calls of this worker", CALLED, ("function",), DURATION),
    ("call_bytes", "Bytes of tensors that calls of this worker sent", CALLED, ("function",), SIZE),
    ("served", "Calls of other workers that ran here", RAN, CALL, COUNT),
    ("served_duration_seconds", "Duration of calls of other workers here", RAN, ("function",), DURATION),
    ("connections", "Connections that were opened", CONNECTED, ("how",), COUNT),
    ("connections_lost", "Connections that were lost", LOST, ("peer",), COUNT),
    ("references_made", "References that were created, by owner", MADE, ("peer",), COUNT),
    ("references_freed", "References that were freed", FREED, (), COUNT),
    ("passes", "Backward passes that this worker drove", BACKWARD_PASS, ("outcome",), COUNT),
    ("pass_duration_seconds", "Duration of backward passes that this worker drove", BACKWARD_PASS, (), DURATION),
    ("stage_actions", "Actions of pipelines' stages", STAGED, ("stage", "action"), COUNT),
    ("stage_seconds", "Total duration of actions of pipelines' stages", STAGED, ("stage", "action"), SUM),
    ("step_duration_seconds", "Duration of steps of optimizers' shares", STEPPED, ("optimizer",), DURATION),
)


class Histogram:
    """The durations and sizes of events."""

    __slots__ = ("counts", "size", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)  # up to each bound and above the previous one; the last has no bound
        self.sum = 0.0
        self.size = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, seconds: float, size: int = 0) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds
        self.size += size

    def join(self, other: "Histogram") -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        self.size += other.size

    def buckets(self) -> list[tuple[str, float]]:
        return list(zip((*map(str, BOUNDS), "+Inf"), map(float, accumulate(self.counts)), strict=True))


class EventCounters:
    """Histograms of events, by kind and labels."""

    def __init__(self) -> None:
        # Guards all below. Reentrant: a signal handler that makes calls may interrupt a thread that holds it.
        self.lock = renewed(threading.RLock())
        self.events: dict[str, defaultdict[tuple[str, ...], Histogram]] = {
            kind: defaultdict(Histogram) for kind in KINDS
        }
        # A cache of the same histograms, by the raw values of events.
        self._found: dict[tuple[Any, ...], Histogram] = {}
        self._known: defaultdict[str, set[str]] = defaultdict(set)  # by label, the names that are not "other"

    def __call__(self, event: Event) -> None:
        kind = event[0]
        if (labels := KINDS.get(kind)) is not None:
            key = labels[1](event)
            with self.lock:
                found = self._found.get(key) or self._find(key)
                found.add(event[2] - event[1], event[6] if kind == CALLED else 0)

    def by(self, kind: str, names: Sequence[str]) -> dict[tuple[str, ...], Histogram]:
        """Merge the histograms of a kind that have the same values of some labels."""
        places = [KINDS[kind][0].index(name) for name in names]
        found: defaultdict[tuple[str, ...], Histogram] = defaultdict(Histogram)
        for labels, each in self.events[kind].items():
            found[tuple(labels[place] for place in places)].join(each)
        return found

    def _find(self, key: tuple[Any, ...]) -> Histogram:
        # Raw values, such as the name of a function with its object, have no bound, unlike labels.
        if len(self._found) >= MOST_FOUND:
            self._found.clear()
        kind, *values = key
        labels = tuple(map(self._label, KINDS[kind][0], values))
        return self._found.setdefault(key, self.events[kind][labels])

    def _label(self, name: str, value: Any) -> str:
        if value == "":
            return OK
        text, known = function_label(str(value)), self._known[name]
        if text not in known:
            if name in MOST and len(known) >= MOST[name]:
                return OTHER
            known.add(text)
        return text


def own_account() -> WorkerState:
    """Return the state of this process's worker; raise NotInitialized if this process has no worker."""
    return introspection_of(current.joined()).account()


class RegisteredCollector(Collector):
    """Metrics in a registry, until `close`."""

    def __init__(self, account: Callable[[], WorkerState], registry: CollectorRegistry) -> None:
        """`account` is called at each scrape; it may raise a TelegradError if this process is in no group."""
        self.counters = EventCounters()
        self._account = account
        self._registry = registry
        try:
            registry.register(self)
        except ValueError:
            raise UsageError(
                "this registry already has Telegrad's metrics: close() what serve_metrics or register returned, or "
                "pass another registry"
            ) from None
        # Last, so that nothing is counted if the registry refuses this collector.
        events.add(self.counters)

    def close(self) -> None:
        events.remove(self.counters)
        with contextlib.suppress(KeyError):  # it was closed before
            self._registry.unregister(self)

    def describe(self) -> Iterator[Metric]:
        # `registry.register` calls this for the names of the metrics. The default registry collects a collector without
        # it instead, which here would walk the stacks of all threads. The metrics of events suffice to find that a
        # registry has this collector already.
        return self._of_events()

    def collect(self) -> Iterator[Metric]:
        # The families are built as a whole under the lock, so that the counts are of one moment. The lock is released
        # before the state is collected, which takes longer: each event of any thread needs the lock.
        with self.counters.lock:
            families = list(self._of_events())
        try:
            account = self._account()
        except TelegradError:
            yield _phase("")
        else:
            yield _phase(account["phase"])
            yield from _of_account(account)
        yield from families

    def _of_events(self) -> Iterator[Metric]:
        for name, text, kind, labels, figure in OF_EVENTS:
            found = self.counters.by(kind, labels)
            if figure == DURATION:
                family = HistogramMetricFamily(f"telegrad_{name}", text, labels=labels)
                for key, each in found.items():
                    family.add_metric(key, each.buckets(), each.sum)
                yield family
            else:
                values = {key: float(getattr(each, figure)) for key, each in found.items()}
                yield _counter(name, text, {key: value for key, value in values.items() if value}, labels)


def _of_account(account: WorkerState) -> Iterator[Metric]:
    names = {name: account[name] for name in ("worker", "host", "program", "group")}
    about = {**names, "rank": str(account["rank"]), "pid": str(account["pid"]), "version": VERSION}
    yield InfoMetricFamily("telegrad", "Which worker this is", about)
    yield _gauge("phase_age_seconds", "Seconds since its phase began", account["phase_age"])
    yield _gauge("members", "Members of the group that this worker knows", len(account["members"]))
    if account["size"] is not None:
        yield _gauge("size", "Members that the group is to have", account["size"])
    yield _gauge("members_gone", "Members that were lost or left early", len(account["gone"]))
    yield _gauge("slots", "Calls that may run at once", account["slots"])
    yield _gauge("slots_busy", "Calls that run and do not wait", account["busy"])
    yield _gauge("references", "References, by kind", account["references"], "kind")
    yield _gauge("contexts", "Autograd contexts", account["contexts"])
    yield _gauge("passes_in_progress", "Backward passes that this worker drives now", len(account["passes"]))
    yield _gauge("resident_memory_bytes", "Memory of the process", account["memory"])
    yield _gauge("shared_memory_bytes", "Shared memory that this worker has lent", account["shared"])
    waits = Counter(thread["wait"]["what"] for thread in account["threads"] if thread["wait"] is not None)
    waits.pop(ASKS, None)  # the thread that asks for these metrics
    yield _gauge("waits", "Threads that wait, by what they wait for", waits, "what")
    yield _counter("sent_bytes", "Bytes that were sent", account["bytes_out"], ["peer"])
    yield _counter("received_bytes", "Bytes that were received", account["bytes_in"], ["peer"])
    in_flight = counts(account["calls_out"], lambda call: call["to"])
    yield _gauge("calls_in_flight", "Calls without an answer yet", in_flight, "peer")
    yield _gauge("oldest_call_seconds", "Age of the oldest call in flight, 0 if there is none", oldest_call(account))
    states = counts(account["calls_in"], lambda call: call["state"])
    serving = {state: states[state] for state in (RUNNING, QUEUED, UNFINISHED)}
    yield _gauge("serving", "Calls of other workers that are not answered yet", serving, "state")
    yield _counter("answered", "Calls of other workers answered since the start", {(): account["calls_done"]}, [])


def _phase(phase: str) -> Metric:
    phases = {each: float(each == phase) for each in (JOINING, SPARE, MEMBER, LEAVING)}
    return _gauge("phase", "1 for the phase of the worker's life; no phase: it is in no group", phases, "phase")


def _gauge(name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
    if not isinstance(values, Mapping):
        return GaugeMetricFamily(f"telegrad_{name}", text, values)
    family = GaugeMetricFamily(f"telegrad_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, values: Mapping[Any, float], labels: Sequence[str]) -> Metric:
    family = CounterMetricFamily(f"telegrad_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family


def register(
    registry: CollectorRegistry = REGISTRY, account: Callable[[], WorkerState] = own_account
) -> RegisteredCollector:
    """Add this worker's metrics to a registry that the program serves itself.

    Args:
        registry: a registry of `prometheus_client`; by default its default registry.
        account: returns the worker's state.

    Returns:
        The registration; its `close()` removes the metrics.

    Raises:
        UsageError: this registry has these metrics already.
    """
    return RegisteredCollector(account, registry)


class _MetricsHandler(MetricsHandler):
    server_version, sys_version = "telegrad", ""
    timeout = 10.0  # seconds to receive a request


class ServedMetrics(RegisteredCollector):
    """Metrics served at an address, until `close`."""

    def __init__(self, account: Callable[[], WorkerState], registry: CollectorRegistry, host: str, port: int) -> None:
        super().__init__(account, registry)
        # If the port cannot be served, the registration is undone, so that another attempt finds the registry free.
        try:
            address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
            handler = _MetricsHandler.factory(registry)
            self._server = BoundedServer(str(address), port, handler, "telegrad metrics")
        except BaseException as error:
            super().close()
            if not isinstance(error, OSError | OverflowError):
                raise
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"metrics cannot be served at {host}:{port} ({why}): each worker of a host needs a port of its own, or "
                "0 for a free one"
            ) from None
        self.host, self.port = host, self._server.port

    def close(self) -> None:
        self._server.stop()
        super().close()

    def __repr__(self) -> str:
        return f"<metrics at http://{self.host}:{self.port}/metrics>"


def serve_metrics(
    port: int,
    host: str | None = None,
    registry: CollectorRegistry = REGISTRY,
    account: Callable[[], WorkerState] = own_account,
) -> ServedMetrics:
    """Serve this worker's metrics and all others of the registry at `http://host:port/metrics`, on its own thread.

    It may be called before `init_rpc`, and continues after the group ends.

    Args:
        port: the port; 0 for a free one, which is `port` of the result.
        host: the address of this host to listen on; by default the loopback address.
        registry: a registry of `prometheus_client`; by default its default registry.
        account: returns the worker's state.

    Returns:
        The server, with `host`, `port` and `close()`.

    Raises:
        UsageError: the port is taken, or this registry has these metrics already.
    """
    return ServedMetrics(account, registry, host or loopback(), port)
