"""The directory of an elastic group, which a process keeps from one generation of the group to the next.

The process has a lease there, because an embedded directory ends without leases. The key of a worker that waits for the
next generation has that lease, so it is deleted if the process dies.
"""

from __future__ import annotations

import contextlib
import threading

from telegrad._core.directory.directory import Directory, DirectoryLost, Lease, LeaseLost
from telegrad._core.joining.generation_keys import COME, end
from telegrad._core.joining.quorum import Formed
from telegrad._core.membership.dynamic import PATIENCE, RENEWALS
from telegrad._core.security.keyring import Keyring
from telegrad._core.stores.address import host_identity
from telegrad._core.stores.find_directory import DirectoryMonitor, Found, note, remove_pointer, write_pointer
from telegrad._core.stores.key_value_store import GONE, read_server_mark
from telegrad._core.stores.stores import RendezvousStore, open_dynamic, open_store
from telegrad._core.stores.urls import is_here
from telegrad._core.threads import LONGEST_WAIT, Background, run_in_thread
from telegrad.errors import TelegradError

SERVE_AGAIN = 1.0  # seconds to replace a store that is gone


class DirectoryLease:
    """One process's directory and lease. Thread-safe."""

    def __init__(self, init_method: str, keys: Keyring, ttl: float) -> None:
        """Initialise without a directory. `ttl`: seconds after which the lease of a dead process ends."""
        self.keys = keys
        self._init_method = init_method
        self._ttl = ttl
        self._lock = threading.Lock()  # guards changes of these two; held while a store is opened
        self._meeting: RendezvousStore | None = None
        self.found: Found | None = None  # the directory
        self.lease = Lease(0, ttl, 0.0)  # no lock: replaced as a whole
        self._over = threading.Event()
        self._thread = Background("telegrad-lease", self._main)

    def meet(self, timeout: float) -> RendezvousStore:
        """Return the store in which the group meets, opened or served; it stays open.

        Raises:
            RendezvousError: there is none, and it cannot be served here.
        """
        with self._lock:
            if self._meeting is None:
                self._meeting = open_store(self._init_method, -1, None, self.keys, timeout)
            return self._meeting

    @property
    def directory(self) -> Directory:
        """The current directory. Raises DirectoryLost if there is none."""
        found = self.found
        if found is None:
            raise DirectoryLost("this process has left the directory of its group")
        return found.directory

    def hold(self, meeting: RendezvousStore, found: Found) -> None:
        """Begin a lease in this directory, to which that store points. Raises DirectoryLost, and changes nothing."""
        self.lease = found.directory.grant(self._ttl)
        self._thread.want()
        self._meeting, self.found = meeting, found

    def renew(self) -> None:
        """Renew the lease, or begin another one if it has ended. Raises DirectoryLost."""
        try:
            self.lease = self.directory.renew(self.lease)
        except LeaseLost:
            self.lease = self.directory.grant(self._ttl)

    def _main(self) -> None:
        while not self._over.wait(min(self._ttl / RENEWALS, LONGEST_WAIT)):
            with contextlib.suppress(TelegradError):  # retried later
                self.renew()

    def restart(self) -> None:
        """Monitor and restart the directory's process, if it ran on this host and was killed with its keeper."""
        with self._lock:
            found = self.found
            if found is None or found.keeping is not None or found.pointer is None or found.launched:
                return
            if found.pointer.machine == host_identity():
                self.found = found._replace(
                    keeping=DirectoryMonitor(self.keys, found.pointer.host, found.pointer, True)
                )

    def serve_again(self) -> None:
        """Serve the store again if it is gone and was served on this host: new workers find the directory by it."""
        with self._lock, contextlib.suppress(TelegradError):
            meeting, found = self._meeting, self.found
            if meeting is None or found is None or found.pointer is None or found.launched or meeting.serves:
                return
            host, port = meeting.place
            if host is None or port is None or not is_here(host) or read_server_mark(meeting.store) != GONE:
                return
            store, serves = open_dynamic((host, port), -1, self.keys, SERVE_AGAIN)
            if serves:
                write_pointer(store, found.pointer)
                note(port, found.pointer)
            self._meeting = meeting._replace(store=store, serves=serves)

    def close(self, ended: Formed | None = None) -> None:
        """Leave the directory. `ended`: the last generation, if the group ended normally; waiting workers see it."""
        with self._lock:
            meeting, self._meeting = self._meeting, None
            found, self.found = self.found, None
        self._over.set()
        if meeting is None or found is None:
            return
        done = threading.Event()
        run_in_thread("telegrad-leave", self._leave, meeting, found, ended, done)
        done.wait(PATIENCE)  # if the directory does not answer, the lease expires
        found.directory.close()
        self._thread.join(PATIENCE)
        if found.keeping is not None:
            found.keeping.leave()

    def _leave(self, meeting: RendezvousStore, found: Found, ended: Formed | None, done: threading.Event) -> None:
        try:
            with contextlib.suppress(TelegradError, RuntimeError):  # the directory is lost, or was lost with its store
                if ended is not None and end(found.directory, ended) and found.pointer is not None:
                    remove_pointer(meeting.store, lambda: bool(found.directory.list(COME).entries))
                found.directory.revoke(self.lease)
        finally:
            done.set()
