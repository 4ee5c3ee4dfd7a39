"""Find complete checkpoints, the newest one, and leftovers of others. This module only uses the files.

The data files of each save have unique names, and its table of contents is put in place last, atomically. So from its
first complete save on, a folder always is a complete checkpoint: the older one before that step, the newer one after
it. Files that no table of contents names are leftovers. The table's time is later than that of all existing ones in the
parent folder, whatever the clocks are.

Other users may write in the folder of the checkpoints. So each file is created new, under an unpredictable name. Only
regular files are read. Only files whose names have this module's format are removed, and never through a symlink. A
folder of another program may have a table of contents, too, such as a checkpoint of torch: it is not removed.
"""

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

from telegrad.ext.calls import folded
from telegrad.ext.feedback import checks
from telegrad.ext.host import create, make_folder, open_regular, opened, resolved

Path = str | os.PathLike[str]

CONTENTS = ".metadata"  # the file that makes a folder a checkpoint
DATA = ".distcp"  # suffix of all other files
TEMPORARY = ".tmp"  # suffix of the table of contents until it is complete
STEP = 1 << 26  # maximum bytes per read or write
SYNC = 1 << 28  # bytes after which a file is written to the disk
# all files except the table of contents
_PART = re.compile(r"[0-9a-f]{16}__\d+_\d+\.distcp|\.metadata\.[0-9a-f]{16}\.tmp")


class _InSteps(io.FileIO):
    """A file that is read and written in steps, which shows progress to other workers. When it is complete, torch syncs
    it to the disk; that would be one long step, so parts are synced before."""

    def __init__(self, file: io.BufferedIOBase, mode: str, note: Callable[[], None]) -> None:
        super().__init__(file.fileno(), mode, closefd=False)
        self._note = note
        self._unsynced = 0
        self.failure: OSError | None = None  # the first one while writing, for which torch raises another error

    def write(self, data: Any) -> int:
        self._note()
        try:
            written = super().write(memoryview(data)[:STEP])
            self._unsynced += written
            if self._unsynced >= SYNC:
                os.fsync(self.fileno())
                self._unsynced = 0
        except OSError as error:
            self.failure = self.failure or error
            raise
        return written

    def readinto(self, buffer: Any) -> int:
        self._note()
        return super().readinto(memoryview(buffer)[:STEP])


class Files(FileSystem):
    """The file system for torch's writers and readers: a new table of contents replaces an older one atomically."""

    def __init__(self, note: Callable[[], None]) -> None:
        """`note` is called at each step of a file."""
        super().__init__()
        self._note = note
        self._actual: dict[str, str] = {}  # temporary files: the name that torch uses, and the actual one

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
            # torch's name of the temporary file is the same for each save. A file that a killed save left, or that
            # another user made, would then be in the way of `create`, which makes new files only.
            actual = f"{actual.removesuffix(TEMPORARY)}.{secrets.token_hex(8)}{TEMPORARY}"
            self._actual[os.fspath(path)] = actual
        with create(actual) as created:
            file = _InSteps(created, mode, self._note)
            try:
                with io.BufferedWriter(file) as stream:
                    yield stream
            except Exception:
                # After a failed write torch raises an error of its own, which does not name the cause, such as a full
                # disk.
                if (failure := file.failure) is None:
                    raise
                raise OSError(failure.errno, failure.strerror, actual) from None

    # torch's writer removes an existing table of contents before it renames the new one, and warns of it. A process
    # that is killed between the two steps would leave no complete checkpoint. `os.replace` needs no removal.
    def exists(self, path: Path) -> bool:
        return False

    def rename(self, path: Path, new_path: Path) -> None:
        path = self._actual.pop(os.fspath(path), path)
        folder = os.path.dirname(os.path.abspath(new_path))
        # `latest` and `keep_newest` order checkpoints by this time. A clock that was set back must not make this one
        # older than those before it.
        newest = max((moment for moment, _ in _dated(os.path.dirname(folder))), default=0)
        now = os.stat(path).st_mtime_ns
        os.utime(path, ns=(now, max(now, newest + 1)))
        os.replace(path, new_path)
        # The new entry of the folder must survive a power failure. Not each platform can sync a folder.
        with contextlib.suppress(OSError):
            descriptor: Any = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@folded
def latest(folder: Path) -> str | None:
    """Return the newest complete checkpoint: the folder itself, or one of the folders in it.

    This function needs no group. The newest checkpoint is the one that was completed last.

    Args:
        folder: a path.

    Returns:
        The path of the checkpoint, or None.

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
    """Remove older files from a complete checkpoint; `data` are the names of its own files."""
    _remove_in(resolved(path), lambda name: _is_part(name) and name not in data)


def discard(path: str, mark: str) -> None:
    """Remove the files of a failed save, which begin with its `mark`."""
    _remove_in(resolved(path), lambda name: name.startswith(mark) or (_is_part(name) and not name.endswith(DATA)))
    with contextlib.suppress(OSError):  # the folder contains other files
        os.rmdir(path)


def keep_newest(path: str, count: int) -> None:
    """Keep the newest `count` complete checkpoints in the parent folder, including this one.

    Remove leftovers of killed saves. Symlinks stay, with the folders that they lead to or into, and so do checkpoints
    of other programs.
    """
    folder = os.path.dirname(os.path.abspath(path))
    complete = [each for _, each in sorted(_dated(folder, links=False)) if _is_own(each)]
    # A folder with files that are younger than the first file of this save is no leftover: another save may be writing
    # there.
    parts = (os.path.join(path, name) for name in os.listdir(path) if _is_part(name))
    begun = min((os.stat(part).st_mtime_ns for part in parts), default=0)
    leftovers = [each for each in _folders(folder, links=False) if each not in complete and _is_leftover(each, begun)]
    with os.scandir(folder) as entries:
        targets = [pathlib.Path(os.path.realpath(each.path)) for each in entries if each.is_symlink()]
    for each in complete[:-count] + leftovers:
        if not any(target.is_relative_to(os.path.realpath(each)) for target in targets):
            _remove(each)


def _dated(folder: str, links: bool = True) -> list[tuple[int, str]]:
    """Return the complete checkpoints in a folder, with their times of completion."""
    return [(moment, path) for path in _folders(folder, links) if (moment := _completed(path))]


def _completed(path: str) -> int:
    """Return the time of completion in nanoseconds, or 0 if the folder is no complete checkpoint."""
    try:
        found = os.stat(os.path.join(path, CONTENTS))
    except OSError:
        return 0
    return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else 0


def _is_own(path: str) -> bool:
    """Return True if all data files of a complete checkpoint were written by `save`, and there is at least one."""
    try:
        data = [name for name in os.listdir(path) if name.endswith(DATA)]
    except OSError:
        return False
    return bool(data) and all(map(_is_part, data))


def _is_leftover(path: str, begun: int) -> bool:
    """Return True if a folder contains only files of an incomplete save from before `begun`."""
    try:
        with os.scandir(path) as entries:
            found = [(_is_part(each.name), each.stat(follow_symlinks=False).st_mtime_ns) for each in entries]
    except OSError:
        return False
    return bool(found) and all(ours and moment < begun for ours, moment in found)


def _folders(folder: str, links: bool) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            # Not `each.is_dir()`, which raises OSError for a symlink that leads to itself.
            return [each.path for each in entries if os.path.isdir(each.path) and (links or not each.is_symlink())]
    except OSError:
        return []


def _is_part(name: str) -> bool:
    """Return True if a file name is that of a part written by `save`, other than the table of contents."""
    return _PART.fullmatch(name) is not None


def _remove(path: str) -> None:
    """Remove a checkpoint. The table of contents is removed first: a partial checkpoint must not look complete."""
    _remove_in(path, CONTENTS.__eq__)
    _remove_in(path, _is_part)
    with contextlib.suppress(OSError):  # the folder contains other files
        os.rmdir(path)


def _remove_in(path: str, is_wanted: Callable[[str], bool]) -> None:
    with contextlib.suppress(OSError), opened(path) as folder:
        for name in filter(is_wanted, folder.names()):
            folder.remove(name)
