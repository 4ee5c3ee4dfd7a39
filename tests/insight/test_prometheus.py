"""Metrics over HTTP, read by Prometheus' own parser."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import Mock
from urllib.request import urlopen

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as OwnCounter
from prometheus_client.parser import text_string_to_metric_families

import telegrad.autograd as autograd
from telegrad._core import events
from telegrad.errors import UsageError
from telegrad.insight.prometheus import BOUNDS, MOST, OTHER, EventCounters, ServedMetrics, register, serve_metrics
from telegrad.rpc import remote, rpc_async, rpc_sync
from telegrad.version import VERSION
from tests.cluster import PATIENCE, Process, free_port, in_threads
from tests.insight.accounts import made_up

EVENTS: list[events.Event] = [
    (events.CALLED, 1.0, 1.0002, "worker1", 1, "model.forward", 4096, ""),
    (events.CALLED, 1.0, 3.0, "worker1", 2, "model.forward", 0, "CallTimeout"),
    (events.CALLED, 1.0, 1.5, "worker2", 3, "to_here() of <RRef 1.2 on 'worker2'>", 0, ""),
    (events.RAN, 1.0, 1.02, "worker1", 1, "work", ""),
    (events.RAN, 1.0, 1.02, "worker1", 2, "work", "KeyError"),
    (events.CONNECTED, 1.0, 1.0, "worker1", "unix"),
    (events.LOST, 1.0, 1.0, "worker1", "it died"),
    (events.MADE, 1.0, 1.0, "worker1", 1),
    (events.FREED, 1.0, 1.0, 1),
    (events.BACKWARD_PASS, 1.0, 1.25, 1, 1, ""),
    (events.STAGED, 1.0, 1.25, 1, "F", 0, 0),
    (events.STAGED, 1.0, 1.5, 1, "F", 0, 1),
    (events.STEPPED, 1.0, 1.003, 1, "Adam"),
    (events.JOINED, 1.0, 1.0, "worker0", 0, 4),
]


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Return the samples by their names and the values of their labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        return {
            (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
        }


@pytest.fixture
def served() -> Iterator[ServedMetrics]:
    with closing(serve_metrics(0, registry=CollectorRegistry(), account=made_up)) as made:
        yield made


def test_events_are_counted(served: ServedMetrics) -> None:
    for event in EVENTS:
        served.counters(event)
    found = scrape(served.port)
    # the labels are in alphabetical order: function, outcome, peer
    duration = "telegrad_call_duration_seconds"
    told = {
        ("telegrad_calls_total", "model.forward", "ok", "worker1"): 1, ("telegrad_connections_total", "unix"): 1,
        ("telegrad_calls_total", "model.forward", "CallTimeout", "worker1"): 1, ("telegrad_passes_total", "ok"): 1,
        ("telegrad_calls_total", "to_here", "ok", "worker2"): 1, ("telegrad_call_bytes_total", "model.forward"): 4096,
        (f"{duration}_bucket", "model.forward", "0.0001"): 0, (f"{duration}_bucket", "model.forward", "0.00025"): 1,
        (f"{duration}_bucket", "model.forward", "+Inf"): 2, ("telegrad_served_total", "work", "ok", "worker1"): 1,
        ("telegrad_served_total", "work", "KeyError", "worker1"): 1, (f"{duration}_count", "model.forward"): 2,
        ("telegrad_served_duration_seconds_count", "work"): 2, ("telegrad_connections_lost_total", "worker1"): 1,
        ("telegrad_references_made_total", "worker1"): 1, ("telegrad_references_freed_total",): 1,
        ("telegrad_pass_duration_seconds_count",): 1, ("telegrad_stage_actions_total", "F", "0"): 2,
        ("telegrad_stage_seconds_total", "F", "0"): 0.75, ("telegrad_step_duration_seconds_bucket", "0.005", "Adam"): 1,
        (f"{duration}_sum", "model.forward"): pytest.approx(2.0002),
    }  # fmt: skip
    assert {name: found[name] for name in told} == told


def test_the_state_of_a_worker_is_exported(served: ServedMetrics) -> None:
    found = scrape(served.port)
    # the labels are group, host, pid, program, rank, version, worker
    assert found["telegrad_info", "b7", "here", "4711", "train.py", "0", VERSION, "worker0"] == 1
    told = {
        ("telegrad_phase", "member"): 1, ("telegrad_phase", "leaving"): 0, ("telegrad_phase_age_seconds",): 12.5,
        ("telegrad_members",): 3, ("telegrad_size",): 4, ("telegrad_members_gone",): 1, ("telegrad_slots",): 16,
        ("telegrad_slots_busy",): 1, ("telegrad_calls_in_flight", "worker1"): 2, ("telegrad_oldest_call_seconds",): 3,
        ("telegrad_serving", "running"): 1, ("telegrad_serving", "queued"): 0, ("telegrad_answered_total",): 99,
        ("telegrad_references", "owners"): 5, ("telegrad_contexts",): 2, ("telegrad_passes_in_progress",): 1,
        ("telegrad_waits", "backward"): 1, ("telegrad_sent_bytes_total", "worker2"): 10,
        ("telegrad_received_bytes_total", "worker1"): 2000, ("telegrad_resident_memory_bytes",): 1 << 30,
        ("telegrad_shared_memory_bytes",): 1 << 20,
    }  # fmt: skip
    assert {name: found[name] for name in told} == told
    assert ("telegrad_waits", "asks") not in found  # the thread that asks for the metrics


def test_metrics_outside_of_a_group_are_zero() -> None:
    with closing(serve_metrics(0, registry=CollectorRegistry())) as served:
        assert {name: value for name, value in scrape(served.port).items() if value} == {}
        assert ("telegrad_phase", "member") in scrape(served.port)


def test_metrics_in_a_registry_of_the_program_are_removed_on_close() -> None:
    registry = CollectorRegistry()
    OwnCounter("steps", "Of the program", registry=registry).inc()
    registered = register(registry, made_up)
    note: Any = events.note
    note(EVENTS[0])
    labels = {"function": "model.forward", "peer": "worker1", "outcome": "ok"}
    assert registry.get_sample_value("telegrad_calls_total", labels) == registry.get_sample_value("steps_total") == 1
    with pytest.raises(UsageError):
        register(registry, made_up)
    registered.close()
    note = events.note
    if note is not None:  # other listeners
        note(EVENTS[0])
    assert [each.count for each in registered.counters.by(events.CALLED, ()).values()] == [1]
    assert registry.get_sample_value("telegrad_calls_total", labels) is None
    register(registry, made_up).close()


def test_the_number_of_labels_is_bounded() -> None:
    counters = EventCounters()
    for number in range(1000):
        counters((events.CALLED, 0.0, 1.0, f"worker{number}", number, f"f{number}", 1, f"Error{number}"))
    counters((events.CALLED, 0.0, 1.0, "worker0", 0, "f0", 1, ""))
    found = counters.by(events.CALLED, ("function", "peer", "outcome"))
    assert sum(each.count for each in found.values()) == sum(each.size for each in found.values()) == 1001
    assert found[OTHER, OTHER, OTHER].count == 1000 - MOST["peer"]
    assert found["f0", "worker0", "ok"].count == 1
    for label in ("function", "peer"):
        assert len(counters.by(events.CALLED, (label,))) == MOST[label] + 1
    assert len(counters.by(events.CALLED, ("outcome",))) == MOST["outcome"] + 2  # with "ok" and OTHER


def test_durations_at_the_bounds_of_buckets() -> None:
    counters = EventCounters()
    for bound in (*BOUNDS, BOUNDS[-1] + 1):
        counters((events.BACKWARD_PASS, 0.0, bound, 1, 1, ""))
    (found,) = counters.by(events.BACKWARD_PASS, ()).values()
    assert [count for _, count in found.buckets()] == list(range(1, len(BOUNDS) + 2))
    assert [float(bound) for bound, _ in found.buckets()] == [*BOUNDS, float("inf")]


def test_threads_count_concurrently() -> None:
    counters = EventCounters()

    def tell() -> None:
        for event in itertools.islice(itertools.cycle(EVENTS[:2]), 1000):
            counters(event)

    in_threads(*[tell] * 4)
    assert counters.by(events.CALLED, ())[()].count == 4000


def test_errors_of_serving_metrics() -> None:
    registry = CollectorRegistry()
    served = serve_metrics(0, registry=registry, account=made_up)
    with pytest.raises(UsageError, match="already has Telegrad's metrics"):
        register(registry, made_up)
    other = CollectorRegistry()
    with pytest.raises(UsageError, match=f"cannot be served at 127.0.0.1:{served.port} .*a port of its own"):
        serve_metrics(served.port, registry=other, account=made_up)
    register(other, made_up).close()
    served.close()
    served.close()
    register(registry, made_up).close()


def test_metrics_that_cannot_have_a_thread_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, port = CollectorRegistry(), free_port()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            serve_metrics(port, registry=registry, account=made_up)
    serve_metrics(port, registry=registry, account=made_up).close()


# Metrics of a real group


_served: list[ServedMetrics] = []


def begin() -> int:
    _served.append(serve_metrics(0))
    return _served[0].port


def end() -> None:
    _served.pop().close()


def use() -> None:
    rpc_sync("worker1", torch.add, (torch.ones(100_000), 1))
    rpc_sync("worker1", torch.mul, (torch.ones(10), torch.ones(1, 2_000)[:, :10]))
    rpc_async("worker1", abs, (-1,)).wait()
    for _ in range(3):
        with pytest.raises(ValueError, match="invalid literal"):
            rpc_sync("worker1", int, ("none",))
    remote("worker1", abs, (-1,)).to_here()
    with autograd.context() as context:
        autograd.backward(context, rpc_sync("worker1", torch.sum, (torch.ones(2, requires_grad=True),)))


def test_two_workers_count_their_calls(workers: list[Process]) -> None:
    pytest.importorskip("telegrad.reporting.introspection")
    ports = [worker.run(begin) for worker in workers[:2]]
    try:
        workers[0].run(use)
        caller, callee = map(scrape, ports)
        told = {
            ("telegrad_calls_total", "torch.add", "ok", "worker1"): 1, ("telegrad_phase", "member"): 1,
            ("telegrad_calls_total", "builtins.int", "raised", "worker1"): 3, ("telegrad_passes_total", "ok"): 1,
            ("telegrad_call_bytes_total", "torch.add"): 400_000, ("telegrad_members",): 4, ("telegrad_size",): 4,
            ("telegrad_call_bytes_total", "torch.mul"): 80,  # so small ones are part of the message's body
        }  # fmt: skip
        assert {name: caller[name] for name in told} == told
        assert caller["telegrad_call_duration_seconds_count", "builtins.abs"] >= 1
        assert callee["telegrad_phase", "member"] == callee["telegrad_served_total", "torch.add", "ok", "worker0"] == 1
        assert callee["telegrad_served_total", "builtins.int", "ValueError", "worker0"] == 3
        assert callee[("telegrad_answered_total",)] >= 6
        assert callee["telegrad_received_bytes_total", "worker0"] > 400_000
        assert callee[("telegrad_resident_memory_bytes",)] > 1 << 20
    finally:
        for worker in workers[:2]:
            worker.run(end)
