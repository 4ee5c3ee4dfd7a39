"""Which folders are complete checkpoints, which is the newest, and what is left of others; on the files alone.

The data of each save have names of their own, and its table of contents takes its place in one step, last of all. So a
folder is a complete checkpoint at any moment from its first one on: the older one until then, the newer one from then
on. What no table of contents names is a leftover. The table's time is later than that of all in the same place that
were there before, whatever the clocks say.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

Path = str | os.PathLike[str]

CONTENTS = ".metadata"  # the file that makes a folder a checkpoint
DATA = ".distcp"  # how the names of all others end


class Files(FileSystem):
    """Those of torch's writers, but that a new table of contents takes the place of an older one in one step."""

    def exists(self, path: Path) -> bool:  # else torch's writer warns of it, and removes it first
        return False

    def rename(self, path: Path, new_path: Path) -> None:
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
    path = os.fspath(folder)
    found = _dated(path)
    if here := _completed(path):
        found.append((here, path))
    return max(found)[1] if found else None


def tidy(path: str, data: Collection[str]) -> None:
    """Remove what is left in a complete checkpoint of older ones; `data` are the names of its own files."""
    for name in _data_in(path):
        if name not in data:
            _remove_file(os.path.join(path, name))


def discard(path: str, mark: str) -> None:
    """Remove what a save has written that failed: its files begin with its `mark`."""
    for name in _data_in(path):
        if name.startswith(mark):
            _remove_file(os.path.join(path, name))
    with contextlib.suppress(OSError):  # something else is in it
        os.rmdir(path)


def keep_newest(path: str, count: int) -> None:
    """Of the complete checkpoints beside this one, with it, keep so many; remove what others left that were killed."""
    folder = os.path.dirname(os.path.abspath(path))
    found = sorted(_dated(folder))
    for _, old in found[:-count]:
        _remove(old)
    begun = min((os.stat(os.path.join(path, name)).st_mtime_ns for name in _data_in(path)), default=0)
    complete = {name for _, name in found}
    for each in _folders(folder):
        if each not in complete and _is_leftover(each, begun):
            _remove(each)


def _dated(folder: str) -> list[tuple[int, str]]:
    """The complete checkpoints in a folder, and when they were completed."""
    return [(moment, path) for path in _folders(folder) if (moment := _completed(path))]


def _completed(path: str) -> int:
    """When that was, in nanoseconds; 0 where it is no complete checkpoint."""
    try:
        return os.stat(os.path.join(path, CONTENTS)).st_mtime_ns
    except OSError:
        return 0


def _is_leftover(path: str, begun: int) -> bool:
    """Whether a folder has nothing in it but what an incomplete save has written before `begun`."""
    try:
        with os.scandir(path) as entries:
            found = [(each.name.endswith((DATA, ".tmp")), each.stat().st_mtime_ns) for each in entries]
    except OSError:
        return False
    return bool(found) and all(ours and moment < begun for ours, moment in found)


def _folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [each.path for each in entries if each.is_dir()]
    except OSError:
        return []


def _data_in(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(path) if name.endswith(DATA)]
    return []


def _remove(path: str) -> None:
    """The table of contents goes first, so that half of a checkpoint is none."""
    for name in (CONTENTS, f"{CONTENTS}.tmp", *_data_in(path)):
        _remove_file(os.path.join(path, name))
    with contextlib.suppress(OSError):  # somebody has put something else into it
        os.rmdir(path)


def _remove_file(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)


def _sync(folder: str) -> None:
    """Have what its names lead to outlive the power."""
    with contextlib.suppress(OSError):  # not on each platform
        descriptor: Any = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
