"""Waits until connections are readable or writable, by one interface for all platforms.

A `Poller` waits for many connections, `wait_readable` for one. A `Waker` ends the sleep of a thread in `wait_readable`.
"""

import contextlib
import select
import selectors
import socket
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from telegrad._core.forks import in_child
from telegrad._core.threads import Here

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
AT_ONCE = 64  # events returned by one call of epoll


class Source(Protocol):
    prompt: bool = False  # poll again at once: more data is likely to arrive soon

    def fileno(self) -> int: ...

    def on_readable(self) -> bool:
        """Process available data; return True if there was any."""

    def on_writable(self) -> None:
        """Send queued data; a source that queues none need not define this."""
        return


class _Epoll:
    """A faster `selectors.EpollSelector`, whose bookkeeping takes longer than the system call."""

    sees_changes = True  # sees changes made while a thread sleeps in it

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sources: dict[int, tuple[int, Any]] = {}

    # `_sources` holds the wanted state. Each change can be repeated, as `register` or as `modify`: after an exception
    # for lack of memory, the next change repairs the kernel's state.

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
        with contextlib.suppress(OSError):  # already removed when it was closed
            self._epoll.unregister(fd)

    def select(self, timeout: float | None) -> list[tuple[Any, int]]:
        ready = []
        for fd, mask in self._epoll.poll(timeout, AT_ONCE):
            # The set is level-triggered, and a registration may change or end after the kernel has collected these
            # events. So they are limited to what is wanted now. EPOLLERR and EPOLLHUP count as both directions: the
            # read or the write that follows reports the error.
            events, source = self._sources.get(fd, (0, None))
            events &= (READ if mask & ~select.EPOLLOUT else 0) | (WRITE if mask & ~select.EPOLLIN else 0)
            if events:
                ready.append((source, events))
        return ready

    def close(self) -> None:
        self._epoll.close()


class _Selector(selectors.DefaultSelector):
    """The selector of all other platforms."""

    sees_changes = hasattr(select, "kqueue")

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        try:
            return [(key.data, events) for key, events in super().select(timeout)]
        except OSError:
            if not self.get_map():  # this selector was closed
                raise
            return []  # a descriptor was unregistered and closed meanwhile


if hasattr(select, "epoll"):
    _MASKS = {READ: select.EPOLLIN, WRITE: select.EPOLLOUT, READ | WRITE: select.EPOLLIN | select.EPOLLOUT}


class Poller:
    """A set of sources. At most one thread at a time waits for them."""

    def __init__(self) -> None:
        self._selector = _Epoll() if hasattr(select, "epoll") else _Selector()
        self._lock = threading.Lock()  # guards _interest and changes of the selector
        self._interest: dict[Source, tuple[int, int]] = {}  # source -> descriptor, events
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken.fileno(), READ, None)

    def watch(self, source: Source, read: bool | None = None, write: bool | None = None) -> None:
        """Change the events to wait for; None leaves that direction unchanged."""
        with self._lock:
            # The descriptor is remembered from the first `watch`. A socket that was closed meanwhile has none, and
            # could otherwise not be removed.
            fd, events = self._interest.get(source) or (source.fileno(), 0)
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
            # `select` and `poll` have copied their descriptors when they fell asleep; epoll and kqueue see changes at
            # once.
            if not self._selector.sees_changes:
                self.wake()

    def forget(self, source: Source) -> None:
        """Stop waiting for this source. Call it before its descriptor is closed."""
        self.watch(source, read=False, write=False)

    def poll(self, timeout: float | None) -> list[tuple[Source, int]]:
        """Return the sources that are ready, after at most `timeout` seconds (None: until one is ready, or `wake`)."""
        ready = []
        for source, events in self._selector.select(timeout):
            if source is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                ready.append((source, events))
        return ready

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it has been woken; closed: it has returned
            self._waker.send(b"\0")

    def close(self) -> None:
        with self._lock:
            self._interest.clear()
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptors without changing the registrations."""
        for each in (self._selector, self._waker, self._woken):
            with contextlib.suppress(OSError):  # the program has closed the descriptor
                each.close()


class Waker:
    """The waker of one thread. If it is woken before it sleeps, it does not sleep."""

    __slots__ = ("_ear", "_voice", "_woken")

    def __init__(self, voice: socket.socket, ear: socket.socket) -> None:
        voice.setblocking(False)
        ear.setblocking(False)
        self._voice, self._ear = voice, ear
        # Set after the byte was sent, so `rest` never waits for a byte. If it runs between the two, the byte stays, and
        # the next sleep returns at once.
        self._woken = False

    def fileno(self) -> int:
        return self._ear.fileno()

    def wake(self) -> None:
        """Make the thread return from its sleep. Call it from any other thread."""
        with contextlib.suppress(OSError):  # buffer full: the thread has been woken
            self._voice.send(b"\0")
        self._woken = True

    def rest(self) -> None:
        if self._woken:
            self._woken = False
            with contextlib.suppress(BlockingIOError):
                self._ear.recv(4096)

    def __del__(self) -> None:
        self._voice.close()
        self._ear.close()


def wait_readable(sock: socket.socket, timeout: float | None, waker: Waker | None = None) -> bool:
    """Sleep until a socket is readable, the timeout expires, or `waker` is woken; return False after the timeout."""
    found: Sequence[object]
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        if waker is not None:
            poll.register(waker, select.POLLIN)
        found = poll.poll(None if timeout is None else max(0.0, timeout) * 1e3)
    else:
        sources: list[socket.socket | Waker] = [sock] if waker is None else [sock, waker]
        found = select.select(sources, [], [], timeout)[0]
    if waker is not None:
        waker.rest()
    return bool(found)


_here = Here()


def waker_here() -> Waker | None:
    """Return the waker of this thread, created on first use, or None if no descriptor is free."""
    found: Waker | None = _here.own
    if found is None:
        with contextlib.suppress(OSError):
            found = _here.own = Waker(*socket.socketpair())
    return found


@in_child
def _forget_after_fork() -> None:
    """Drop the waker of the only thread of a forked child, which would share it with its parent."""
    _here.own = None
