"""Split the output of a process into lines."""

from __future__ import annotations

from math import inf

PATIENCE = 1.0  # seconds until an incomplete line is shown
LONGEST = 1 << 16  # bytes


class LineBuffer:
    """The lines of one stream. Of a line overwritten after carriage returns, only the last version is shown."""

    def __init__(self) -> None:
        self._rest = b""
        self.due = inf  # when the incomplete line is to be shown

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Add data; return the lines that are complete now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= LONGEST:
            whole.append(self._rest)
            self._rest = b""
        if not self._rest:
            self.due = inf
        elif whole or self.due == inf:
            self.due = now + PATIENCE
        return [_seen(line) for line in whole]

    def look(self, now: float) -> list[bytes]:
        """Return the incomplete line if it is due."""
        return self.flush() if now >= self.due else []

    def flush(self) -> list[bytes]:
        """Return the incomplete line."""
        rest, self._rest, self.due = self._rest, b"", inf
        return [_seen(rest)] if rest else []


def _seen(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
