"""The stores under the seals: torch's TCPStore, and a store in a file.

A TCPStore has the backend available on this platform, and listens on as few addresses as possible.

The file has the format of torch's FileStore, which would read forever if the file is truncated. It is an append-only
list of entries: a key and its value, each after its length; the newest entry of a key is valid. Keys of users begin
with "/", and "-/KEY" removes KEY. Each operation opens the file, reads the new entries, and writes at most one entry,
for which it locks the file. So each operation detects a file that was replaced, truncated or overwritten before it uses
any content, and the error names the file.

torch's own FileStore can use the same file, for example that of `init_process_group`. Its constructor waits for the
file's lock while it holds the GIL. So `FileStore` here locks only for writes, and never to read. It has the methods of
torch's stores that `SealedStore` calls.
"""

import contextlib
import datetime
import logging
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from telegrad._core.private_files import UnsafePath, refuse_foreign
from telegrad._core.sockets import family_of, is_address, listening_address, socket_address, spelled, text_of
from telegrad._core.threads import wait_for_torch
from telegrad.errors import StoreLost, StoreUnreachable, StoreUntrusted

# Seconds for the lock, which others hold for less than a millisecond. Two threads may wait for it one after the other,
# and must end before `SealedStore` takes the store for lost (ANSWER).
LOCKED = 4.0
SHORTEST_PAUSE, LONGEST_PAUSE = 1e-4, 2e-2  # seconds between two attempts
_LENGTH = struct.Struct("=I")
_OPEN = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_MODE = 0o600
log = logging.getLogger("telegrad")

ANYWHERE = ("0.0.0.0", "::")
CROWD = 1024  # connections waiting to be accepted
PROBE = 0.25  # seconds for a connection to be accepted
OWN_HOST = 2.0  # seconds for a connection from this host to itself, which the kernel alone makes
LEAST = 1e-3  # seconds for a read; 0 would mean non-blocking
# In torch's protocol, in the host's byte order: VALIDATE with its magic number, the first message of each client, and
# GETNUMKEYS, whose response is an int64.
_QUESTION = struct.pack("=BIB", 0, 0x3C85F7CE, 7)
_ANSWER = struct.Struct("=q")
_MOST_KEYS = 1 << 40  # a larger number is text, such as the first 8 bytes of another server's greeting
_store = partial(dist.TCPStore, wait_for_workers=False, use_libuv=sys.platform != "win32")  # torch has no libuv there


class FileStore:
    """One process's view of the file. Thread-safe."""

    def __init__(self, path: str) -> None:
        """Create the file if it is missing. Raise OSError if it cannot be opened, is not a regular file, or other users
        may write it; StoreUntrusted if its content is not that of a store."""
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
        # First without the file's lock: most compare-and-sets change nothing, since each look-up of `SealedStore` is
        # one. Only a write takes the lock, and compares again under it.
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
                    except StoreUntrusted:
                        # The last entry may be in the middle of a write, whose writer has the lock: wait for that.
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
                # Polled, because a blocking flock has no time limit.
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
            # The others would find half of the entry.
            os.ftruncate(file, self._end)
            raise StoreLost(f"the store {self.path!r} cannot be written: {error.strerror}") from error
        self._read(file)

    def _refused(self, why: str) -> StoreUntrusted:
        return StoreUntrusted(
            f"the file {self.path!r} is not a store, or was changed by another program: {why}. Remove it, or name "
            "another file, on all workers"
        )


def check_is_store(host: str, port: int, patience: float) -> None:
    """Ask the program that listens at an address for its number of keys, as torch's clients do. torch's own client
    waits forever if another program accepts its connection and sends nothing, and a process that ends while a thread is
    in that client is aborted. So it is used only after a store has answered. Raise TimeoutError if it does not answer
    within `patience` seconds, and OSError if it is not a store, or no program listens there."""
    deadline = monotonic() + patience
    data = b""
    try:
        with socket.create_connection((spelled(host), port), patience) as sock:
            sock.sendall(_QUESTION)
            while len(data) < _ANSWER.size:
                sock.settimeout(max(deadline - monotonic(), LEAST))
                if not (more := sock.recv(_ANSWER.size - len(data))):
                    raise OSError("it closed the connection without an answer")
                data += more
    except TimeoutError:
        raise TimeoutError("it does not answer") from None
    if not 0 <= _ANSWER.unpack(data)[0] < _MOST_KEYS:
        raise OSError(f"its answer {data!r} is not from a store")


def meet_tcp(host: str, port: int, patience: float) -> Any:
    """Return the store there, or the error."""
    try:
        check_is_store(host, port, patience)
        return wait_for_torch(patience, reach_tcp, host, port, datetime.timedelta(seconds=patience))
    except RuntimeError as error:
        return TimeoutError("it does not answer") if "timed out" in str(error) else error
    except OSError as error:
        return error


def reach_tcp(host: str, port: int, timeout: datetime.timedelta) -> Any:
    """Connect to a store that another process serves; raise RuntimeError if none does."""
    return _store(host, port, is_master=False, timeout=timeout)


def serve_tcp(host: str, port: int, shared: bool = False) -> tuple[Any, int]:
    """Serve a store; only at `host`, if that is an address of this machine. Return the store and its port. With
    `shared`, an existing store of this process at that port, for `torch.distributed` or an earlier group, is used as
    well. Raise OSError if the port is taken, and RuntimeError if torch cannot serve a store."""
    address = listening_address(host)
    if address in ANYWHERE and is_address(host) and host not in ANYWHERE:
        log.warning(
            "telegrad: %s is not an address of this host: the store of this group listens at all addresses of the "
            "host. Unless a NAT forwards that address to this host, correct MASTER_ADDR or init_method",
            host,
        )
    try:
        listener = socket.create_server(socket_address(address, port), family=family_of(address), backlog=CROWD)
    except OSError:
        if not shared:
            raise
        return _store(host, port, is_master=True, multi_tenant=True), port
    with listener:
        return serve_on(listener, shared)


def serve_on(listener: socket.socket, shared: bool = False) -> tuple[Any, int]:
    """Serve a store on a listening socket, which stays open for the caller; return the store and its port. Raise
    StoreUnreachable if this process cannot connect to that socket."""
    bound = listener.getsockname()
    host, port = text_of(bound), bound[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # at which this process can connect
    # torch connects to its own server, and would retry that for minutes, without Ctrl-C.
    try:
        socket.create_connection((host, port), OWN_HOST).close()
    except OSError as error:
        raise StoreUnreachable(
            f"the store cannot be served: this host cannot connect to its own address {host} ({error}). "
            "Is its loopback interface up? `ip link set lo up`"
        ) from error
    served = listener.dup().detach()  # the store closes it
    return _store(host, port, is_master=True, master_listen_fd=served, multi_tenant=shared), port
