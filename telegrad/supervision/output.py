"""Where what workers print goes: to this program's own streams, behind their names, and into a file for each."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
from collections import deque
from collections.abc import Sequence
from io import RawIOBase
from pathlib import Path

from telegrad.ext.files import create, make_folder

LAST_LINES = 10  # of a worker, in the message that it has ended the group
MOST_ALIKE = 1000  # folders of runs that begin in one second
STREAMS = {"stdout": 1, "stderr": 2}
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
        self.folder = _fresh(folder)
        self._coloured = {stream: _takes_colours(descriptor) for stream, descriptor in STREAMS.items()}
        self._files: dict[str, RawIOBase] = {}
        self._colours: dict[str, int] = {NAME: _OURS}
        self._last: dict[str, deque[bytes]] = {}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def raw(self, name: str, data: bytes) -> None:
        """What a worker has printed, for its file."""
        with contextlib.suppress(OSError):  # the disk is full: the others must not end for that
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = create(self.path(name)).detach()
            file.write(data)

    def lines(self, name: str, stream: str, lines: Sequence[bytes]) -> None:
        """Lines of it, for whoever looks on."""
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._last.setdefault(name, deque(maxlen=LAST_LINES)).extend(lines)
        prefix = f"\033[{colour}m[{name}]\033[0m " if self._coloured[stream] else f"[{name}] "
        with contextlib.suppress(OSError):  # who looked on has gone
            _write(STREAMS[stream], b"".join(prefix.encode() + line + b"\n" for line in lines))

    def say(self, text: str) -> None:
        """A line of our own."""
        self.lines(NAME, "stderr", text.encode().splitlines())
        self.raw(NAME, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

    def last_lines(self, name: str) -> str:
        return "".join(f"\n    {line.decode(errors='replace')}" for line in self._last.get(name, ()))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _fresh(folder: str) -> Path:
    """Make a folder that nobody else has made, and have `latest` lead to it; others may write in `folder`."""
    above = Path(make_folder(folder))
    stem = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(MOST_ALIKE):
        own = above / (f"{stem}_{number}" if number else stem)
        try:
            own.mkdir()
            break
        except FileExistsError:
            if number == MOST_ALIKE - 1:
                raise
    with contextlib.suppress(OSError):  # the system has no links, or `latest` is another user's
        fresh = above / f".latest-{secrets.token_hex(8)}"
        fresh.symlink_to(own.name)
        fresh.replace(above / "latest")
    return Path(folder) / own.name


def _write(descriptor: int, data: bytes) -> None:
    """All of it, also where others who have the terminal made it return at once."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select((), (descriptor,), ())


def _takes_colours(descriptor: int) -> bool:
    return os.isatty(descriptor) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
