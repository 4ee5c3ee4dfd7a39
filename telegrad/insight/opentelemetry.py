"""Traces and metrics of calls, for OpenTelemetry.

`instrument()` makes a client span around each outgoing call of this worker, and a server span around each function that
it serves. The client span's context is sent with the call, so the spans of one request form one trace over all workers.
Spans that a function makes itself are children of its server span. Names follow the conventions for RPC: `rpc.method`
is the function, `server.address` the worker that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from time import perf_counter
from types import CoroutineType
from typing import Any, TypeVar

import torch

from telegrad.ext.calls import ASYNC_MARK, CallEvent, Deferred, Future, Signal, call_context, profiling, user_name
from telegrad.ext.values import first_line
from telegrad.insight.phrases import function_label
from telegrad.version import VERSION

try:
    from opentelemetry import context, propagate
    from opentelemetry.context import Context
    from opentelemetry.metrics import Histogram, MeterProvider, get_meter
    from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider, get_tracer, set_span_in_context
except ImportError as error:
    raise ImportError("traces for OpenTelemetry need its API: pip install 'telegrad[opentelemetry]'") from error

T = TypeVar("T")
Attributes = tuple[dict[str, str], dict[str, str]]

SYSTEM = "telegrad"
# The bounds of the conventions, in seconds, and finer ones below, because calls take about 30 microseconds.
BOUNDS = (0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


def instrument(tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Start making spans and metrics of this process's calls.

    It may be called before or after `init_rpc`. Workers that are not instrumented forward the context they receive.

    Args:
        tracer_provider: the provider of spans; by default the one that the program has set.
        meter_provider: the provider of metrics; by default the one that the program has set.
    """
    profiling.follow(SpanTracer(tracer_provider, meter_provider))


def uninstrument() -> None:
    """Stop making spans and metrics; spans that have begun still end."""
    profiling.follow(None)


class SpanTracer:
    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self._tracer = get_tracer("telegrad", VERSION, tracer_provider)
        meter = get_meter("telegrad", VERSION, meter_provider)
        self._client, self._server = (
            meter.create_histogram(f"rpc.{side}.call.duration", "s", text, explicit_bucket_boundaries_advisory=BOUNDS)
            for side, text in (
                ("client", "Duration of calls, as their callers measured it"),
                ("server", "Duration of functions that other workers called"),
            )
        )

    # At the caller

    def called(self, event: CallEvent, call: Callable[[], T]) -> T:
        span = self._client_span(event)
        with span:
            value = call()
        span.end()
        return value

    def begun(self, event: CallEvent, call: Callable[[], tuple[T, Future[Any]]]) -> T:
        span = self._client_span(event)
        with span:
            value, future = call()
        span.end_with(future)
        return value

    def _client_span(self, event: CallEvent) -> CallSpan:
        method = function_label(user_name(event.function))
        return self._span(SpanKind.CLIENT, self._client, _attributes(method, event.there, event.here, ""), None)

    def baggage(self) -> dict[str, str]:
        told: dict[str, str] = {}
        propagate.inject(told)
        return told

    # At the callee

    def in_place_of(
        self, function: Callable[..., Any], args: Sequence[Any], here: str, caller: str
    ) -> Callable[..., Any]:
        attributes = _attributes(function_label(user_name(function, args)), here, here, caller)

        def run(*args: Any, **kwargs: Any) -> Any:
            span = self._span(SpanKind.SERVER, self._server, attributes, propagate.extract(call_context.baggage()))
            with span:
                result = function(*args, **kwargs)
            if type(result) is CoroutineType:
                return span.around(result)
            # The same distinction as in `Server._serve`: a future is the end of the call only if the function was
            # marked by `async_execution` (or is a `Deferred`). Any other future is a value like others.
            future = result.future if type(result) is Deferred else result
            if isinstance(future, torch._C.Future | Signal) and (future is not result or hasattr(function, ASYNC_MARK)):
                span.end_with(future)
            else:
                span.end()
            return result

        return run

    def resumed(self, baggage: dict[str, str]) -> Attached:
        return Attached(propagate.extract(baggage))

    def _span(self, kind: SpanKind, lasted: Histogram, attributes: Attributes, parent: Context | None) -> CallSpan:
        common, all_of_them = attributes
        span = self._tracer.start_span(common["rpc.method"], parent, kind, all_of_them)
        return CallSpan(span, set_span_in_context(span, parent), lasted, common)


@lru_cache(4096)
def _attributes(method: str, server: str, here: str, caller: str) -> Attributes:
    """Return the attributes for a histogram entry, and those for a span; `caller` is empty on the caller's side."""
    common = {"rpc.system.name": SYSTEM, "rpc.method": method, "server.address": server}
    # The older names, for tools that read only those.
    older = {"rpc.system": SYSTEM, "rpc.service": method.rpartition(".")[0] or SYSTEM}
    client = {"client.address": caller} if caller else {}
    return common, {**common, **older, "telegrad.worker": here, **client}


class Attached:
    """A context manager that makes an OpenTelemetry context current in this thread."""

    def __init__(self, inside: Context) -> None:
        self._inside = inside

    def __enter__(self) -> None:
        self._token = context.attach(self._inside)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        context.detach(self._token)


class CallSpan(Attached):
    """One side of a call, as a span and a histogram entry. Inside its `with` block it is the current span of this
    thread. An exception that leaves the block ends it; otherwise `end` or `end_with` does."""

    def __init__(self, span: Any, inside: Context, lasted: Histogram, attributes: dict[str, str]) -> None:
        super().__init__(inside)
        self._span = span
        self._lasted = lasted
        self._attributes = attributes
        self._begun = perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if error is not None:
            self._span.record_exception(error)
            self._fail(type(error).__name__, first_line(error))
            self.end()

    async def _awaited(self, inner: Coroutine[Any, Any, Any]) -> Any:
        # Attached once, because this runs in its own task: spans that the function holds across waits stay current.
        with self:
            value = await inner
        self.end()
        return value

    def around(self, inner: CoroutineType[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        made: Any = self._awaited(inner)
        made.__qualname__ = inner.__qualname__  # errors name the function by it
        return made  # type: ignore[no-any-return]

    def end_with(self, future: torch._C.Future[Any] | Signal) -> None:
        if isinstance(future, Signal):
            future.add_done_callback(self._done)
        else:
            # Use torch's own method: the failure then still counts as unretrieved.
            torch._C.Future.add_done_callback(future, self._done)

    def _done(self, future: Any) -> None:
        failure: Any = getattr(future, "failure", None)
        # A future of this package has its failure as text. `wait` would mark the failure as retrieved, and an error
        # that the program never retrieves would not be logged.
        if hasattr(failure, "kind"):
            self._fail(failure.kind, failure.text)
        else:
            try:
                future.wait()
            except BaseException as error:
                self._fail(type(error).__name__, first_line(error))
        self.end()

    def _fail(self, kind: str, text: str) -> None:
        self._attributes = {**self._attributes, "error.type": kind}
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, text))

    def end(self) -> None:
        self._span.end()
        self._lasted.record(perf_counter() - self._begun, self._attributes, context=self._inside)
