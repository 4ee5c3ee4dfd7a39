"""Spans of calls, in one and several processes, with the real SDK."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NoReturn

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from torch import nn
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

import telegrad.autograd as autograd
from telegrad._core.calls import call_context, profiling
from telegrad.errors import CallTimeout
from telegrad.insight import opentelemetry
from telegrad.nn import Pipeline, RemoteModule
from telegrad.rpc import Future, functions, remote, rpc_async, rpc_sync
from tests.cluster import PATIENCE, Process, next_turn

pytestmark = pytest.mark.usefixtures("here")

tracer = trace.get_tracer("program")  # replaced by `begin`


class Exporter(InMemorySpanExporter):
    """Notifies tests of exported spans; spans of calls that are not awaited end at their own time."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        with self.changed:
            self.changed.notify_all()
            return super().export(spans)


class Seen:
    def __init__(self) -> None:
        self.exporter = Exporter()
        self.reader = InMemoryMetricReader()

    def span(self, name: str, kind: SpanKind) -> Any:
        with self.exporter.changed:
            assert self.exporter.changed.wait_for(lambda: (name, kind) in self.spans(), PATIENCE), self.names()
        return self.spans()[name, kind]

    def spans(self) -> dict[tuple[str, SpanKind], Any]:
        return {_key(each): each for each in self.exporter.get_finished_spans()}

    def names(self) -> list[str]:
        return sorted(each.name.rpartition(".")[2] for each in self.exporter.get_finished_spans())

    def parent(self, name: str, kind: SpanKind) -> tuple[str, SpanKind]:
        parent = self.span(name, kind).parent
        found: list[ReadableSpan] = []

        def find() -> bool:
            found[:] = [each for each in self.exporter.get_finished_spans() if each.context.span_id == parent.span_id]
            return bool(found)

        with self.exporter.changed:
            assert self.exporter.changed.wait_for(find, PATIENCE), self.names()
        return _key(found[0])

    def counts(self) -> dict[tuple[str, str], int]:
        data: Any = self.reader.get_metrics_data()
        return {
            (metric.name, str(point.attributes["rpc.method"]).rpartition(".")[2]): point.count
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }


def _key(span: ReadableSpan) -> tuple[str, SpanKind]:
    return span.name.rpartition(".")[2], span.kind


def begin() -> Seen:
    global tracer
    made, spans = Seen(), TracerProvider()
    spans.add_span_processor(SimpleSpanProcessor(made.exporter))
    tracer = spans.get_tracer("program")
    opentelemetry.instrument(spans, MeterProvider([made.reader]))
    return made


@pytest.fixture
def seen() -> Iterator[Seen]:
    yield begin()
    opentelemetry.uninstrument()


CLIENT, SERVER, INTERNAL = SpanKind.CLIENT, SpanKind.SERVER, SpanKind.INTERNAL


def inner(number: int) -> int:
    with tracer.start_as_current_span("work"):
        return number + 1


def outer(to: str, number: int) -> int:
    return rpc_sync(to, inner, (number,))


async def waits(number: int) -> int:
    with tracer.start_as_current_span("held"):
        await next_turn()
        with tracer.start_as_current_span("after"):
            await rpc_async("w2", inner, (number,))
    return number


@functions.async_execution
def later(to: str) -> Future[int]:
    return rpc_async(to, inner, (1,))


def fail(*_: Any) -> NoReturn:
    raise KeyError("as the test wants it\nand more")


async def fail_later() -> NoReturn:
    await next_turn()
    raise ValueError("later")


@functions.async_execution
def fail_by_future(to: str) -> Future[Any]:
    return rpc_async(to, fail)


_release = threading.Event()


def held() -> None:
    _release.wait(PATIENCE)


@functions.async_execution
def never() -> Future[int]:
    return Future()


class Counter:
    def add(self, number: int) -> int:
        return number + 1


def test_a_call_is_a_span_at_both_ends_with_inner_spans(seen: Seen) -> None:
    with tracer.start_as_current_span("program"):
        assert rpc_sync("w1", outer, ("w2", 1)) == 2
    way = [("work", INTERNAL), ("inner", SERVER), ("inner", CLIENT), ("outer", SERVER), ("outer", CLIENT)]
    for (name, kind), parent in zip(way, [*way[1:], ("program", INTERNAL)], strict=True):
        assert seen.parent(name, kind) == parent
    assert len({each.context.trace_id for each in seen.spans().values()}) == 1
    client, server = seen.spans()["outer", CLIENT], seen.spans()["outer", SERVER]
    assert client.name == server.name == f"{__name__}.outer"
    assert dict(client.attributes) == {
        "rpc.system.name": "telegrad", "rpc.method": f"{__name__}.outer", "server.address": "w1",
        "rpc.system": "telegrad", "rpc.service": __name__, "telegrad.worker": "w0",
    }  # fmt: skip
    assert server.attributes["server.address"] == server.attributes["telegrad.worker"] == "w1"
    assert server.attributes["client.address"] == "w0"
    assert seen.counts() == {
        (f"rpc.{side}.call.duration", name): 1 for side in ("client", "server") for name in ("inner", "outer")
    }


def test_every_way_to_call(seen: Seen) -> None:
    assert rpc_async("w1", inner, (1,)).wait() == 2
    assert seen.parent("inner", SERVER) == ("inner", CLIENT)
    counter = remote("w1", Counter)
    assert counter.to_here(PATIENCE)
    assert counter.rpc_sync().add(1) == counter.rpc_async().add(1).wait() == counter.remote().add(1).to_here() == 2
    counter.remote().add(1).future().wait()
    for name, side in (("Counter", CLIENT), ("Counter", SERVER), ("add", CLIENT), ("to_here", CLIENT)):
        assert seen.span(name, side).end_time
    assert rpc_sync("w0", inner, (1,)) == 2
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_coroutines_and_futures(seen: Seen) -> None:
    for no_grad in (False, True):  # with one more context around the call
        seen.exporter.clear()
        with torch.set_grad_enabled(not no_grad):
            assert rpc_sync("w1", waits, (1,)) == 1
        way = [("inner", CLIENT), ("after", INTERNAL), ("held", INTERNAL), ("waits", SERVER), ("waits", CLIENT)]
        for (name, kind), parent in pairwise(way):
            assert seen.parent(name, kind) == parent
    assert rpc_sync("w1", later, ("w2",)) == 2
    assert seen.parent("inner", CLIENT) == ("later", SERVER)
    spans = seen.spans()
    assert spans["later", SERVER].end_time >= spans["inner", SERVER].end_time


@pytest.mark.parametrize(
    ("function", "args", "kind", "text"),
    [
        (fail, (), "KeyError", "'as the test wants it"),
        (fail_later, (), "ValueError", "later"),
        (fail_by_future, ("w2",), "KeyError", "'as the test wants it"),
    ],
)
@pytest.mark.parametrize("call", [rpc_sync, lambda *args: rpc_async(*args).wait()])
def test_errors(seen: Seen, call: Callable[..., Any], function: Any, args: Any, kind: str, text: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        call("w1", function, args)
    for side in (CLIENT, SERVER):
        span = seen.span(function.__name__, side)
        assert span.status.status_code is StatusCode.ERROR
        assert text in span.status.description
        assert span.attributes["error.type"] == kind


def test_timeouts_and_failing_references(seen: Seen) -> None:
    with pytest.raises(CallTimeout):
        rpc_sync("w1", held, timeout=0.05)
    _release.set()
    with pytest.raises(CallTimeout):
        rpc_async("w1", never, timeout=0.05).wait()
    for name in ("held", "never"):
        assert seen.span(name, CLIENT).attributes["error.type"] == "CallTimeout"
    failing: Any = remote("w1", fail)
    with pytest.raises(KeyError):
        failing.to_here()
    assert seen.span("fail", CLIENT).attributes["error.type"] == "KeyError"


def test_with_a_profiler_at_the_same_time(seen: Seen) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as events:
        assert rpc_sync("w1", inner, (1,)) == rpc_async("w1", inner, (1,)).wait() == 2
    assert {"rpc_sync#inner(w0 -> w1)", "rpc_async#inner(w0 -> w1)"} <= {event.name for event in events.events()}
    assert seen.parent("inner", SERVER) == ("inner", CLIENT)


class Stage(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with tracer.start_as_current_span(f"stage {self.in_features}"):
            return super().forward(value)


def test_stages_of_a_pipeline_are_spans_of_the_trace(seen: Seen) -> None:
    pipeline = Pipeline([RemoteModule("w1", Stage, (4, 3)), RemoteModule("w2", Stage, (3, 2))], chunks=2)
    with tracer.start_as_current_span("step") as step, autograd.context() as context:
        pipeline.forward_backward(context, torch.randn(8, 4), torch.randn(8, 2), mse_loss)
    for name in ("stage 4", "stage 3"):
        assert seen.span(name, INTERNAL).context.trace_id == step.get_span_context().trace_id
        assert seen.parent(name, INTERNAL)[1] is SERVER


def test_uninstrument_removes_everything(seen: Seen) -> None:
    opentelemetry.uninstrument()
    assert profiling.follower is None
    assert profiling.wanted is profiling.enabled
    assert rpc_sync("w1", abs, (-1,)) == 1
    assert seen.names() == []


# Over several processes

_seen: list[Seen] = []
Told = tuple[str, SpanKind, int, int | None, int]  # name, kind, and the ids of the span, its parent and its trace


def begin_here() -> None:
    _seen.append(begin())


def end_here(count: int) -> list[Told]:
    """Return the spans of this process once there are `count`."""
    seen = _seen.pop()
    with seen.exporter.changed:
        assert seen.exporter.changed.wait_for(lambda: len(seen.exporter.get_finished_spans()) >= count, PATIENCE)
    opentelemetry.uninstrument()
    return [
        (*_key(span), span.context.span_id, span.parent.span_id if span.parent else None, span.context.trace_id)
        for span in seen.exporter.get_finished_spans()
    ]


def passes_on(to: str) -> tuple[int, list[str]]:
    return rpc_sync(to, inner, (1,)), list(call_context.baggage())


async def fails_there(to: str) -> Any:
    return await rpc_async(to, int, ("none",))


def program(to: str, function: Any, other: str) -> Any:
    with tracer.start_as_current_span("program"):
        return rpc_sync(to, function, (other,))


@pytest.mark.parametrize(
    ("to", "function", "other", "names", "counts"),
    [
        ("worker1", fails_there, "worker0", ["program", "fails_there", "fails_there", "int", "int"], (3, 2)),
        ("worker2", passes_on, "worker1", ["program", "passes_on", "inner", "work"], (2, 2)),  # worker2 has no spans
    ],
)
def test_one_trace_over_processes(
    workers: list[Process], to: str, function: Any, other: str, names: list[str], counts: tuple[int, int]
) -> None:
    for worker in workers[:2]:
        worker.run(begin_here)
    with pytest.raises(AssertionError, match="ValueError") if function is fails_there else nullcontext():
        assert workers[0].run(program, to, function, other) == (2, ["traceparent"])
    spans = [told for worker, count in zip(workers, counts, strict=False) for told in worker.run(end_here, count)]
    assert len({trace for *_, trace in spans}) == 1
    parents = {parent: (name, number) for name, _, number, parent, _ in spans}
    way, number = [], None
    while number in parents:
        name, number = parents[number]
        way.append(name)
    assert way == names  # each span is inside of the previous one
    assert len(spans) == len(names)


def test_no_spans_are_made_without_a_provider(workers: list[Process]) -> None:
    assert workers[3].run(_without_a_provider)


def _without_a_provider() -> bool:
    opentelemetry.instrument()
    try:
        return rpc_sync("worker2", abs, (-1,)) == 1 and not trace.get_current_span().is_recording()
    finally:
        opentelemetry.uninstrument()
