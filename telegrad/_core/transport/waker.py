"""Wakes a thread that sleeps until a connection is readable."""

from __future__ import annotations

import contextlib
import select
import socket
import threading

from telegrad._core.atfork import in_child


class Waker:
    """The waker of one thread. If it is woken before it sleeps, it does not sleep."""

    __slots__ = ("_ear", "_voice", "_woken")

    def __init__(self, voice: socket.socket, ear: socket.socket) -> None:
        voice.setblocking(False)
        ear.setblocking(False)
        self._voice, self._ear = voice, ear
        self._woken = False  # set after the byte was sent

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


def is_readable(sock: socket.socket) -> bool:
    try:
        return bool(select.select([sock], [], [], 0)[0])
    except (OSError, ValueError):  # it has ended, or its number is too high for `select`
        return False


def wait_readable(sock: socket.socket, timeout: float | None, waker: Waker | None) -> None:
    """Sleep until a socket is readable, the timeout expires, or `waker` is woken."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        if waker is not None:
            poll.register(waker, select.POLLIN)
        poll.poll(None if timeout is None else max(0.0, timeout) * 1e3)
    else:
        sources: list[socket.socket | Waker] = [sock] if waker is None else [sock, waker]
        select.select(sources, [], [], timeout)
    if waker is not None:
        waker.rest()


_here = threading.local()  # .waker


def waker_here() -> Waker | None:
    """Return the waker of this thread, created on first use, or None if no descriptor is free."""
    found: Waker | None = getattr(_here, "waker", None)
    if found is None:
        with contextlib.suppress(OSError):
            found = _here.waker = Waker(*socket.socketpair())
    return found


@in_child
def _forget_after_fork() -> None:
    """Drop the waker of the only thread of a forked child, which would share it with its parent."""
    _here.__dict__.clear()
