"""Metrics of one worker, for Prometheus: of what it tells of itself at a scrape, and of what has happened since.

What happens is counted as it happens, by `Tallies`; all else is looked at when it is asked for.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from telegrad import instruments
from telegrad.errors import TelegradError, UsageError
from telegrad.group.address import loopback
from telegrad.insight.serving import BoundedServer
from telegrad.insight.tallies import Durations, Tallies, by_function
from telegrad.rpc import current
from telegrad.version import VERSION
from telegrad.witness.account import GOING_ON, JOINING, LEAVING, MEMBER, QUEUED, RUNNING, Account, counts

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


def own_account() -> Account:
    """What this process's worker tells of itself.

    Raises:
        NotInitialized: it is none.
    """
    worker: Any = current.joined()
    account: Account = worker.witness.account()
    return account


class Metrics(Collector):
    """A collector: of the worker that gives the account."""

    def __init__(self, account: Callable[[], Account]) -> None:
        """`account` is called at each scrape; it may raise a TelegradError where this process is in no group."""
        self.tallies = Tallies()
        self._account = account

    def describe(self) -> Iterator[Metric]:
        return self._of_events()

    def collect(self) -> Iterator[Metric]:
        with self.tallies.lock:
            families = list(self._of_events())
        try:
            account = self._account()
        except TelegradError:
            yield _phase("")
        else:
            yield _phase(account["phase"])
            yield from _of_account(account)
            yield from _of_calls(account)
        yield from families

    def _of_events(self) -> Iterator[Metric]:
        seen, call = self.tallies, ["function", "peer", "outcome"]
        calls, served = by_function(seen.calls), by_function(seen.served)
        yield _counter("calls", "Calls of this worker that have ended", _counts(seen.calls), call)
        yield _durations("call_duration_seconds", "How long they took", calls, "function")
        sizes: dict[tuple[str, ...], float] = {(name,): each.size for name, each in calls.items() if each.size}
        yield _counter("call_bytes", "Bytes of the tensors that they sent", sizes, ["function"])
        yield _counter("served", "Calls of others that have run here", _counts(seen.served), call)
        yield _durations("served_duration_seconds", "How long they ran", served, "function")
        yield _counter("connections", "Connections that were made", seen.connected, ["how"])
        yield _counter("connections_lost", "Connections that have broken", seen.lost, ["peer"])
        yield _counter("references_made", "References to values of a worker that were made", seen.made, ["peer"])
        yield _counter("references_freed", "Those that were let go", seen.freed, [])
        yield _counter("passes", "Backward passes that this worker drove", seen.passes, ["outcome"])
        yield _durations("pass_duration_seconds", "How long they took", seen.pass_durations)
        yield _counter("stage_actions", "Actions of pipelines' stages", seen.stage_actions, ["stage", "action"])
        yield _counter("stage_seconds", "How long they took together", seen.stage_seconds, ["stage", "action"])
        yield _durations("step_duration_seconds", "Steps of optimizers' shares", seen.step_durations, "optimizer")


def _of_account(account: Account) -> Iterator[Metric]:
    names = {name: account[name] for name in ("worker", "host", "program", "group")}
    about = {**names, "rank": str(account["rank"]), "pid": str(account["pid"]), "version": VERSION}
    yield InfoMetricFamily("telegrad", "Which worker this is", about)
    yield _gauge("phase_age_seconds", "For how long it is in its phase", account["phase_age"])
    yield _gauge("members", "Members of the group that it knows", len(account["members"]))
    if account["size"] is not None:
        yield _gauge("size", "Members that the group shall have", account["size"])
    yield _gauge("members_gone", "Members that have died or left early", len(account["gone"]))
    yield _gauge("slots", "Calls that may run at once", account["slots"])
    yield _gauge("slots_busy", "Calls that run and do not wait", account["busy"])
    yield _gauges("references", "References, by kind", account["references"], "kind")
    yield _gauge("contexts", "Autograd contexts", account["contexts"])
    yield _gauge("passes_in_progress", "Backward passes that this worker drives now", len(account["passes"]))
    yield _gauge("resident_memory_bytes", "Memory of the process", account["memory"])
    yield _gauge("shared_memory_bytes", "Shared memory that it has lent", account["shared"])
    waits = Counter(thread["wait"]["what"] for thread in account["threads"] if thread["wait"] is not None)
    yield _gauges("waits", "Threads that wait, by what for", waits, "what")
    for name, text, amounts in (
        ("sent_bytes", "Bytes that were sent", account["bytes_out"]),
        ("received_bytes", "Bytes that have come", account["bytes_in"]),
    ):
        yield _counter(name, text, {(peer,): amount for peer, amount in amounts.items()}, ["peer"])


def _of_calls(account: Account) -> Iterator[Metric]:
    out, come = account["calls_out"], account["calls_in"]
    yield _gauges("calls_in_flight", "Calls without an answer yet", counts(out, lambda call: call["to"]), "peer")
    ages = [call["age"] for call in out]
    yield _gauge("oldest_call_seconds", "The age of the oldest of them, 0 where there is none", max(ages, default=0))
    states = counts(come, lambda call: call["state"])
    serving = {state: states[state] for state in (RUNNING, QUEUED, GOING_ON)}
    yield _gauges("serving", "Calls of others that were not answered yet", serving, "state")
    yield _counter("answered", "Calls of others since the start", {(): account["calls_done"]}, [])


def _phase(phase: str) -> Metric:
    phases = {each: float(each == phase) for each in (JOINING, MEMBER, LEAVING)}
    return _gauges("phase", "1 for the phase of the worker's life; no phase: it is in no group", phases, "phase")


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"telegrad_{name}", text, value)


def _gauges(name: str, text: str, values: Mapping[str, float], label: str) -> Metric:
    family = GaugeMetricFamily(f"telegrad_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, counts: Mapping[tuple[str, ...], float], labels: list[str]) -> Metric:
    family = CounterMetricFamily(f"telegrad_{name}", text, labels=labels)
    for key, count in counts.items():
        family.add_metric(list(key), count)
    return family


def _counts(calls: Mapping[tuple[str, ...], Durations]) -> dict[tuple[str, ...], float]:
    return {labels: each.count for labels, each in calls.items()}


def _durations(name: str, text: str, durations: Mapping[str, Durations], label: str = "") -> Metric:
    family = HistogramMetricFamily(f"telegrad_{name}", text, labels=[label] if label else [])
    for key, each in durations.items():
        family.add_metric([key] if label else [], each.buckets(), each.sum)
    return family


class Registered:
    """Metrics that a registry has, until `close`."""

    def __init__(self, account: Callable[[], Account], registry: CollectorRegistry) -> None:
        self._registry = registry
        self.metrics = Metrics(account)
        try:
            registry.register(self.metrics)
        except ValueError:
            raise UsageError(
                "this registry has Telegrad's metrics already: close() what serve_metrics or register returned, or "
                "give another registry"
            ) from None
        instruments.add(self.metrics.tallies)

    def close(self) -> None:
        instruments.remove(self.metrics.tallies)
        self._registry.unregister(self.metrics)


def register(registry: CollectorRegistry = REGISTRY, account: Callable[[], Account] = own_account) -> Registered:
    """Have a registry, which the program serves by itself, give this worker's metrics, too.

    Args:
        registry: one of `prometheus_client`; left out, its default.
        account: what tells of this worker.

    Returns:
        What has `close()`, which takes them out again.

    Raises:
        UsageError: this registry has these metrics already.
    """
    return Registered(account, registry)


class _Handler(MetricsHandler):
    server_version, sys_version = "telegrad", ""
    timeout = 10.0  # seconds, for a request to come


class Served(Registered):
    """Metrics under an address, until `close`."""

    def __init__(self, account: Callable[[], Account], registry: CollectorRegistry, host: str, port: int) -> None:
        super().__init__(account, registry)
        try:
            address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
            self._server = BoundedServer(str(address), port, type("_Handler", (_Handler,), {"registry": registry}))
        except (OSError, OverflowError) as error:
            super().close()
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"metrics cannot be served at {host}:{port} ({why}): each worker of a host needs a port of its own, or "
                "0 for a free one"
            ) from None
        except BaseException:
            super().close()
            raise
        self.host, self.port = host, self._server.port
        self._server.start("telegrad metrics")

    def close(self) -> None:
        self._server.stop()
        super().close()

    def __repr__(self) -> str:
        return f"<metrics at http://{self.host}:{self.port}/metrics>"


def serve_metrics(
    port: int,
    host: str | None = None,
    registry: CollectorRegistry = REGISTRY,
    account: Callable[[], Account] = own_account,
) -> Served:
    """Serve this worker's metrics and all others of the registry at `http://host:port/metrics`, on a thread of its own.

    It may begin before `init_rpc`, and outlasts the group.

    Args:
        port: at which port; 0 for a free one, which is `port` of what is returned.
        host: at which address of this host, else the loopback address.
        registry: one of `prometheus_client`; left out, its default.
        account: what tells of this worker.

    Returns:
        What has the address, `host` and `port`, and `close()`.

    Raises:
        UsageError: the port is taken, or this registry has these metrics already.
    """
    return Served(account, registry, host or loopback(), port)
