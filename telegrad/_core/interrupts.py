"""Run signal handlers only in user code or in a blocked call, and not at other points of this package.

CPython runs Python's signal handlers on the main thread, between two bytecodes: at the entry of a function, at a
backward jump, after a call has returned, and within a call that the signal has interrupted (EINTR). An exception of a
handler (KeyboardInterrupt for Ctrl-C, SystemExit for SIGTERM, the RuntimeError of torch's DataLoader for SIGCHLD, a
test's timeout) is raised at that point. One remote call contains hundreds of such points. `try` and `finally` cannot
protect them: a `finally` is interrupted as well.

Therefore handlers are deferred. `install` wraps each handler in a `_Handler`, which looks at the interrupted frame:

- The innermost frame that is neither of the standard library nor of torch belongs to the user: the handler runs. It is
  deferred, however, where its exception would not reach the caller: in a callback of a future, in a handler of
  `logging`, or in a module that this package imports, since torch imports some in C and drops their exceptions.
- The frame belongs to this package, and the thread is blocked in a C call (`poll`, `acquire`, `sleep`): the handler
  runs. Its exception leaves that call, which has had no effect yet. The same holds for the backward jumps of a function
  marked as a `waiting_loop`, which may never block.
- The frame belongs to this package otherwise: the signal is marked pending again, and CPython calls `_Handler` at the
  next point, until the frame is another. This costs about 2 us per point, and nothing while no signal is pending.

So code of this package that may run on the main thread must expect exceptions of handlers from blocking calls and from
calls of user code, and nowhere else. The exception must reach the caller as the same object. So code that turns a
caught exception into a failure of a call, a worker or a pass calls `raised_by_handler` first.

A thread counts as blocked if no other point was passed between two runs of `_Handler` that are BLOCKED seconds apart.
The thread of `_Kicks` sends the signal repeatedly for this check: a blocked C call checks for signals only when one
arrives (EINTR), and the pending mark that a deferral sets does not wake it. Some calls never count as blocked: a lock
taken by `with`, because such locks are held briefly; calls in a function marked `uninterrupted`, such as the shutdown
of a worker; and the import of torch or of a part of this package.

A deferred signal has an entry in `_deferred`, which the main thread alone adds. The entry ends when the handler runs,
or when the program replaces the handler by one that is not wrapped. Kicks are sent only for entries, and `_lock` makes
the removal of an entry atomic with the sending: no kick is sent after the removal.

`install` wraps the existing handlers. Handlers set later pass through the functions `signal` and `getsignal` of the
module `_signal`, which those of `signal` call; they are wrapped, too. Programs see their own handlers, as before. Not
changed are: exceptions raised by other means (`PyThreadState_SetAsyncExc`), existing handlers if `install` was called
on another thread than the main one, and the loss of exceptions raised in a finalizer.

Python 3.11 to 3.13 check for signals at the bytecodes `RESUME`, `JUMP_BACKWARD` and all of `CALL`; at `CALL` only if a
C function was called. `with` (`BEFORE_WITH`) does not check between a C `__enter__` and the body, so `with lock:` is
atomic even in user code.
"""

import _thread
import contextlib
import dis
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from enum import Enum
from time import monotonic, sleep
from types import CodeType, FrameType
from typing import Any, TypeVar

from telegrad._core.forks import in_child, outwards, renewed

BLOCKED = 4e-3  # seconds without progress, after which a call counts as blocked
# Seconds between two kicks. A blocked call sees only kicks, so this must be more than BLOCKED: otherwise no two runs of
# `_Handler` would be far enough apart.
KICK = 5e-3
# Seconds of one sleep. A signal that arrives just before a call sleeps in the system does not end the sleep: Python
# only takes note of it, and looks at its notes after the call. So waits are divided into sleeps.
SLEEP = 1.0
# Runs at the entry of one function. While functions are traced, Python 3.11 does not leave the entry of a function
# until no signal is pending. A signal that is marked pending again each time would keep it there forever, so after this
# many runs the signal is left to the next kick.
STUCK = 50
# A deferral that has lasted for LONGEST seconds and has passed MOST points ends: the handler runs wherever the thread
# is. This is for code of this package that neither blocks nor returns to the user.
LONGEST = 10.0
MOST = 10_000

_PACKAGE = __name__.partition(".")[0]
# Modules that call user code whose exceptions do not reach the caller: metrics exporters, and callbacks of futures,
# whose exceptions torch prints.
_EXCEPTION_DROPPING_MODULES = tuple(
    f"{_PACKAGE}.{name}" for name in ("insight", "reporting", "_core.calls.futures", "compat.rpc.calls")
)
# Frames of these modules do not decide whether code of the user or of this package is running: their callers do.
_BETWEEN = sys.stdlib_module_names | {"torch"}
# Signals that are not deferred: after their handler, the interrupted instruction would fail again.
_NEVER = {getattr(signal, f"SIG{name}", None) for name in ("SEGV", "FPE", "ILL", "BUS", "ABRT")}
_RESUME = dis.opmap.get("RESUME")
# Opcodes of calls that may block in C. Python 3.11 has PRECALL before CALL. `co_code`, in which these are looked up,
# has no specialized opcodes.
_CALLS = {number for name, number in dis.opmap.items() if name.startswith(("CALL", "PRECALL"))}
# `with` in user code enters and leaves a context manager of this package in frames of contextlib, whose caller is the
# user. An exception there would come after the `yield` of the generator and before the body: the context would be
# entered and never left.
_MANAGER = contextlib._GeneratorContextManager
_MANAGERS = {_MANAGER.__enter__.__code__, _MANAGER.__exit__.__code__}
# A waiting loop is short: its backward jumps need no EXTENDED_ARG.
_BACKWARD = {number for name, number in dis.opmap.items() if "JUMP_BACKWARD" in name}
# Functions are known by their code objects, since a frame has no reference to its function.
_WAITING_LOOPS: set[CodeType] = set()
_READING: set[CodeType] = set()
# Blocked calls within these functions are not interrupted either. `Thread.start` waits until the new thread runs: after
# an exception there, its caller could not know whether the thread runs.
_UNINTERRUPTED = {threading.Thread.start.__code__}


def _calls_of(code: CodeType, method: str) -> set[int]:
    """Return the offsets of the calls of a method of `self`."""
    # The call follows within five instructions: the load of the method, one argument, and the call.
    instructions = list(dis.get_instructions(code))
    loads = [at for at, each in enumerate(instructions) if each.argval == method]
    return {each.offset for at in loads for each in instructions[at : at + 5] if each.opcode in _CALLS}


_WAIT = threading.Condition.wait.__code__
# `Condition.wait` takes the lock of the condition again in a `finally`, by a call that may block. An exception there
# would leave `with condition:` without the lock, and its end would raise a RuntimeError.
_RESTORING = _calls_of(_WAIT, "_acquire_restore")


class _Look(Enum):
    """Decision about a signal that interrupted this package."""

    WAIT = "mark it pending again"
    WAIT_FOR_KICK = "leave it until the next kick"
    RUN = "run its handler"


Handler = Callable[[int, FrameType | None], Any]


class _Deferred:
    """A signal whose handler is deferred. Used by the main thread only."""

    __slots__ = ("began", "last", "repeats", "runs", "spot")

    def __init__(self) -> None:
        self.began = monotonic()
        self.runs = 0
        self.spot = (0, 0)  # the frame and instruction of the last run
        self.last = 0.0  # time of the last run
        self.repeats = 0  # consecutive further runs at `spot`

    def look(self, frame: FrameType) -> _Look:
        """Decide what to do with the signal at this frame of this package."""
        # An import passes 100,000 points, far more than MOST. So the signal is not marked pending again at each of
        # them, but checked at each kick. Without the thread of the kicks it would be lost.
        if _kicks.running is not None and _is_importing(frame):
            return _Look.WAIT_FOR_KICK
        now = monotonic()
        self.runs += 1
        if self.runs > MOST and now - self.began > LONGEST:
            return _Look.RUN
        # As long as the signal is pending, each point runs this method. So if two runs in a row are at the same frame
        # and instruction with a long time between them, the call there blocks.
        spot, last = self.spot, self.last
        self.spot, self.last = (id(frame), frame.f_lasti), now
        self.repeats = self.repeats + 1 if self.spot == spot else 0
        code = frame.f_code
        waits = code in _WAITING_LOOPS
        if frame.f_lasti < 0 or not (self.repeats or waits):
            return _Look.WAIT
        opcode = code.co_code[frame.f_lasti]
        if opcode == _RESUME:
            return _Look.WAIT if self.repeats < STUCK else _Look.WAIT_FOR_KICK
        is_blocked = self.repeats and opcode in _CALLS and now - last > BLOCKED
        may_run = is_blocked or (waits and opcode in _BACKWARD)
        return _Look.RUN if may_run and not _is_uninterrupted(frame) else _Look.WAIT


# Ensures that kicks are sent for deferred signals only; held by the main thread or the thread of `_Kicks`. A kick after
# the removal of the entry would run the handler twice, or end the process if the signal has its default action again.
_lock = renewed(threading.Lock())
_deferred: dict[int, _Deferred] = {}


class _Handler:
    """Wrapper of a signal handler that defers it."""

    __slots__ = ("_discards", "again", "inner")

    def __init__(self, signum: int, inner: Handler) -> None:
        self.inner = inner
        self._discards = False  # kicks are currently discarded
        # CPython discards the return value of a handler after the handler's last bytecode. So the finalizer of that
        # value, and no earlier code, can mark the signal pending for the interrupted frame: it runs no bytecode.
        trip = staticmethod(functools.partial(_thread.interrupt_main, signum))  # type: ignore[arg-type]
        self.again: type = type("Again", (), {"__slots__": (), "__del__": trip})

    def __call__(self, signum: int, frame: FrameType | None) -> object:
        if self._discards:
            return None
        deferred = _deferred.get(signum)
        # Python drops the exceptions of finalizers. A deferred handler often meets one, because objects of this package
        # are freed as soon as its last function returns.
        if deferred is not None and frame is not None and any(map(_is_finalizer, outwards(frame))):
            return self.again()
        is_ours = frame is not None and _is_ours(frame)
        if frame is not None and is_ours:
            if deferred is None:
                deferred = _deferred[signum] = _Deferred()
                _kicks.begin()
            look = deferred.look(frame)
            if look is not _Look.RUN:
                return self.again() if look is _Look.WAIT else None
        if deferred is not None:
            # A kick may have been sent since this call began. It is discarded here, else the handler would run twice.
            # It may also come while the entry is removed, and would add another one. A signal that another thread sent
            # may not have reached this processor yet; after a system call it has been delivered.
            try:
                self._discards = True
                with _lock:
                    _deferred.pop(signum, None)
                os.getppid()
                _look_for_signals()
            finally:
                self._discards = False
        # The handler has run and has raised this already, where its exception would have been dropped (`raise_later`).
        if signum in _postponed:
            raise _postponed.pop(signum)
        if frame is None or not is_ours or not _hands_over(frame):
            try:
                return self.inner(signum, frame)
            except BaseException as error:
                # Functions of this package know the error by this frame. If none is on the stack, the user need not see
                # the frame, so it is taken out of the traceback. A `raise` without arguments does not add it again.
                if _PACKAGE not in map(_package_of, outwards(frame)):
                    # its class may forbid an assignment
                    BaseException.with_traceback(error, error.__traceback__.tb_next)  # type: ignore[union-attr]
                raise
        # The interrupted function no longer has the right to read, so it must not continue where it was interrupted.
        # `Resumed` makes it start its wait again. If the handler raises, its exception ends the wait instead.
        self.inner(signum, frame)
        raise Resumed


def raised_by_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised this error."""
    return _signal_of(error) is not None


def runs_handler(frame: FrameType) -> bool:
    """Return True for the frame that runs a signal handler. By this frame its errors are known."""
    return frame.f_code is _Handler.__call__.__code__


def _signal_of(error: BaseException) -> int | None:
    """Return the signal whose handler raised an error; None for other errors."""
    trace = error.__traceback__
    while trace is not None:
        if runs_handler(trace.tb_frame):
            return int(trace.tb_frame.f_locals["signum"])
        trace = trace.tb_next
    return None


_postponed: dict[int, BaseException] = {}  # by signal; used by the main thread only


def raise_later(error: BaseException) -> bool:
    """Raise an error of a signal handler again at a later point, where it reaches the caller.

    Return False for other errors. For an `except` block whose caller, such as torch, would drop the error. Return False
    on other threads than the main one, because handlers do not run there.
    """
    signum = _signal_of(error)
    if signum is None or threading.current_thread() is not threading.main_thread():
        return False
    _postponed[signum] = error
    _thread.interrupt_main(signum)  # type: ignore[arg-type]
    return True


class Resumed(BaseException):
    """Raised in a function marked `releases_before_handler` after a signal handler has run within it and returned."""


def _hands_over(at: FrameType) -> bool:
    """Make a waiting function give back the links that it may read; return True if there were some.

    This happens only where the function waits: at its own backward jump, or in a call of a `wait_readable`.
    """
    frame = next((frame for frame in outwards(at) if frame.f_code.co_name != "wait_readable"), at)
    held = frame.f_locals["held"] if frame.f_code in _READING else []
    links = held[:]
    held.clear()
    for link in links:
        link.stop_reading()
    return bool(links)


def _look_for_signals() -> None:
    """Run the handlers of pending signals: CPython checks for signals at the entry of each function."""


def _is_ours(at: FrameType) -> bool:
    """Return True if the handler must be deferred at this frame because code of this package is running."""
    of_user = cannot_raise = False
    for frame in outwards(at):
        name = frame.f_globals.get("__name__") or ""
        top = name.partition(".")[0]
        code = frame.f_code
        # An exception here is printed or dropped. This matters only if a frame of this package is further out.
        if top == "logging" or code.co_name in ("__del__", "<module>"):
            cannot_raise = True
        if top == _PACKAGE:
            return not of_user or cannot_raise or name.startswith(_EXCEPTION_DROPPING_MODULES)
        if code in _MANAGERS and _made_here(frame):  # entered or left by a `with` in user code
            return True
        # Generated code, such as the methods of a NamedTuple, has a module name that no module has.
        of_user = of_user or (top not in _BETWEEN and name in sys.modules)
    return False


def _package_of(frame: FrameType) -> str:
    return (frame.f_globals.get("__name__") or "").partition(".")[0]


def _is_finalizer(frame: FrameType) -> bool:
    """Return True for `__del__`, and for a callback of a weak reference in the library, such as that of a WeakSet."""
    return frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") in ("weakref", "_weakrefset")


def _is_uninterrupted(at: FrameType) -> bool:
    restores = at.f_code is _WAIT and at.f_lasti in _RESTORING
    return restores or any(frame.f_code in _UNINTERRUPTED for frame in outwards(at))


def _is_importing(at: FrameType) -> bool:
    """Return True if this package is importing torch or a part of itself."""
    for frame in outwards(at):
        top = _package_of(frame)
        if top in ("torch", _PACKAGE) and frame.f_code.co_name == "<module>":
            return True
        if top == _PACKAGE:
            return False
    return False


def _made_here(frame: FrameType) -> bool:
    """Return True if the context manager entered or left at this frame is a generator of this package."""
    generator = getattr(getattr(frame.f_locals.get("self"), "gen", None), "gi_frame", None)
    return generator is not None and _package_of(generator) == _PACKAGE


class _Kicks:
    """A thread that sends deferred signals to the blocked main thread again and again."""

    def __init__(self) -> None:
        # An object of the thread that sends kicks. Stored without a lock: the main thread stores it in a handler, which
        # may have interrupted a function of that thread that holds `_lock`.
        self.running: object = None

    def begin(self) -> None:
        """Start the thread, by `_thread`, because a handler may interrupt `threading`."""
        if self.running is not None or not hasattr(signal, "pthread_kill"):
            return
        self.running = own = object()
        try:
            _thread.start_new_thread(self._run, (own,))
        except RuntimeError:  # no thread can be started: the handler waits until the blocking call returns
            self.running = None

    def _run(self, own: object) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            sleep(KICK)
            # Another thread was begun, see below. With the kicks of two threads, a call would never count as blocked.
            if self.running is not own:
                return
            with _lock:
                for signum in list(_deferred):
                    signal.pthread_kill(main, signum)
            # The main thread adds an entry and then reads `running`; this thread clears `running` and then looks for
            # entries. So at least one of them sees the other. If both do, there are two threads, and the one that was
            # stored last goes on.
            if not _deferred:
                self.running = None
                if not _deferred:
                    return
                self.running = own


_kicks = _Kicks()


F = TypeVar("F", bound=Callable[..., Any])


def waiting_loop(function: F) -> F:
    """Mark a function whose backward jumps can be interrupted like a blocked call."""
    _WAITING_LOOPS.add(function.__code__)
    return function


@waiting_loop
def run_deferred() -> None:
    """Run the handlers of deferred signals where no code of the user follows: where an exception leaves this package.

    The interpreter prints an exception that ends the program, and a handler that raised there would end the printing.
    """
    while _deferred:
        sleep(KICK)


def releases_before_handler(function: F) -> F:
    """Mark a waiting function whose local variable `held` has the links that it may read at the moment, or is empty.

    A signal handler runs on the same thread, and may make calls. If the thread kept the right to read, no thread could
    read the answers. So the links are taken out of `held` and given back first. If there were some, `Resumed` is raised
    in the function after the handler has returned.
    """
    _READING.add(function.__code__)
    return function


def uninterrupted(function: F) -> F:
    """Mark a function that takes a bounded time and must complete: signal handlers run after it, not in its waits."""
    _UNINTERRUPTED.add(function.__code__)
    return function


# Wrapping handlers

_real: Any = sys.modules["_signal"]  # its functions are called by the module `signal`
_real_signal = _real.signal
_real_getsignal = _real.getsignal
# By signal: called once, after the program has replaced a handler that this package had installed in C, of which
# `getsignal` knows nothing (`reporting.introspection`: faulthandler).
replaced: dict[int, Callable[[], None]] = {}


def _wrapped(signum: int, handler: Any) -> Any:
    """Return the handler to install for `handler`."""
    if not callable(handler) or isinstance(handler, _Handler) or signum in _NEVER:
        return handler
    # asyncio and uvloop notify their loops by a descriptor, and install a handler that does nothing. Each time the
    # signal is marked pending again, the loop would receive one more notification.
    if getattr(handler, "__name__", "") in ("_sighandler_noop", "noop"):
        return handler
    return _Handler(signum, handler)


def _own(handler: Any) -> Any:
    """Return the program's own handler."""
    return handler.inner if isinstance(handler, _Handler) else handler


@functools.wraps(_real_signal)
def _signal(signalnum: int, handler: Any, /) -> Any:
    fronted = _wrapped(signalnum, handler)
    # Under the lock, since a kick between the two steps would find SIG_DFL, and end the process.
    with _lock:
        before = _real_signal(signalnum, fronted)
        if not isinstance(fronted, _Handler):
            _deferred.pop(signalnum, None)
    if (release := replaced.pop(signalnum, None)) is not None:
        release()
        _real_signal(signalnum, fronted)  # `release` made faulthandler restore the handler that it had replaced
    return _own(before)


@functools.wraps(_real_getsignal)
def _getsignal(signalnum: int, /) -> Any:
    return _own(_real_getsignal(signalnum))


@functools.cache  # a program may replace these functions in turn
def _wrap_later_handlers() -> None:
    _real.signal = _signal
    _real.getsignal = _getsignal


def install() -> None:
    """Wrap all signal handlers of the process from now on; wrap the existing ones on the main thread only."""
    _wrap_later_handlers()
    if threading.current_thread() is not threading.main_thread():
        return
    for signum in signal.valid_signals():
        handler = _real_getsignal(signum)
        if (fronted := _wrapped(signum, handler)) is not handler:
            _real_signal(signum, fronted)


@in_child
def _forget_after_fork() -> None:
    """Reset the state in a forked child: it has no kicking thread, and may have another main thread."""
    _kicks.running = None
    _deferred.clear()
    _postponed.clear()
