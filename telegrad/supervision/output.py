"""Where what workers print goes: to this program's own streams, behind their names, and into a file for each."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO

LAST_LINES = 10  # of a worker, in the message that it has ended the group
NAME = "telegrad"  # before lines of our own
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # as terminals number them; red is for ourselves
_OURS = 31


class Output:
    """One folder for each run, and `latest` leads to it."""

    def __init__(self, folder: str) -> None:
        """Make the folder.

        Raises:
            OSError: it cannot be made.
        """
        self.folder = _fresh(Path(folder))
        self._streams: dict[str, IO[bytes]] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
        self._coloured = {stream: _takes_colours(file) for stream, file in self._streams.items()}
        self._files: dict[str, IO[bytes]] = {}
        self._colours: dict[str, int] = {NAME: _OURS}
        self._last: dict[str, deque[bytes]] = {}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def raw(self, name: str, data: bytes) -> None:
        """What a worker has printed, for its file."""
        with contextlib.suppress(OSError):  # the disk is full: the others must not end for that
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = open(self.path(name), "ab", buffering=0)  # noqa: SIM115
            file.write(data)

    def line(self, name: str, stream: str, line: bytes) -> None:
        """A line of it, for whoever looks on."""
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._last.setdefault(name, deque(maxlen=LAST_LINES)).append(line)
        prefix = f"\033[{colour}m[{name}]\033[0m " if self._coloured[stream] else f"[{name}] "
        with contextlib.suppress(OSError, ValueError):  # who looked on has gone
            self._streams[stream].write(prefix.encode() + line + b"\n")
            self._streams[stream].flush()

    def say(self, text: str) -> None:
        """A line of our own."""
        for line in text.splitlines():
            self.line(NAME, "stderr", line.encode())
        self.raw(NAME, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

    def last_lines(self, name: str) -> str:
        return "".join(f"\n    {line.decode(errors='replace')}" for line in self._last.get(name, ()))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _fresh(folder: Path) -> Path:
    stem = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1000):
        own = folder / (f"{stem}_{number}" if number else stem)
        with contextlib.suppress(FileExistsError):
            own.mkdir(parents=True)
            break
    with contextlib.suppress(OSError):  # the system has no links, or another run does the same
        fresh = folder / f".{own.name}"
        fresh.symlink_to(own.name)
        fresh.replace(folder / "latest")
    return own


def _takes_colours(stream: IO[bytes]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
