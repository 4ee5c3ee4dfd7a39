"""Waits until one of many connections can be read or written; one driver for every platform."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
from typing import Any, Protocol

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
AT_ONCE = 64  # descriptors told of by one look


class Source(Protocol):
    """What can be waited for."""

    prompt: bool  # worth looking at again at once: more is likely to come soon

    def fileno(self) -> int: ...

    def on_readable(self) -> bool:
        """Take what has come; whether anything had."""

    def on_writable(self) -> None:
        """Send on what had to wait."""


class _Epoll:
    """As `selectors.EpollSelector`, whose books take longer than the kernel does."""

    sees_changes = True  # that are made while a thread sleeps in it

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sources: dict[int, tuple[int, Any]] = {}

    # `_sources` says what shall be. Each change can be made again, and by either name: what an exception in between has
    # left, for want of memory, is mended by the next.

    def register(self, fd: int, events: int, source: Any) -> None:
        self._sources[fd] = events, source
        try:
            self._epoll.register(fd, _MASKS[events])
        except FileExistsError:
            self._epoll.modify(fd, _MASKS[events])

    def modify(self, fd: int, events: int, source: Any) -> None:
        self._sources[fd] = events, source
        try:
            self._epoll.modify(fd, _MASKS[events])
        except FileNotFoundError:
            self._epoll.register(fd, _MASKS[events])

    def unregister(self, fd: int) -> None:
        self._sources.pop(fd, None)
        with contextlib.suppress(OSError):  # closed by its end
            self._epoll.unregister(fd)

    def select(self, timeout: float | None) -> list[tuple[Any, int]]:
        ready = []
        for fd, mask in self._epoll.poll(timeout, AT_ONCE):
            events, source = self._sources.get(fd, (0, None))
            events &= (READ if mask & ~select.EPOLLOUT else 0) | (WRITE if mask & ~select.EPOLLIN else 0)
            if events:
                ready.append((source, events))
        return ready

    def close(self) -> None:
        self._epoll.close()


class _Selector(selectors.DefaultSelector):
    """Every other platform's way."""

    sees_changes = hasattr(select, "kqueue")

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        try:
            return [(key.data, events) for key, events in super().select(timeout)]
        except OSError:
            if not self.get_map():  # this was closed
                raise
            return []  # a descriptor was forgotten and closed meanwhile


if hasattr(select, "epoll"):
    _MASKS = {READ: select.EPOLLIN, WRITE: select.EPOLLOUT, READ | WRITE: select.EPOLLIN | select.EPOLLOUT}


class Poller:
    """A set of sources and one thread at a time that waits for them."""

    def __init__(self) -> None:
        self._selector = _Epoll() if hasattr(select, "epoll") else _Selector()
        self._lock = threading.Lock()  # guards _interest and changes of the selector
        self._interest: dict[Source, tuple[int, int]] = {}  # source -> descriptor, events
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken.fileno(), READ, None)

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
            if not self._selector.sees_changes:
                self.wake()

    def reads(self, source: Source) -> bool:
        """Whether it is waited for that this source can be read."""
        with self._lock:
            return bool(self._interest.get(source, (0, 0))[1] & READ)

    def forget(self, source: Source) -> None:
        """Wait for nothing of this source; to be called before its descriptor is closed."""
        self.watch(source, read=False, write=False)

    def poll(self, timeout: float | None) -> list[tuple[Source, int]]:
        """The sources that are ready, after at most `timeout` seconds (None: until there is one, or `wake`)."""
        ready = []
        for source, events in self._selector.select(timeout):
            if source is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                ready.append((source, events))
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
        for each in (self._selector, self._waker, self._woken):
            with contextlib.suppress(OSError):  # the program has closed its descriptor
                each.close()
