"""How the members of a dynamic or elastic group find their directory.

The store of such a group has one value, POINTER: the address of the group's directory. The first worker that is
permitted to starts the directory in its own process (`_core/stores/directory_server.py`), and writes the address
there. All others read it, and do not need the store afterwards.

The directory's process outlives the worker that started it: it ends once no member holds a lease. If it is killed, that
worker restarts it on the same port, with its state. If that worker and its store are gone, members continue to use the
directory, and joining workers wait for a worker that serves the store again. That worker finds the directory by a note
in its user's state folder, which also contains the user's key file. The note is named after the host and port of the
store, so it does not depend on a login or on the name that a program gives to the host. Each boot of a host, and each
network namespace there, has its own notes, because hosts may share a home.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from telegrad._core.private_files import open_regular, private_folder, reason, replacing
from telegrad._core.security.keyring import Keyring
from telegrad._core.sockets import accepts_connections, bracketed, host_identity, listening_address
from telegrad._core.stores.directory import Directory, DirectoryLost
from telegrad._core.stores.directory_client import EmbeddedDirectory
from telegrad._core.stores.sealed_store import KeyValueStore, SealedStore, read_server_mark, short
from telegrad._core.texts import Wait, poll_intervals
from telegrad._core.threads import Background
from telegrad.errors import HandshakeError, StoreUnreachable, UsageError

POINTER = "telegrad/directory"
MACHINE = 32  # characters of a note's name that identify the host
LASTS = 365 * 24 * 3600.0  # seconds after which a note of another host, or of another boot, is removed
SETTLED = 600.0  # seconds until a new file in a shared home is visible on all hosts
CONNECT_TIMEOUT = 1.0  # seconds for the process to accept a connection
LOOK = 0.2  # seconds between two checks of the process that this worker has started
END = 1.0  # seconds for the checking thread to end
PATIENCE = 10.0  # seconds for an operation of a directory

if TYPE_CHECKING:
    from telegrad._core.stores.directory_server import ServerProcess

log = logging.getLogger("telegrad")


class Pointer(NamedTuple):
    host: str
    port: int
    machine: str  # the identity of the host of its process
    path: str  # of its file there
    launched: bool = False  # started by a launcher instead of a worker

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Pointer:
        host, port, machine, path, launched, *_ = json.loads(text)
        return cls(str(host), int(port), str(machine), str(path), bool(launched))

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


class DirectoryMonitor:
    """Monitors and restarts the process of a directory until `leave`: its own process or an existing one."""

    def __init__(self, keys: Keyring, host: str, before: Pointer | None = None, watches: bool = False) -> None:
        """Start the process on an address of this host, or use the directory of the pointer `before` if it answers.
        With `watches`, use that directory in any case, and restart it from its file once its port is closed. Raise
        StoreUnreachable if it cannot be started, and UsageError on Windows, where no process inherits a socket."""
        if sys.platform == "win32":
            raise UsageError(
                "on Windows a dynamic or elastic group needs an external directory: init_method='etcd://HOST:2379' or "
                "'redis://HOST:6379', or give all workers world_size"
            )
        self._keys = keys
        self._host = listening_address(host)
        self._over = threading.Event()
        is_used = before is not None and (watches or _probe(before, keys)[0])
        self._keeper = None if is_used else self._started(before)
        if self._keeper is not None:
            self.pointer = Pointer(host, self._keeper.address[1], host_identity(), self._keeper.path)
        else:
            assert before is not None
            self.pointer = before
        self._thread = Background("telegrad-keeper", self._main)
        self._thread.want()

    def leave(self) -> None:
        """Stop monitoring. The process ends once no member holds a lease."""
        self._stop()
        if self._keeper is not None:
            self._keeper.leave()

    def close(self) -> None:
        """End the process, if this object has started it."""
        self._stop()
        if self._keeper is not None:
            self._keeper.close()

    def _stop(self) -> None:
        self._over.set()
        self._thread.join(END)

    def _started(self, before: Pointer | None) -> ServerProcess | None:
        """Start the process; with the file of an earlier one if its port is free, because members connect there. Return
        None if the earlier one is running again or is stopped: then it has its port."""
        if before is not None and os.path.exists(before.path):
            with contextlib.suppress(OSError):
                return self._process(before.port, before.path)
            _, has_gone = _probe(before, self._keys)
            if not has_gone:
                return None
        try:
            return self._process()
        except OSError as error:
            raise StoreUnreachable(f"the group's directory cannot be served at {self._host}: {short(error)}") from error

    def _process(self, port: int = 0, path: str = "") -> ServerProcess:
        from telegrad._core.stores.directory_server import ServerProcess  # with SQLite: few workers need it

        return ServerProcess(self._keys, self._host, port, path)

    def _main(self) -> None:
        pointer = self.pointer
        while not self._over.wait(LOOK):
            with contextlib.suppress(OSError):  # no memory for a process, or a taken port: retry
                if self._keeper is not None:
                    self._keeper.restart_if_ended()
                elif accepts_connections(pointer.address, CONNECT_TIMEOUT) is False and os.path.exists(pointer.path):
                    self._keeper = self._process(pointer.port, pointer.path)


def connect(pointer: Pointer, keys: Keyring, patience: float = PATIENCE) -> Directory:
    """Return a client of the directory that a pointer names. Nothing is sent yet."""
    return EmbeddedDirectory(pointer.address, keys, patience, pointer.path)


class Found(NamedTuple):
    directory: Directory
    keeping: DirectoryMonitor | None = None  # if this worker has started it
    launched: bool = False  # started by a launcher instead of a worker
    pointer: Pointer | None = None  # by which it was found


def find_directory(
    store: SealedStore, place: str, port: int | None, address: str, until: float, wait: Wait | None = None
) -> Found:
    """Return the directory that the store points to; start it if this worker has to.

    `place` is the location of the store, for messages. `port` is the port at which this worker serves it, if it does.
    `address` is that at which other workers reach this one. `wait` is polled until the time `until`.

    Raises:
        StoreUnreachable: there is none in time.
        StoreLost: the store is gone.
    """
    board = KeyValueStore(store)
    for _ in poll_intervals(until):
        text = board.read(POINTER)
        pointer = Pointer.from_json(text) if text else None
        directory, is_gone = _open(pointer, store.keys) if pointer is not None else (None, True)
        if pointer is not None and directory is not None:
            if port is not None:  # this worker may have noted another one, and found that pointer then
                note(port, pointer)
            return Found(directory, None, pointer.launched, pointer)
        before = pointer or (noted(port) if port is not None else None)
        if pointer is None and before is not None:
            # The note of an earlier store at this port. If that directory answers, it is used; if it is gone, it is
            # started again from its file. Otherwise its process is stopped, or another worker is restarting it: a
            # second directory beside it would split the group.
            is_gone = any(_probe(before, store.keys))
        if is_gone and _may_start(pointer, store, port is not None):
            keeping = DirectoryMonitor(store.keys, address, before)
            try:
                # Before the pointer, by which others find the directory and join: if this worker is killed in between,
                # the restarted one must find it, too, and not begin another group.
                if port is not None:
                    note(port, keeping.pointer)
                if write_pointer(store, keeping.pointer, text):
                    return Found(connect(keeping.pointer, store.keys), keeping, pointer=keeping.pointer)
            except BaseException:  # the store is lost, or a signal handler has raised
                keeping.leave()
                raise
            # Another worker was faster: the pointer names its directory. The process of this one has no lease, so it
            # ends.
            keeping.leave()
        if wait is not None:
            wait.look()
    raise StoreUnreachable(
        f"the directory of the group at {pointer} does not answer: is the worker that serves it running, and can its "
        "host be reached from here?"
        if pointer is not None
        else f"the store at {place} does not say where the group's directory is: is the worker that serves it running?"
    )


def write_pointer(store: SealedStore, pointer: Pointer, before: str = "") -> bool:
    """Write the pointer if the current one is `before`; return False otherwise."""
    text = pointer.to_json()
    return KeyValueStore(store).swap(POINTER, before, text) == text


def restore_pointer(store: SealedStore, found: Found) -> None:
    """Write the pointer into a store that outlives the group, if the last member before has removed it. A worker calls
    this only once others can see it in the directory (see `remove_pointer`)."""
    if found.pointer is not None and not read_server_mark(store):
        write_pointer(store, found.pointer)


def _may_start(pointer: Pointer | None, store: SealedStore, serves: bool) -> bool:
    """Return True if this worker must start or restart the directory."""
    if pointer is not None:
        return pointer.machine == host_identity() and not pointer.launched
    # No worker serves a store without a mark, so any worker may be the first one there.
    return serves or not read_server_mark(store)


def _probe(pointer: Pointer, keys: Keyring) -> tuple[bool, bool]:
    """Return whether a directory answers, and whether its process is gone; both are False for a stopped one."""
    directory, has_gone = _open(pointer, keys)
    if directory is not None:
        directory.close()
    return directory is not None, has_gone


def _open(pointer: Pointer, keys: Keyring) -> tuple[Directory | None, bool]:
    """Return the directory that a pointer names, if it answers; and whether its process is gone: another program may
    then have its port. A stopped process still has port and file; one that has ended normally has removed its file."""
    if (listens := accepts_connections(pointer.address, CONNECT_TIMEOUT)) is not True:
        return None, listens is False
    directory = connect(pointer, keys, PATIENCE)
    try:
        directory.list("group")
    except BaseException as error:  # including errors of signal handlers
        directory.close()
        if isinstance(error, HandshakeError):
            return None, True
        if isinstance(error, DirectoryLost):
            return None, pointer.machine == host_identity() and not os.path.exists(pointer.path)
        raise
    return directory, False


def noted(store: int | str) -> Pointer | None:
    """Return the last directory of a store that was served on this host: at this port, or by an actor."""
    with contextlib.suppress(OSError, ValueError):
        pointer = _read_note(_note_path(store))
        if pointer.machine == host_identity():
            return pointer
    return None


def note(store: int | str, pointer: Pointer) -> None:
    """Note the directory of a store; remove the notes of directories that have ended."""
    try:
        path = _note_path(store)
        with replacing(path) as file:
            file.write(pointer.to_json().encode())
        with contextlib.suppress(OSError):  # the next call removes them
            _remove_notes(*os.path.split(path))
    except OSError as error:
        log.warning(
            "telegrad: the place of the group's directory cannot be saved (%s): if the worker that serves the store "
            "is lost, a restarted one begins another group",
            reason(error),
        )


def _note_path(store: int | str) -> str:
    with private_folder("directory", stays=True) as folder:
        return os.path.join(folder.path, f"{_machine()}-{store}")


def _machine() -> str:
    """Return the prefix of the names of the notes of this boot of this host."""
    return hashlib.sha256(host_identity().encode()).hexdigest()[:MACHINE]


def _remove_notes(folder: str, own: str) -> None:
    """Remove the notes of ended directories, and old ones of other hosts, except a worker's own."""
    for name in {*os.listdir(folder)} - {own}:
        path, machine = os.path.join(folder, name), name.partition("-")[0]
        with contextlib.suppress(OSError, ValueError):
            age = time.time() - os.stat(path).st_mtime
            if machine == _machine():
                # A running directory may have lost its file, because a logout can remove it.
                pointer = _read_note(path)
                is_over = not os.path.exists(pointer.path) and not accepts_connections(pointer.address, CONNECT_TIMEOUT)
            elif len(machine) != MACHINE or age < SETTLED:
                continue
            else:
                file = "" if age > LASTS else _read_note(path).path
                # Only a file in this folder, which the other host or network namespace shares, shows if it has ended.
                is_over = age > LASTS or (os.path.dirname(file) == folder and not os.path.exists(file))
            if is_over:
                os.unlink(path)


def _read_note(path: str) -> Pointer:
    with open_regular(path) as file:
        return Pointer.from_json(file.read())


def remove_pointer(store: SealedStore, others: Callable[[], bool]) -> None:
    """Remove the pointer from a store that outlives the group, such as a file, unless there are other members.

    Otherwise workers of later runs, on other hosts, would wait for a directory that has ended. The last member removes
    the pointer, and then checks if another has joined; a joined worker restores a missing pointer. So one of them sees
    the other.
    """
    board = KeyValueStore(store)
    text = board.read(POINTER)
    if text and board.swap(POINTER, text, "") == "" and others():
        board.swap(POINTER, "", text)
