"""Responses of HTTP/1.1, parsed as they arrive. No I/O."""

from __future__ import annotations

from collections.abc import Generator

LONGEST_LINE = 1 << 16  # bytes of the status line, a header or the size of a chunk


class BadResponse(ConnectionError):
    """The server sent something that is not an HTTP/1.1 response."""


class ResponseReader:
    """Parse one response: `push` what arrives, then look at `status`, `body` and `is_over`."""

    def __init__(self) -> None:
        self.status = 0  # 0 until the status line is there
        self.body = bytearray()  # what has arrived and was not taken yet; the reader only appends
        self.is_over = False
        self.keeps_connection = True  # False: the server closes the connection after this response
        self._buffer = bytearray()
        self._ended = False
        self._parsing = self._parse()
        next(self._parsing)

    def push(self, data: bytes) -> None:
        """Parse what has arrived; b"" says that the server has closed the connection.

        Raises:
            BadResponse: it is no response, or it ends within.
        """
        self._buffer += data
        self._ended = not data
        if not self.is_over:
            next(self._parsing, None)
        if self._ended and not self.is_over:
            raise BadResponse("the connection was closed within a response")

    def _parse(self) -> Generator[None, None, None]:
        line = yield from self._line()
        version, _, rest = line.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise BadResponse(f"the server does not speak HTTP/1.1: {line[:40]!r}")
        self.status = int(rest[:3])
        headers: dict[bytes, bytes] = {}
        while line := (yield from self._line()):
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        self.keeps_connection = version != b"HTTP/1.0" and headers.get(b"connection", b"").lower() != b"close"
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            yield from self._parse_chunks()
        elif b"content-length" in headers:
            self.body += yield from self._exactly(_number(headers[b"content-length"], 10))
        else:  # the body ends with the connection
            self.keeps_connection = False
            while not self._ended:
                yield
            self.body += self._buffer
        self.is_over = True

    def _parse_chunks(self) -> Generator[None, None, None]:
        while size := _number((yield from self._line()).partition(b";")[0], 16):
            self.body += yield from self._exactly(size)
            yield from self._line()
        while (yield from self._line()):  # trailers
            pass

    def _line(self) -> Generator[None, None, bytes]:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > LONGEST_LINE:
                raise BadResponse("the server sent a header that does not end")
            yield
        return bytes((yield from self._exactly(end + 2))[:-2])

    def _exactly(self, count: int) -> Generator[None, None, bytes]:
        while len(self._buffer) < count:
            yield
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data


def _number(digits: bytes, base: int) -> int:
    try:
        return int(digits, base)
    except ValueError:
        raise BadResponse(f"the server sent {digits[:40]!r} where a number of bytes belongs") from None
