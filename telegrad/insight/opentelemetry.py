"""Traces and metrics of calls, for OpenTelemetry.

`instrument()` makes a client span around each call that this worker makes, and a server span around each that it runs.
The context of the first travels with the call, so the spans of one request make one trace over all workers, and spans
that a function makes by itself are inside of its server span. Names follow the conventions for remote calls:
`rpc.method` is the function, `server.address` the worker that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from types import CoroutineType
from typing import Any, TypeVar

import torch

from telegrad.agent import profiling, scene
from telegrad.agent.futures import Future, Signal
from telegrad.agent.naming import user_name
from telegrad.agent.profiling import Event
from telegrad.agent.server import ASYNC_MARK, Later
from telegrad.insight.labels import without_object
from telegrad.version import VERSION
from telegrad.wire.stories import first_line

try:
    from opentelemetry import context, propagate
    from opentelemetry.context import Context
    from opentelemetry.metrics import Histogram, MeterProvider, get_meter
    from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider, get_tracer, set_span_in_context
except ImportError as error:
    raise ImportError("traces for OpenTelemetry need its API: pip install 'telegrad[opentelemetry]'") from error

T = TypeVar("T")

SYSTEM = "telegrad"
# The bounds that the conventions advise, in seconds, and finer ones below, since calls take some 30 microseconds.
BOUNDS = (0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


def instrument(tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """From now on, make spans and metrics of this process's calls.

    It may come before or after `init_rpc`. Workers that are not instrumented pass on what they get.

    Args:
        tracer_provider: what makes the spans; left out, the one that the program has set.
        meter_provider: what makes the metrics; left out, the one that the program has set.
    """
    profiling.follow(Tracing(tracer_provider, meter_provider))


def uninstrument() -> None:
    """No longer; spans that have begun still end."""
    profiling.follow(None)


class Tracing:
    """A follower of calls."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self._tracer = get_tracer("telegrad", VERSION, tracer_provider)
        meter = get_meter("telegrad", VERSION, meter_provider)
        self._client = meter.create_histogram(
            "rpc.client.call.duration",
            "s",
            "How long calls took, as their callers saw it",
            explicit_bucket_boundaries_advisory=BOUNDS,
        )
        self._server = meter.create_histogram(
            "rpc.server.call.duration",
            "s",
            "How long functions ran that others called",
            explicit_bucket_boundaries_advisory=BOUNDS,
        )

    # At the caller

    def called(self, event: Event, call: Callable[[], T]) -> T:
        leg = self._leg_of(event)
        with leg.current():
            value = call()
        leg.end()
        return value

    def begun(self, event: Event, call: Callable[[], tuple[T, Future[Any]]]) -> T:
        leg = self._leg_of(event)
        with leg.current():
            value, future = call()
        leg.end_with(future)
        return value

    def _leg_of(self, event: Event) -> Leg:
        told = {"telegrad.worker": event.here}
        return self._leg(
            SpanKind.CLIENT, self._client, without_object(user_name(event.function)), event.there, told, None
        )

    def baggage(self) -> dict[str, str]:
        told: dict[str, str] = {}
        propagate.inject(told)
        return told

    # At the callee

    def in_place_of(
        self, function: Callable[..., Any], args: Sequence[Any], here: str, caller: str
    ) -> Callable[..., Any]:
        name = without_object(user_name(function, args))

        def run(*args: Any, **kwargs: Any) -> Any:
            told = {"telegrad.worker": here, "client.address": caller}
            leg = self._leg(SpanKind.SERVER, self._server, name, here, told, propagate.extract(scene.baggage()))
            with leg.current():
                result = function(*args, **kwargs)
            if type(result) is CoroutineType:
                return leg.around(result)
            future = result.future if type(result) is Later else result
            if isinstance(future, torch._C.Future | Signal) and (future is not result or hasattr(function, ASYNC_MARK)):
                leg.end_with(future)
            else:
                leg.end()
            return result

        return run

    def resumed(self, baggage: dict[str, str]) -> AbstractContextManager[None]:
        return _attached(propagate.extract(baggage))

    def _leg(
        self,
        kind: SpanKind,
        lasted: Histogram,
        method: str,
        server: str,
        told: dict[str, str],
        parent: Context | None,
    ) -> Leg:
        common = {"rpc.system.name": SYSTEM, "rpc.method": method, "server.address": server}
        # Their older names, for what reads only those.
        older = {"rpc.system": SYSTEM, "rpc.service": method.rpartition(".")[0] or SYSTEM}
        span = self._tracer.start_span(method, parent, kind, {**common, **older, **told})
        return Leg(span, set_span_in_context(span, parent), lasted, common)


class Leg:
    """One side of a call, as a span and an entry in a histogram."""

    def __init__(self, span: Any, inside: Context, lasted: Histogram, attributes: dict[str, str]) -> None:
        """`inside` is the context of what happens within."""
        self._span = span
        self._inside = inside
        self._lasted = lasted
        self._attributes = attributes
        self._begun = perf_counter()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside, the span is that of this thread; it ends with what is raised there, and only then."""
        try:
            with _attached(self._inside):
                yield
        except BaseException as error:
            self._span.record_exception(error)
            self._fail(error)
            self.end()
            raise

    async def _awaited(self, inner: Coroutine[Any, Any, Any]) -> Any:
        # Attached once, as this runs in a task of its own: spans that the function holds across waits stay current.
        with self.current():
            value = await inner
        self.end()
        return value

    def around(self, inner: CoroutineType[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """A coroutine that does what that one does, inside."""
        made: Any = self._awaited(inner)
        made.__qualname__ = inner.__qualname__  # by which errors name the function
        return made  # type: ignore[no-any-return]

    def end_with(self, future: torch._C.Future[Any] | Signal) -> None:
        """Have it end when a future is done."""
        if isinstance(future, Signal):
            future.add_done_callback(self._done)
        else:
            torch._C.Future.add_done_callback(future, self._done)  # with torch's own, a failure counts as unseen still

    def _done(self, future: Any) -> None:
        failure = getattr(future, "failure", None)
        if failure is not None:
            self._fail_by(failure.kind, failure.text)
        else:
            try:
                future.wait()
            except BaseException as error:
                self._fail(error)
        self.end()

    def _fail(self, error: BaseException) -> None:
        self._fail_by(type(error).__name__, first_line(error))

    def _fail_by(self, kind: str, text: str) -> None:
        self._attributes["error.type"] = kind
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, text))

    def end(self) -> None:
        self._span.end()
        self._lasted.record(perf_counter() - self._begun, self._attributes, context=self._inside)


@contextmanager
def _attached(inside: Context) -> Iterator[None]:
    token = context.attach(inside)
    try:
        yield
    finally:
        context.detach(token)
