"""A store in a file, in the format of torch's FileStore, which would read forever if the file is truncated.

The file is an append-only list of entries: a key and its value, each after its length; the newest entry of a key is
valid. Keys of users begin with "/", and "-/KEY" removes KEY. Each operation opens the file, reads the new entries, and
writes at most one entry, for which it locks the file. So each operation detects a file that was replaced, truncated or
overwritten before it uses any content, and the error names the file.

torch's own FileStore can use the same file, for example that of `init_process_group`. Its constructor waits for the
file's lock while it holds the GIL. So this class locks only for writes, and never to read. It has the methods of
torch's stores that `SealedStore` calls.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import threading
from collections.abc import Iterator, Sequence
from time import monotonic, sleep

from telegrad._core.host.private_files import UnsafePath, refuse_foreign
from telegrad.errors import StoreLost, StoreUntrusted

LOCKED = 20.0  # seconds for the lock, which others hold for less than a millisecond
SHORTEST_PAUSE, LONGEST_PAUSE = 1e-4, 2e-2  # seconds between two attempts
_LENGTH = struct.Struct("=I")
_OPEN = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_MODE = 0o600


class FileStore:
    """One process's view of the file. Thread-safe."""

    def __init__(self, path: str) -> None:
        """Create the file if it is missing.

        Raises:
            OSError: it cannot be opened, is not a regular file, or other users may write it.
            StoreUntrusted: its content is not that of a store.
        """
        self.path = path
        self._lock = threading.Lock()  # guards all below; held while the file is locked, for at most LOCKED
        self._values: dict[str, bytes] = {}
        self._end = 0  # number of bytes read
        self._file: tuple[int, int] | None = None  # its device and inode
        os.close(os.open(path, _OPEN | os.O_CREAT, _MODE))
        with self._opened():
            pass

    def add(self, key: str, more: int) -> int:
        with self._opened(writes=True) as file:
            try:
                total = int(self._values.get(key, b"") or 0) + more
            except ValueError:
                raise self._refused(f"its counter {key!r} is not a number") from None
            self._append(file, key, str(total).encode())
            return total

    def compare_set(self, key: str, before: str, after: str) -> bytes:
        expected, value = before.encode(), after.encode()
        for writes in (False, True):
            with self._opened(writes) as file:
                found = self._values.get(key)
                if found != expected and (found is not None or expected):
                    return expected if found is None else found
                if writes:
                    self._append(file, key, value)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        with self._opened():
            return all(key in self._values for key in keys)

    def num_keys(self) -> int:
        with self._opened():
            return len(self._values)

    def list_keys(self) -> list[str]:
        with self._opened():
            return list(self._values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._opened():
            if gone := [key for key in keys if key not in self._values]:
                raise self._refused(f"it no longer has the key {gone[0]!r}")
            return [self._values[key] for key in keys]

    # The file

    @contextlib.contextmanager
    def _opened(self, writes: bool = False) -> Iterator[int]:
        """Open the file and read new entries; lock it if this process `writes`."""
        with self._lock:
            try:
                file = os.open(self.path, _OPEN)
            except OSError as error:
                raise StoreLost(f"the store {self.path!r} can no longer be opened: {error.strerror}") from error
            try:
                self._check(os.fstat(file))
                if not writes:
                    try:
                        self._read(file)
                    except StoreUntrusted:  # the last entry may be in the middle of a write: read again with the lock
                        writes = True
                if writes:
                    self._take_lock(file)
                    self._read(file)
                yield file
            finally:
                os.close(file)  # releases the lock

    def _check(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is not a regular file")
        try:
            refuse_foreign(found, self.path)
        except UnsafePath as error:
            raise UnsafePath(
                error.errno, f"{error.strerror}: name another file, or chmod 600 this one", self.path
            ) from None
        self._file = self._file or (found.st_dev, found.st_ino)
        if self._file != (found.st_dev, found.st_ino) or found.st_size < self._end:
            raise self._refused("it was replaced or truncated while it was in use")

    def _take_lock(self, file: int) -> None:
        import fcntl

        until, pause = monotonic() + LOCKED, SHORTEST_PAUSE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if monotonic() > until:
                    raise StoreLost(
                        f"the store {self.path!r} is locked by another process for {LOCKED:g} s "
                        f"(`fuser -v {self.path}` shows which): end that process"
                    ) from None
            sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)

    def _read(self, file: int) -> None:
        """Read the entries after `_end`."""
        size = os.fstat(file).st_size
        while self._end < size:
            start = self._end
            key, start = self._part(file, start, size)
            value, start = self._part(file, start, size)
            if not key:
                raise self._refused(f"there is no key at byte {self._end}")
            name = key.decode("utf-8", "replace")
            if name.startswith("-/"):
                self._values.pop(name[2:], None)
            elif name.startswith("/"):
                self._values[name[1:]] = value
            self._end = start

    def _part(self, file: int, start: int, size: int) -> tuple[bytes, int]:
        """Return the bytes after the length at `start`, and their end."""
        head = os.pread(file, _LENGTH.size, start)
        start += _LENGTH.size
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else size
        if length > size - start:
            raise self._refused(f"it is truncated or damaged at byte {start}")
        return os.pread(file, length, start), start + length

    def _append(self, file: int, key: str, value: bytes) -> None:
        name = f"/{key}".encode()
        entry = memoryview(_LENGTH.pack(len(name)) + name + _LENGTH.pack(len(value)) + value)
        os.lseek(file, self._end, os.SEEK_SET)
        try:
            while entry:
                entry = entry[os.write(file, entry) :]
        except OSError as error:
            os.ftruncate(file, self._end)  # others would find half of the entry
            raise StoreLost(f"the store {self.path!r} cannot be written: {error.strerror}") from error
        self._read(file)

    def _refused(self, why: str) -> StoreUntrusted:
        return StoreUntrusted(
            f"the file {self.path!r} is not a store, or was changed by another program: {why}. Remove it, or name "
            "another file, on all workers"
        )

    def __repr__(self) -> str:
        return f"<FileStore {self.path!r}, {len(self._values)} keys>"
