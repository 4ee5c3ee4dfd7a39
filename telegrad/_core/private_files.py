"""Create files and folders safely where other users of the host may have planted names.

Another user can create symlinks, folders and files in each world-writable folder, such as /tmp, before this process
writes there. A process that opens a name that it did not create may write to a place which that user chose. So this
module creates all files of this package, by three rules:

1. A private folder belongs to this user, no other user may write it, and it is no symlink. `fstat` checks that on an
   open descriptor. Files are created relative to that descriptor, so later changes of names have no effect.
2. A file is created with O_EXCL and O_NOFOLLOW under a name with a random part. A file that others find under a fixed
   name is renamed to it once it is complete.
3. The path that the user has given is followed, unless another user has put one of its symlinks into a world-writable
   sticky folder. Linux refuses the same if `fs.protected_symlinks` is set, which is not so on each host.

Windows has neither such owners nor descriptors of folders. The same functions work there without the checks.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import os
import pathlib
import secrets
import stat
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from telegrad.errors import UsageError

Path = str | os.PathLike[str]

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700  # modes
LARGEST_VALUE = 1 << 20  # bytes of a file that `create_once` reads back
_NAME = "telegrad"  # of private folders
_POSIX = hasattr(os, "geteuid") and hasattr(os, "O_NOFOLLOW") and os.open in os.supports_dir_fd
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | getattr(os, "O_BINARY", 0)
# opening a FIFO must not block
_READ = os.O_RDONLY | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_LISTED = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_FOLLOW
_IRREGULAR = "it is not a regular file"
_MOST_STEPS = 1000  # steps in the resolution of one path, against circular symlinks

log = logging.getLogger("telegrad")


class UnsafePath(PermissionError):
    """Another user owns or may change a file or folder that should be this user's, or has planted a symlink."""


class Folder(contextlib.AbstractContextManager["Folder"]):
    """An open folder. Its methods act on this folder even if its path changes. Use it in a `with`."""

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        self.path = pathlib.Path(path)
        self._descriptor = descriptor  # None on platforms without descriptors of folders

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def create(self, name: str) -> io.BufferedWriter:
        """Create a private file and open it for writing; raise FileExistsError if the name exists, or is a symlink."""
        return os.fdopen(os.open(self._name(name), _CREATE, PRIVATE_FILE, **self._in()), "wb")

    def names(self) -> list[str]:
        return os.listdir(self.path if self._descriptor is None else self._descriptor)

    def own_file(self, name: str) -> os.stat_result | None:
        """Return the status of a regular file of this user; None for anything else."""
        try:
            found = os.stat(self._name(name), follow_symlinks=False, **self._in())
        except OSError:
            return None
        return found if stat.S_ISREG(found.st_mode) and _is_own(found) else None

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._name(name), **self._in())

    def private(self, name: str) -> Folder:
        """Open a private folder inside this one; create it if it is missing.

        Raises:
            UnsafePath: it belongs to another user, others may write it, or it is a symlink.
            OSError: it cannot be created.
        """
        _new_folder(self._name(name), **self._in())
        return opened(os.path.join(self.path, name), _check_private, self._descriptor)

    def _name(self, name: str) -> str:
        return os.path.join(self.path, name) if self._descriptor is None else name

    def _in(self) -> dict[str, Any]:
        return {} if self._descriptor is None else {"dir_fd": self._descriptor}


def opened(path: str, check: Callable[[int, str], None] | None = None, inside: int | None = None) -> Folder:
    """Open the folder at `path` and check it. With `inside`, open the last part of `path` in that descriptor's folder.

    Raises:
        UnsafePath: it is a symlink, or no folder.
        OSError: it cannot be opened.
    """
    if not _POSIX:
        return Folder(path)
    try:
        descriptor = os.open(path if inside is None else os.path.basename(path), _LISTED, dir_fd=inside)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):  # FreeBSD reports EMLINK for a symlink
            raise UnsafePath(errno.EPERM, "it is not a folder, but a symlink or a file", path) from None
        raise
    try:
        if check is not None:
            check(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return Folder(path, descriptor)


# Private folders and files


def private_folder(purpose: str, stays: bool = False) -> Folder:
    """Open this user's folder for files of one kind, such as "dumps"; create it if it is missing.

    The folder is in `telegrad` below XDG_RUNTIME_DIR, else below XDG_STATE_HOME or ~/.local/state, else in a folder
    with a random name among the temporary files. With `stays`, XDG_RUNTIME_DIR comes second: only login sessions have
    it, and it is emptied at logout. A folder that another user owns or may write is skipped with a warning.

    Raises:
        OSError: no folder can be created.
    """
    bases = [(os.environ.get("XDG_RUNTIME_DIR", ""), False), (_state_home(), True)]
    for base, made in reversed(bases) if stays else bases:
        try:
            with _private_in(base, made) as own:
                return own.private(purpose)
        except UnsafePath as error:
            log.warning("telegrad: %s; using another folder. Remove that one, or restrict it to this user", error)
        except OSError as error:  # missing or not writable, as in many containers
            # Without a free descriptor, `tempfile` would find no folder either, and would not say why.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
    with _temporary() as own:
        return own.private(purpose)


def state_folder() -> pathlib.Path:
    """Return the folder for persistent state of this user, `$XDG_STATE_HOME/telegrad`; create it if it is missing.
    Raise UsageError if it cannot be created, or other users may write it."""
    try:
        with _private_in(_state_home(), True) as folder:
            return folder.path
    except OSError as error:
        raise UsageError(
            f"this user has no folder for telegrad's files: {reason(error)}; set XDG_STATE_HOME "
            "to a folder that this user can write"
        ) from None


def create_once(path: Path, data: bytes) -> bytes:
    """Create a private file with `data`, unless it exists; return its content.

    If several callers, also in other processes, call this at once, one creates the file, and all return the same
    content. The file is complete from the moment it exists.

    Raises:
        UsageError: it cannot be created, or an existing file is not private to this user.
    """
    path = os.fspath(path)
    temporary = _beside(path)
    try:
        try:
            with os.fdopen(os.open(temporary, _CREATE, PRIVATE_FILE), "wb") as file:
                if _POSIX:
                    os.fchmod(file.fileno(), PRIVATE_FILE)  # the umask may have taken bits away
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # else its name may survive a power failure without the content
            # Unlike a rename, a link fails if the name exists. So of several processes one creates the file, and no
            # reader sees a part of it.
            os.link(temporary, path)
            return data
        except FileExistsError:
            return _read_private(path)
        finally:
            with contextlib.suppress(OSError):  # it could not be created
                os.unlink(temporary)
    except OSError as error:
        raise UsageError(f"{path!r} can be neither created nor read: {reason(error)}") from None


def reason(error: OSError) -> str:
    """Return the text and path of a system error, without its number."""
    return f"{error.strerror or error}{f': {error.filename!r}' if error.filename else ''}"


def _state_home() -> str:
    """Return the folder for user state by the XDG specification, which ignores a relative path."""
    given = os.environ.get("XDG_STATE_HOME", "")
    default = os.path.join(os.path.expanduser("~"), ".local", "state")
    if given and not os.path.isabs(given):
        _warn_of_relative(given, default)
    return given if os.path.isabs(given) else default


@functools.lru_cache(maxsize=1)  # once per value: a record at each dump would hide others
def _warn_of_relative(given: str, default: str) -> None:
    log.warning("telegrad: XDG_STATE_HOME is ignored: %r is not an absolute path; using %s", given, default)


def _private_in(base: str, made: bool) -> Folder:
    """Open the folder `telegrad` in `base`; with `made`, create `base` if it is missing."""
    if not os.path.isabs(base):  # no variable, or "~" because the system does not know the user
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", base)
    base = resolved(base)
    if made:
        _make_private(base)
    with opened(base, _check_base) as folder:
        return folder.private(_NAME)


def _make_private(path: str) -> None:
    """Create a folder and its missing ancestors, for this user alone, whatever the umask."""
    # Not `os.makedirs`, whose mode does not apply to the ancestors.
    if not os.path.isdir(path) and (parent := os.path.dirname(path)) != path:
        _make_private(parent)
        _new_folder(path)


def _new_folder(path: str, **within: Any) -> None:
    with contextlib.suppress(FileExistsError):  # another process created it, or it is a file, which `opened` refuses
        os.mkdir(path, PRIVATE_FOLDER, **within)
        os.chmod(path, PRIVATE_FOLDER, **within)  # the umask may have taken bits away


def _temporary() -> Folder:
    """Open a folder of this user among the temporary files; reuse that of an earlier process."""
    user = os.geteuid() if _POSIX else "user"
    with opened(resolved(tempfile.gettempdir())) as folder:
        for name in sorted(folder.names()):
            if name.startswith(f"{_NAME}-{user}-"):
                with contextlib.suppress(OSError):  # another user has created it
                    return folder.private(name)
        return folder.private(f"{_NAME}-{user}-{secrets.token_hex(8)}")


def _check_base(folder: int | str, path: str) -> None:
    """Check that only this user and root can replace folders in this one."""
    found = os.stat(folder)
    # the owner of / may not be root in a user namespace
    if not _is_trusted(found) and _owner(found) != os.stat("/").st_uid:
        raise PermissionError(errno.EPERM, f"it belongs to user {_owner(found)}, not to this one", path)
    # In a sticky folder only the owners of entries, and that of the folder, can rename or remove them.
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UnsafePath(errno.EPERM, f"other users may change it (mode {stat.S_IMODE(found.st_mode):o})", path)


def _check_private(descriptor: int, path: str) -> None:
    found = os.fstat(descriptor)
    refuse_foreign(found, path)
    # others may read it, which is the default of `mkdir`, but cannot have created files in it
    if found.st_mode & 0o077:
        os.fchmod(descriptor, PRIVATE_FOLDER)


def refuse_foreign(found: os.stat_result, path: str) -> None:
    """Raise UnsafePath if another user owns the file with the status `found`, or may write it."""
    if not _is_own(found):
        raise UnsafePath(errno.EPERM, f"it belongs to user {_owner(found)}, not to this one, {os.geteuid()}", path)
    if found.st_mode & 0o022:
        raise UnsafePath(errno.EPERM, f"other users may write it (mode {stat.S_IMODE(found.st_mode):o})", path)


def _read_private(path: str) -> bytes:
    with _open_regular(path) as file:
        found = os.fstat(file.fileno())
        if _POSIX:
            refuse_foreign(found, path)
            if found.st_mode & 0o077:
                raise UnsafePath(errno.EPERM, "other users may read it: remove it, as they may know its content", path)
        data = file.read(LARGEST_VALUE + 1)
    if len(data) > LARGEST_VALUE:
        raise OSError(errno.EFBIG, f"it has over {LARGEST_VALUE} bytes", path)
    return data


def _owner(found: os.stat_result) -> int:
    return found.st_uid


def _is_own(found: os.stat_result) -> bool:
    return not _POSIX or _owner(found) == os.geteuid()


def _is_trusted(found: os.stat_result) -> bool:
    return _is_own(found) or _owner(found) == 0


# Paths that the user has given


def resolved(path: Path, check: Callable[[str], None] | None = None) -> str:
    """Return `path` without symlinks; raise UnsafePath if another user has put one of them into a world-writable sticky
    folder. Call `check` with each folder on the way, before its content is used."""
    path = os.path.join(os.getcwd(), os.fspath(path))
    if not _POSIX:
        return os.path.abspath(path)
    # Not `os.path.realpath`: each symlink must be checked before it is followed, and each folder before its content is
    # used. `here` has no symlinks (except in /proc), so `..` is the folder above it in the text as well.
    ahead, here = deque(path.split("/")), "/"
    for _ in range(_MOST_STEPS):
        if not ahead:
            return here
        part = ahead.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)
            continue
        if check is not None:
            check(here)
        inner = os.path.join(here, part)
        try:
            found = os.lstat(inner)
        except FileNotFoundError:
            return os.path.join(inner, *ahead)
        if not stat.S_ISLNK(found.st_mode) or inner.startswith("/proc/"):  # /proc is written by the kernel only
            here = inner
            continue
        _refuse_planted(found, here, inner, "a symlink")
        target = os.readlink(inner)
        ahead.extendleft(reversed(target.split("/")))
        here = "/" if target.startswith("/") else here
    raise OSError(errno.ELOOP, "its symlinks form a loop", path)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. FIFOs and devices are refused: a read could block forever.

    Raises:
        UnsafePath: it is no regular file, or as for `resolved`.
        OSError: it cannot be opened.
    """
    return _open_regular(resolved(path))


def _open_regular(path: str) -> io.BufferedReader:
    if stat.S_ISREG(os.lstat(path).st_mode):  # do not even open others: opening a device may have effects
        file = os.fdopen(os.open(path, _READ), "rb")
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()  # it was replaced after `lstat`
    raise UnsafePath(errno.EPERM, _IRREGULAR, path)


def make_folder(path: Path) -> str:
    """Create a folder and its missing ancestors; return its path without symlinks; raise errors as `resolved`."""
    found = resolved(path)
    os.makedirs(found, exist_ok=True)
    return resolved(found)  # a symlink may have been planted since


def open_folder(path: Path) -> Folder:
    """Open a folder if no other user can replace files in it or in its ancestors; create it if it is missing.

    Raises:
        PermissionError: another user owns one of them, or one is world-writable and not sticky (as /tmp is).
    """
    found = resolved(path, lambda above: _check_base(above, above))
    os.makedirs(found, PRIVATE_FOLDER, exist_ok=True)
    return opened(found, _check_base)


def create(path: Path) -> io.BufferedWriter:
    """Create a file and open it for writing.

    Raises:
        FileExistsError: the name exists, even if it is only a symlink.
        UnsafePath: as for `resolved`.
    """
    # The last part is not resolved: O_EXCL and O_NOFOLLOW refuse a symlink there. The user has named this file, so the
    # umask decides its mode.
    folder, name = os.path.split(path)
    return os.fdopen(os.open(os.path.join(resolved(folder), name), _CREATE, 0o666), "wb")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[io.BufferedWriter]:
    """Open a new file that replaces `path` at the end of the `with`. After an error, `path` is unchanged.

    A device or a pipe, such as /dev/stdout, is written to directly. Raise UnsafePath as `resolved` does, or if another
    user has put a device or a pipe into such a folder.
    """
    target = resolved(path)
    try:
        before = os.stat(target)
    except FileNotFoundError:
        before = None
    if before is not None and (not stat.S_ISREG(before.st_mode) or target.startswith("/proc/")):
        _refuse_planted(before, os.path.dirname(target), target, "a special file")
        with open(target, "wb") as file:
            yield file
        return
    temporary = _beside(target)
    try:
        with os.fdopen(os.open(temporary, _CREATE, 0o666), "wb") as file:
            yield file
        # Before the rename, so that the file never has another mode under its final name.
        if before is not None and _is_own(before):
            os.chmod(temporary, stat.S_IMODE(before.st_mode))
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _beside(path: str) -> str:
    """Return an unguessable name in the same folder."""
    return os.path.join(os.path.dirname(path), f".{_NAME}-{secrets.token_hex(8)}.tmp")


def _refuse_planted(found: os.stat_result, folder: str, path: str, what: str) -> None:
    """Raise UnsafePath if neither this user, root nor the owner of its world-writable sticky folder owns an entry."""
    above = os.stat(folder)
    is_shared = above.st_mode & stat.S_ISVTX and above.st_mode & stat.S_IWOTH
    if _POSIX and is_shared and not _is_trusted(found) and _owner(found) != _owner(above):
        raise UnsafePath(
            errno.EPERM, f"user {_owner(found)} has put {what} there, in a folder that all users may write to", path
        )
