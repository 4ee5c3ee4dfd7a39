"""Which folders are complete checkpoints, which is the newest, and what is left of others; on the files alone.

The data of each save have names of their own, and its table of contents takes its place in one step, last of all. So a
folder is a complete checkpoint at any moment from its first one on: the older one until then, the newer one from then
on. What no table of contents names is a leftover. The table's time is later than that of all in the same place that
were there before, whatever the clocks say.

Others may write in the folder where checkpoints are. So each file is made new, under a name that nobody can guess; only
regular files are read; and only files are removed whose names are as this module makes them, none through a symlink. A
folder of other programs may have a table of contents, too, such as a checkpoint of torch's own: it is not removed.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from telegrad.ext.arguments import checks
from telegrad.ext.files import create, make_folder, open_regular, opened, resolved

Path = str | os.PathLike[str]

CONTENTS = ".metadata"  # the file that makes a folder a checkpoint
DATA = ".distcp"  # how the names of all others end
TEMPORARY = ".tmp"  # how the name of the former ends until it is complete
STEP = 1 << 26  # bytes that are read or written in one step at most
SYNC = 1 << 28  # bytes after which a file is written to the disk
_PART = re.compile(r"[0-9a-f]{16}__\d+_\d+\.distcp|\.metadata\.[0-9a-f]{16}\.tmp")  # besides the table of contents


class _InSteps(io.FileIO):
    """A file of which large parts are read and written in steps, so that others can see that it gets on.

    At its end torch has all of it written to the disk. That would be one long step, so parts are written before.
    """

    def __init__(self, file: io.BufferedIOBase, mode: str, note: Callable[[], None]) -> None:
        super().__init__(file.fileno(), mode, closefd=False)
        self._note = note
        self._unsynced = 0

    def write(self, data: Any) -> int:
        self._note()
        written = super().write(memoryview(data)[:STEP])
        self._unsynced += written
        if self._unsynced >= SYNC:
            os.fsync(self.fileno())
            self._unsynced = 0
        return written

    def readinto(self, buffer: Any) -> int:
        self._note()
        return super().readinto(memoryview(buffer)[:STEP])


class Files(FileSystem):
    """Those of torch's writers and readers: a new table of contents takes the place of an older one in one step."""

    def __init__(self, note: Callable[[], None]) -> None:
        """`note` is called at each step of a file."""
        super().__init__()
        self._note = note
        self._actual: dict[str, str] = {}  # of files for a time: torch's name for each, and the one that it has

    def init_path(self, path: Path) -> Path:
        return pathlib.Path(resolved(path))

    def mkdir(self, path: Path) -> None:
        make_folder(path)

    @contextlib.contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with open_regular(path) as opened, io.BufferedReader(_InSteps(opened, mode, self._note)) as stream:
                yield stream
            return
        actual = os.fspath(path)
        if actual.endswith(TEMPORARY):
            actual = f"{actual.removesuffix(TEMPORARY)}.{secrets.token_hex(8)}{TEMPORARY}"
            self._actual[os.fspath(path)] = actual
        with create(actual) as created, io.BufferedWriter(_InSteps(created, mode, self._note)) as stream:
            yield stream

    def exists(self, path: Path) -> bool:  # else torch's writer warns of it, and removes it first
        return False

    def rename(self, path: Path, new_path: Path) -> None:
        path = self._actual.pop(os.fspath(path), path)
        folder = os.path.dirname(os.path.abspath(new_path))
        newest = max((moment for moment, _ in _dated(os.path.dirname(folder))), default=0)
        now = os.stat(path).st_mtime_ns
        os.utime(path, ns=(now, max(now, newest + 1)))
        os.replace(path, new_path)
        _sync(folder)


def latest(folder: Path) -> str | None:
    """The newest complete checkpoint in a folder: that one itself, or one of those in it.

    It needs no group. Of several saves it is the one that was completed last.

    Args:
        folder: a path.

    Returns:
        The path of the checkpoint; None where there is none.

    Example:
        >>> from telegrad import checkpoint
        >>> saved = checkpoint.save({"epoch": 3}, "runs/3").wait()
        >>> checkpoint.latest("runs")
        'runs/3'
    """
    path = os.fspath(checks.path("folder", folder))
    found = _dated(path)
    if here := _completed(path):
        found.append((here, path))
    return max(found)[1] if found else None


def tidy(path: str, data: Collection[str]) -> None:
    """Remove what is left in a complete checkpoint of older ones; `data` are the names of its own files."""
    _remove_in(resolved(path), lambda name: _is_part(name) and name not in data)


def discard(path: str, mark: str) -> None:
    """Remove what a save has written that failed: its files begin with its `mark`."""
    _remove_in(resolved(path), lambda name: name.startswith(mark) or (_is_part(name) and not name.endswith(DATA)))
    with contextlib.suppress(OSError):  # something else is in it
        os.rmdir(path)


def keep_newest(path: str, count: int) -> None:
    """Of the complete checkpoints beside this one, with it, keep so many; remove what others left that were killed.

    Symlinks beside it, and where they lead to, stay; so do checkpoints that other programs have written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    found = sorted(each for each in _dated(folder, links=False) if _is_own(each[1]))
    for _, old in found[:-count]:
        _remove(old)
    begun = min(
        (os.stat(os.path.join(path, name)).st_mtime_ns for name in os.listdir(path) if _is_part(name)), default=0
    )
    complete = {name for _, name in found}
    for each in _folders(folder, links=False):
        if each not in complete and _is_leftover(each, begun):
            _remove(each)


def _dated(folder: str, links: bool = True) -> list[tuple[int, str]]:
    """The complete checkpoints in a folder, and when they were completed."""
    return [(moment, path) for path in _folders(folder, links) if (moment := _completed(path))]


def _completed(path: str) -> int:
    """When that was, in nanoseconds; 0 where it is no complete checkpoint."""
    try:
        found = os.stat(os.path.join(path, CONTENTS))
    except OSError:
        return 0
    return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else 0


def _is_own(path: str) -> bool:
    """Whether a complete checkpoint has data that `save` has written, and no other."""
    try:
        data = [name for name in os.listdir(path) if name.endswith(DATA)]
    except OSError:
        return False
    return bool(data) and all(map(_is_part, data))


def _is_leftover(path: str, begun: int) -> bool:
    """Whether a folder has nothing in it but what an incomplete save has written before `begun`."""
    try:
        with os.scandir(path) as entries:
            found = [(_is_part(each.name), each.stat(follow_symlinks=False).st_mtime_ns) for each in entries]
    except OSError:
        return False
    return bool(found) and all(ours and moment < begun for ours, moment in found)


def _folders(folder: str, links: bool) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [each.path for each in entries if each.is_dir(follow_symlinks=links)]
    except OSError:
        return []


def _is_part(name: str) -> bool:
    """Whether a file of that name is a part of a checkpoint of `save`, besides its table of contents."""
    return _PART.fullmatch(name) is not None


def _remove(path: str) -> None:
    """The table of contents goes first, so that half of a checkpoint is none."""
    _remove_in(path, CONTENTS.__eq__)
    _remove_in(path, _is_part)
    with contextlib.suppress(OSError):  # somebody has put something else into it
        os.rmdir(path)


def _remove_in(path: str, is_wanted: Callable[[str], bool]) -> None:
    with contextlib.suppress(OSError), opened(path) as folder:
        for name in filter(is_wanted, folder.names()):
            folder.remove(name)


def _sync(folder: str) -> None:
    """Have what its names lead to outlive the power."""
    with contextlib.suppress(OSError):  # not on each platform
        descriptor: Any = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
