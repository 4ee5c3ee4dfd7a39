"""What a process prints, cut into lines."""

from __future__ import annotations

from math import inf

PATIENCE = 1.0  # seconds until what has no end yet is shown as it stands
LONGEST = 1 << 16  # bytes


class Lines:
    """Of one stream. A line that a carriage return writes anew is shown as a terminal would: as it was last."""

    def __init__(self) -> None:
        self._rest = b""
        self.due = inf  # when the rest is to be shown, unless it has ended by then

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Those that have ended by this."""
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
        """The rest, where it is time."""
        return self.flush() if now >= self.due else []

    def flush(self) -> list[bytes]:
        """The rest."""
        rest, self._rest, self.due = self._rest, b"", inf
        return [_seen(rest)] if rest else []


def _seen(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
