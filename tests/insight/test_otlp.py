"""One trace over several processes, as a collector gets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from telegrad.agent import scene
from telegrad.insight import opentelemetry
from telegrad.rpc import get_worker_info, rpc_async, rpc_sync
from tests.cluster import Process
from tests.insight.collector import Collector, collector

CLIENT, SERVER, INTERNAL = Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL

_providers: list[Any] = []


def begin(place: str) -> None:
    """Instrument this process, as a program would."""
    resource = Resource.create({"service.name": get_worker_info().name})
    spans = TracerProvider(resource=resource)
    spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{place}/v1/traces")))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{place}/v1/metrics"))
    _providers[:] = [spans, MeterProvider([reader], resource=resource)]
    opentelemetry.instrument(*_providers)


def flush() -> None:
    for provider in _providers:
        provider.force_flush()


def end() -> None:
    opentelemetry.uninstrument()
    for provider in _providers:
        provider.shutdown()


def leaf() -> int:
    with _providers[0].get_tracer("program").start_as_current_span("work"):
        return 1


def passes_on(to: str) -> tuple[int, list[str]]:
    return rpc_sync(to, leaf), list(scene.baggage())


async def fails_there(to: str) -> Any:
    return await rpc_async(to, int, ("none",))


def program(*way: str) -> Any:
    with _providers[0].get_tracer("program").start_as_current_span("program"):
        last, *before = reversed(way)
        return rpc_sync(before[0], passes_on, (last,)) if before else rpc_sync(last, fails_there, ("worker0",))


@pytest.fixture
def received(workers: list[Process]) -> Iterator[Collector]:
    """What workers 0 and 1 send; worker 2 knows nothing of it."""
    with collector() as (made, place):
        for worker in workers[:2]:
            worker.run(begin, place)
        try:
            yield made
        finally:
            for worker in workers[:2]:
                worker.run(end)


def as_tree(received: Collector) -> dict[tuple[str, str, int], Any]:
    """Of each span by its service, the last part of its name and its kind: the one that it is in."""
    keys = {span.span_id: (service, span.name.rpartition(".")[2], span.kind) for service, span in received.spans}
    return {keys[span.span_id]: keys.get(span.parent_span_id) for _, span in received.spans}


def test_one_trace_across_two_processes(workers: list[Process], received: Collector) -> None:
    with pytest.raises(AssertionError, match="ValueError"):
        workers[0].run(program, "worker1")
    for worker in workers[:2]:
        worker.run(flush)
    received.wait_until(lambda: len(received.spans) == 5 and len(received.metrics) == 4)
    assert as_tree(received) == {
        ("worker0", "program", INTERNAL): None,
        ("worker0", "fails_there", CLIENT): ("worker0", "program", INTERNAL),
        ("worker1", "fails_there", SERVER): ("worker0", "fails_there", CLIENT),
        ("worker1", "int", CLIENT): ("worker1", "fails_there", SERVER),
        ("worker0", "int", SERVER): ("worker1", "int", CLIENT),
    }
    assert len({span.trace_id for _, span in received.spans}) == 1
    assert {span.status.code for _, span in received.spans} == {Status.STATUS_CODE_ERROR}
    found = {
        (service, metric.name, point.count)
        for service, metric in received.metrics
        for point in metric.histogram.data_points
    }
    sides = [f"rpc.{side}.call.duration" for side in ("client", "server")]
    assert found == {(worker, side, 1) for worker in ("worker0", "worker1") for side in sides}


def test_a_worker_without_it_passes_the_trace_on(workers: list[Process], received: Collector) -> None:
    assert workers[0].run(program, "worker2", "worker1") == (1, ["traceparent"])
    for worker in workers[:2]:
        worker.run(flush)
    received.wait_until(lambda: len(received.spans) == 4)
    assert as_tree(received) == {
        ("worker0", "program", INTERNAL): None,
        ("worker0", "passes_on", CLIENT): ("worker0", "program", INTERNAL),
        ("worker1", "leaf", SERVER): ("worker0", "passes_on", CLIENT),
        ("worker1", "work", INTERNAL): ("worker1", "leaf", SERVER),
    }


def test_without_a_provider_nothing_is_made(workers: list[Process]) -> None:
    assert workers[3].run(_without_a_provider)


def _without_a_provider() -> bool:
    opentelemetry.instrument()
    try:
        return rpc_sync("worker2", abs, (-1,)) == 1 and not trace.get_current_span().is_recording()
    finally:
        opentelemetry.uninstrument()
