"""The record of each process of a schedule, written line by line, so that none of it is lost if it is killed."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple


class Life(NamedTuple):
    """A life of a worker in the group: a process may leave, and come back under its name."""

    name: str
    pid: int
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}, life {self.number})"


class Note(NamedTuple):
    """A line of a record."""

    at: float  # of the clock that all processes of a host share
    life: Life
    what: str
    told: list[Any]


class Record:
    """The file of one process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.life = Life(name, os.getpid())
        self._file = os.open(folder / f"{name}-{os.getpid()}.record", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, what: str, *told: Any) -> None:
        os.write(self._file, (json.dumps([monotonic(), self.life, what, told]) + "\n").encode())


class Reader:
    """A reader of all notes in a folder while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.notes: list[Note] = []

    def look(self) -> list[Note]:
        """Return all notes so far, in order."""
        for path in self._folder.glob("*.record"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + (len(whole) + 1 if whole else 0)
            self.notes += _parsed(whole)
        self.notes.sort(key=lambda note: note.at)
        return self.notes


def _parsed(lines: bytes) -> Iterator[Note]:
    for line in lines.splitlines():
        at, life, what, told = json.loads(line)
        yield Note(at, Life(*life), what, told)
