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

from telegrad.ext.processes import Thread, family_of, forks, socket_address

MOST_CONNECTIONS = 64  # each has a thread; a browser opens at most six
LONGEST_CONNECTION = 60.0  # seconds to receive a request and send the response


class BoundedServer(ThreadingHTTPServer):
    """Serves each connection on its own thread, at most MOST_CONNECTIONS of them, for at most LONGEST_CONNECTION
    seconds."""

    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        """Listen; `start` serves.

        Raises:
            OSError: this process cannot listen at that host and port.
            OverflowError: there is no such port.
        """
        self.address_family = family_of(host)
        self._lock = threading.Lock()  # guards _ends
        self._ends: dict[socket.socket, float] = {}  # the deadline of each open connection, oldest first
        super().__init__(socket_address(host, port), handler)
        self._thread: threading.Thread | None = None
        self._depth = forks.depth

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self, name: str) -> None:
        """Serve on a thread of that name, until `stop`."""
        self._thread = Thread(target=self.serve_forever, args=(0.1,), name=name)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and wait for the thread to end. In a forked child, only close the child's socket."""
        if self._thread is not None and self._depth == forks.depth:
            self.shutdown()
            self._thread.join()
        self.server_close()

    def server_bind(self) -> None:
        # HTTPServer's method looks up the host's name, which may block for long.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; if there are too many, end the oldest, which is most likely idle."""
        with self._lock:
            oldest = next(iter(self._ends), None) if len(self._ends) >= MOST_CONNECTIONS else None
            if oldest is not None:
                self._end(oldest)
            self._ends[request] = time.monotonic() + LONGEST_CONNECTION
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections past their deadline. The server's loop calls this several times a second."""
        now = time.monotonic()
        with self._lock:
            for late in [sock for sock, until in self._ends.items() if until < now]:
                self._end(late)

    def _end(self, sock: socket.socket) -> None:
        """Make reads and writes of the connection's thread fail. The caller holds the lock."""
        del self._ends[sock]
        with contextlib.suppress(OSError):  # its thread has just closed it
            sock.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):  # else the client closed the connection
            super().handle_error(request, client_address)
