"""A receiver of what OpenTelemetry's exporter sends over HTTP."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.cluster import PATIENCE


class Collector:
    """What has come: spans and metrics, each with the name of the service that sent it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self.spans: list[tuple[str, Any]] = []
        self.metrics: list[tuple[str, Any]] = []

    def take(self, path: str, body: bytes) -> None:
        with self._changed:
            if path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    self.spans += [(_service(resource), span) for scope in resource.scope_spans for span in scope.spans]
            else:
                assert path == "/v1/metrics"
                for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    self.metrics += [
                        (_service(resource), each) for scope in resource.scope_metrics for each in scope.metrics
                    ]
            self._changed.notify_all()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE), (self.spans, self.metrics)


def _service(resource: Any) -> str:
    return next(each.value.string_value for each in resource.resource.attributes if each.key == "service.name")


@contextlib.contextmanager
def collector() -> Iterator[tuple[Collector, str]]:
    """One that listens, and where."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.take(self.path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield made, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(PATIENCE)
