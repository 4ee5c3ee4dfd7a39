"""Threads of this package."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from telegrad._core import forks
from telegrad._core.interrupts import uninterrupted
from telegrad.errors import UsageError

LONGEST_START = 60.0  # seconds for a new thread to begin
LONGEST_WAIT = 3600.0  # seconds of one sleep: the platforms' timers do not take infinity


class _Started(threading.Event):
    """Tells `Thread.start` that the new thread runs."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(LONGEST_START if timeout is None else timeout):
            raise RuntimeError(f"a new thread has not begun to run within {LONGEST_START:g} s: is there memory for it?")
        return True


class Thread(threading.Thread):
    """A daemon thread whose `start` has a limit.

    CPython's `start` waits until the new thread says that it runs. A thread that finds no memory before that ends
    without a word, and `start` would wait for ever.
    """

    def __init__(self, target: Callable[..., object], name: str, args: Iterable[Any] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started = _Started()  # a name of CPython's, 3.10 to 3.13; without its effect, the limit is missing


def program_has_ended() -> bool:
    """Whether functions of `atexit` run; no thread can be started then since Python 3.12."""
    return not threading.main_thread().is_alive()


def processor_time(threads: Iterable[threading.Thread]) -> float | None:
    """Return the processor time that these threads have used, where the platform tells; none of them may end now."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return sum(time.clock_gettime(time.pthread_getcpuclockid(each.ident)) for each in threads if each.ident)


def run_beside(name: str, run: Callable[..., None], *args: Any) -> None:
    """Have a thread run it, or this one where the program has ended.

    Raises:
        RuntimeError: there is no memory for a thread.
    """
    try:
        Thread(target=run, args=args, name=name).start()
    except RuntimeError:
        if not program_has_ended():
            raise
        run(*args)


class Exclusive:
    """A lock that is held while its thread waits, and refuses that thread: a handler of a signal may run meanwhile."""

    def __init__(self, what: str) -> None:
        """`what` names the operation that holds the lock, for errors."""
        self._what = what
        self._lock = threading.Lock()
        self._owner = 0

    @uninterrupted
    def __enter__(self) -> None:
        if self._is_owned():
            raise UsageError(
                f"a handler of a signal has interrupted {self._what}, and calls it again. Let the handler raise an "
                "exception, or take a note that the program looks at"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = 0
        self._lock.release()

    def _is_owned(self) -> bool:
        """Return True if this thread holds the lock; `atfork.renewed` calls this before `_at_fork_reinit`."""
        return self._owner == threading.get_ident()

    def _at_fork_reinit(self) -> None:
        self._owner = 0
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]


class Background:
    """A thread that is started when it is first wanted; not under a lock, since that takes long and may fail."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._name = name
        self._run = run
        self._lock = threading.Lock()  # guards _thread; `want` and `join` load it once without
        self._thread: threading.Thread | None = None

    @property
    def begun(self) -> bool:
        """Whether it was wanted before."""
        return self._thread is not None

    def want(self) -> None:
        """Have it run.

        Raises:
            RuntimeError: there is no memory for a thread; whoever wants it next tries again.
        """
        if self._thread is not None:
            return
        thread = Thread(target=self._main, name=self._name)
        with self._lock:
            if self._thread is not None:
                return
            self._thread = thread
        try:
            thread.start()
        except BaseException:
            with self._lock:
                self._thread = None
            raise

    def _main(self) -> None:
        try:
            self._run()
        finally:
            forks.end_if_over()  # by an exception of the user's code, which ends the thread

    def join(self, patience: float) -> None:
        """Wait for its end, unless this is the thread itself."""
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(patience)
