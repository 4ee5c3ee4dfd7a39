"""Threads of this package, and a lock that refuses reentry."""

import atexit
import contextlib
import ctypes
import glob
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import cache
from time import monotonic
from typing import Any, TypeVar

from telegrad._core import forks
from telegrad._core.interrupts import uninterrupted
from telegrad.errors import UsageError

LONGEST_START = 60.0  # seconds for a new thread to begin
LONGEST_WAIT = 3600.0  # seconds of one sleep: the platforms' timers do not take infinity
ERRORS = 2  # the level of errors in torch's C++ code
LAST_WAIT = 1.0  # seconds for running threads to end, as the program ends

log = logging.getLogger("telegrad")
T = TypeVar("T")


def results(functions: Iterable[Callable[..., T]], *args: Any) -> Iterator[T]:
    """Call each function and yield its result; log the error of one that fails, which must not keep others from it."""
    for each in functions:
        try:
            result = each(*args)
        except Exception:
            log.exception("telegrad: %r failed", each)
        else:
            yield result


class _Started(threading.Event):
    """An event that tells `Thread.start` that the new thread runs, with a limit for the wait."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(LONGEST_START if timeout is None else timeout):
            raise RuntimeError(f"a new thread did not start within {LONGEST_START:g} s: is enough memory left for it?")
        return True


class Thread(threading.Thread):
    """A daemon thread whose `start` has a time limit.

    CPython's `start` waits until the new thread reports that it runs. A thread that runs out of memory before that ends
    silently, and `start` would wait forever.
    """

    def __init__(self, target: Callable[..., object], name: str, args: Iterable[Any] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started = _Started()  # attribute of CPython 3.10 to 3.13; under another name, there is no limit

    def run(self) -> None:
        with contextlib.suppress(SystemExit):  # of `end_threads`, which a `threading.excepthook` would report
            super().run()


@atexit.register
def end_threads() -> None:
    """End the running threads at the end of the program: a thread that later leaves code of torch would abort it."""
    # They run user code or torch, since all others end with their worker.
    running = [each for each in threading.enumerate() if isinstance(each, Thread) and each.is_alive()]
    for each in running:  # between two instructions of Python
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(each.ident or 0), ctypes.py_object(SystemExit))
    until = monotonic() + LAST_WAIT
    for each in running:
        each.join(max(0.0, until - monotonic()))


def program_has_ended() -> bool:
    """Return True if `atexit` functions run; since Python 3.12 no thread can be started then."""
    return not threading.main_thread().is_alive()


def run_in_thread(name: str, run: Callable[..., None], *args: Any, patience: float = 0.0) -> None:
    """Run a function on a new thread, or on this one if the program has ended; wait up to `patience` seconds for it.
    Raise RuntimeError if there is no memory for a thread."""
    thread = Thread(target=run, args=args, name=name)
    try:
        thread.start()
    except RuntimeError:
        if not program_has_ended():
            raise
        run(*args)
    else:
        thread.join(patience)


@cache
def _torchs_level() -> Any:
    """Return the variable of torch's C++ code with the least level of messages that it prints, or a new one."""
    import torch

    # A private variable: without it, more is printed. A user with torch's environment variable wants its messages.
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):
            (library,) = glob.glob(os.path.join(torch.__path__[0], "lib", "libc10.*"))
            return ctypes.c_int.in_dll(ctypes.CDLL(library), "FLAGS_caffe2_log_level")
    return ctypes.c_int()


class _Quiet:
    """In its blocks torch prints no warning, with a stack of C++, for a lost connection: the caller handles that."""

    def __init__(self) -> None:
        self._lock = forks.renewed(threading.Lock())  # guards all below
        self._inside = 0  # threads in such a block
        self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                level = _torchs_level()
                self._before, level.value = level.value, max(level.value, ERRORS)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _torchs_level().value = self._before


_quiet = _Quiet()


def wait_for_torch(patience: float, function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call to a store of torch, which for a stopped server waits forever, without Ctrl-C. Raise
    TimeoutError if there was no answer within `patience` seconds; the thread is abandoned."""
    answer: Future[Any] = Future()

    def call() -> None:
        try:
            with _quiet:
                answer.set_result(function(*args))
        except Exception as error:
            answer.set_exception(error)

    run_in_thread("telegrad-store", call)
    if not wait([answer], patience).done:
        raise TimeoutError("it does not answer")
    return answer.result()


class Here(threading.local):
    """A value of each thread. A plain `threading.local` takes long to find that no value was set."""

    own: Any = None


class Exclusive:
    """A lock that raises UsageError if its holder acquires it again, as a signal handler may while the holder waits."""

    def __init__(self, what: str) -> None:
        """`what` names the operation that holds the lock, for errors."""
        self._what = what
        self._lock = threading.Lock()
        self._owner = 0

    # An exception of a signal handler at the moment at which `acquire` returns would leave the lock taken by no owner.
    @uninterrupted
    def __enter__(self) -> None:
        if self._is_owned():
            raise UsageError(
                f"a signal handler interrupted {self._what} and calls it again. Let the handler raise an exception, "
                "or set a flag that the program checks"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        # In this order: after the release another thread may take the lock and store itself, which this store would
        # erase.
        self._owner = 0
        self._lock.release()

    def _is_owned(self) -> bool:
        """Return True if this thread holds the lock; `forks` calls this in a child before `_at_fork_reinit`."""
        return self._owner == threading.get_ident()

    def _at_fork_reinit(self) -> None:
        self._owner = 0
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]


class Background:
    """A thread that starts at the first `want`. The start holds no lock, because it may take long or fail."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._name = name
        self._run = run
        self._lock = threading.Lock()  # guards `thread`, which others read once without the lock
        self.thread: threading.Thread | None = None  # set as it starts

    def want(self) -> None:
        """Start the thread, unless it has been started; raise RuntimeError if there is no memory for it: the next call
        tries again."""
        if self.thread is not None:
            return
        thread = Thread(target=self._main, name=self._name)
        # Stored before the start, which happens without the lock: of several callers, one starts the thread, and the
        # others return at once.
        with self._lock:
            if self.thread is not None:
                return
            self.thread = thread
        try:
            thread.start()
        except BaseException:
            with self._lock:
                self.thread = None
            raise

    def _main(self) -> None:
        try:
            self._run()
        finally:
            forks.exit_if_user_code_ended()  # an exception of user code ends this thread

    def join(self, patience: float) -> None:
        """Wait up to `patience` seconds for the thread's end, unless this is the thread itself."""
        # `is_alive` is also False before the thread has started, when `join` would raise.
        thread = self.thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(patience)
