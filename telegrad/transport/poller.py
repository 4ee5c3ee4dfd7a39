"""Waits until one of many connections can be read or written; one driver for every platform."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import Protocol

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class Source(Protocol):
    """What can be waited for."""

    prompt: bool  # worth looking at again at once: more is likely to come soon

    def fileno(self) -> int: ...

    def on_readable(self) -> bool:
        """Take what has come; whether anything had."""

    def on_writable(self) -> None:
        """Send on what had to wait."""


class Poller:
    """A set of sources and one thread at a time that waits for them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # guards _interest and changes of the selector
        self._interest: dict[Source, tuple[int, int]] = {}  # source -> descriptor, events
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, READ, None)

    def watch(self, source: Source, *, read: bool | None = None, write: bool | None = None) -> None:
        """Change what is waited for; None leaves that side as it is."""
        with self._lock:
            fd, events = self._interest.get(source, (source.fileno(), 0))
            wanted = events
            if read is not None:
                wanted = wanted | READ if read else wanted & ~READ
            if write is not None:
                wanted = wanted | WRITE if write else wanted & ~WRITE
            if wanted == events or fd < 0:
                return
            if not events:
                self._selector.register(fd, wanted, source)
            elif not wanted:
                self._selector.unregister(fd)
            else:
                self._selector.modify(fd, wanted, source)
            if wanted:
                self._interest[source] = fd, wanted
            else:
                del self._interest[source]

    def forget(self, source: Source) -> None:
        """Wait for nothing of this source; to be called before its descriptor is closed."""
        self.watch(source, read=False, write=False)

    def poll(self, timeout: float | None) -> list[tuple[Source, int]]:
        """The sources that are ready, after at most `timeout` seconds (None: until there is one, or `wake`)."""
        ready = []
        for key, events in self._selector.select(timeout):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                ready.append((key.data, events))
        return ready

    def wake(self) -> None:
        """Make the thread that waits return."""
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has gone
            self._waker.send(b"\0")

    def close(self) -> None:
        with self._lock:
            self._interest.clear()
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptors, and change nothing about what they stand for."""
        self._selector.close()
        self._waker.close()
        self._woken.close()
