"""HTTP/1.1 over one connection, with a limit on each whole exchange, and streams that can be read on after a timeout.

`http.client` limits each read of the socket alone, so a server that sends a byte now and then holds its caller for
ever, and a response that has once timed out cannot be read any further. A watch needs both: it waits for the next line
of its response for a given time, and goes on with the same response later. `http_responses.py` parses.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Mapping

from telegrad.directory.http_responses import ResponseReader
from telegrad.transport.sockets import tune_tcp

READ_BYTES = 1 << 18


class Connection:
    """A connection to one server. One thread uses it at a time."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None, deadline: float) -> None:
        """Connect, with TLS where there is a context.

        Raises:
            OSError: nothing answers there, or not before the deadline, or TLS does not accept the other side.
        """
        self._host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._response = ResponseReader()
        self._sock = socket.create_connection((host, port), _left(deadline))
        try:
            tune_tcp(self._sock, 0.0)  # each exchange has its own limit
            if context:
                self._sock.settimeout(_left(deadline))
                self._sock = context.wrap_socket(self._sock, server_hostname=host)
        except BaseException:
            self._sock.close()
            raise

    def is_usable(self) -> bool:
        """Return False if the server has closed the connection, or has sent something that nobody asked for."""
        self._sock.settimeout(0)
        try:
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK)  # SSLSocket.recv takes no flags
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def post(self, path: str, body: bytes, headers: Mapping[str, str], deadline: float) -> None:
        """Send a request, whose response `read_all` or `read_line` reads.

        Raises:
            OSError: the connection broke, or the deadline came; the server may have the request all the same.
        """
        self._response = ResponseReader()
        lines = [f"POST {path} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        data = memoryview("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        while data:
            self._sock.settimeout(_left(deadline))
            data = data[self._sock.send(data) :]

    def read_all(self, deadline: float) -> tuple[int, bytes]:
        """Return the status and the body of the response.

        Raises:
            OSError: the connection broke, or the deadline came.
        """
        while not self._response.is_over:
            self._receive(deadline)
        return self._response.status, bytes(self._response.body)

    def read_line(self, deadline: float) -> bytes:
        """Return the next line of the response, or what is left of it at its end: b"" where nothing is.

        Raises:
            TimeoutError: the deadline came; the line can be waited for again.
            OSError: the connection broke.
        """
        body = self._response.body
        seen = 0
        while (end := body.find(b"\n", seen)) < 0 and not self._response.is_over:
            seen = len(body)
            self._receive(deadline)
        line = bytes(body[: end + 1] if end >= 0 else body)
        del body[: len(line)]
        return line

    @property
    def keeps(self) -> bool:
        """Whether the connection can carry another request, now that the response is read."""
        return self._response.is_over and self._response.keeps_connection

    @property
    def status(self) -> int:
        """The status of the response; 0 until it has begun."""
        return self._response.status

    def interrupt(self) -> None:
        """Wake the thread that uses the connection, which gets an OSError. May be called from any thread."""
        # Not `SSLSocket.shutdown`, which takes the TLS state away from the thread that reads.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _receive(self, deadline: float) -> None:
        self._sock.settimeout(_left(deadline))
        self._response.push(self._sock.recv(READ_BYTES))


def _left(deadline: float) -> float:
    """Return the seconds until a deadline.

    Raises:
        TimeoutError: it has come.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
