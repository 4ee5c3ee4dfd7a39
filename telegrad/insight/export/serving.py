"""An HTTP server that idle and slow clients cannot exhaust, for the dashboard and for metrics."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from telegrad.ext.processes import Thread, family_of, forks

MOST_CONNECTIONS = 64  # each has a thread; a browser makes six at most
LONGEST_CONNECTION = 60.0  # seconds, for a request to come and its answer to be taken


class BoundedServer(ThreadingHTTPServer):
    """Serves each connection on a thread, of which there are at most MOST_CONNECTIONS, for LONGEST_CONNECTION each."""

    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        """Listen; `start` serves.

        Raises:
            OSError: this process cannot listen at that host and port.
            OverflowError: there is no such port.
        """
        self.address_family = family_of(host)
        self._lock = threading.Lock()  # guards _ends
        self._ends: dict[socket.socket, float] = {}  # open connections, the oldest first: when each is ended
        super().__init__((host, port), handler)
        self._thread: threading.Thread | None = None
        self._depth = forks.depth

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self, name: str) -> None:
        """Serve, on a thread of that name, until `stop`."""
        self._thread = Thread(target=self.serve_forever, args=(0.1,), name=name)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and wait until the thread has ended. In a forked child, only close the child's socket."""
        if self._thread is not None and self._depth == forks.depth:
            self.shutdown()
            self._thread.join()
        self.server_close()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks up the host's name, which may take long

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; where there are too many, end the oldest, which is the likeliest to be idle."""
        with self._lock:
            oldest = next(iter(self._ends), None) if len(self._ends) >= MOST_CONNECTIONS else None
            if oldest is not None:
                self._end(oldest)
            self._ends[request] = time.monotonic() + LONGEST_CONNECTION
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End the connections that last for too long; called several times a second."""
        now = time.monotonic()
        with self._lock:
            for late in [sock for sock, until in self._ends.items() if until < now]:
                self._end(late)

    def _end(self, sock: socket.socket) -> None:
        """With the lock held: have the connection's thread read and write no more."""
        del self._ends[sock]
        with contextlib.suppress(OSError):  # the thread has just closed it
            sock.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):  # else, the client has closed it
            super().handle_error(request, client_address)
