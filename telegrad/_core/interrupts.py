"""Exceptions from signal handlers: raised in code of the user or in a call that blocks, never in between.

CPython runs Python's signal handlers on the main thread, between two bytecodes: at the entry of a function, at a
backward jump, after a call has returned, and within a call that the signal has woken (EINTR). What a handler raises
(KeyboardInterrupt for Ctrl-C, SystemExit for SIGTERM, the RuntimeError of torch's DataLoader for SIGCHLD, a test's
timeout) is raised right there. Hundreds of such points lie within one remote call. To make each of them harmless by
`try` and `finally` cannot work: a `finally` is interrupted as well.

So the handler waits instead. `install` puts a `_Handler` in front of each handler. It looks at the interrupted frame:

- The innermost frame that is neither of the standard library nor of torch belongs to the user: the handler runs. (But
  not where what it raises would not reach the caller: in a callback of a future, a handler of `logging`, or a module
  that this package imports, since torch imports some in C and drops their exceptions.)
- It belongs to this package, and the thread is blocked in a call of C (`poll`, `acquire`, `sleep`): the handler runs,
  and what it raises comes out of that call, which has done nothing yet.
  The same holds for the backward jumps of a function that is marked as a `waiting_loop`, which may never block.
- It belongs to this package otherwise: the signal is marked pending again, and CPython calls `_Handler` at the next
  point, until the frame is another. That costs about 2 us per point, and nothing where there is no signal.

So code of this package that may run on the main thread must expect such an exception, or any other, from what blocks
and from what it calls of the user; nowhere else. It must reach the caller as the object that it is. So code that makes
a failure of a call, of a worker or of a pass from what it catches asks `raised_by_handler` first.

A blocked thread is known by this: between two runs of `_Handler`, BLOCKED seconds apart, no other point was passed.
A thread of C (`_kick`) sends the signal again for that. A lock that is taken by `with` is no such call, since what
such a lock guards is short; nor is what a function calls that is marked `uninterrupted`, as the end of a worker is,
nor the import of torch or of a part of this package.

The handlers that are there when `install` is called are replaced; those that are set later pass through the functions
`signal` and `getsignal` of the module `_signal`, which those of `signal` call: they are replaced, too. Programs see
their own handlers, as before. What stays as CPython has it: exceptions that come by other ways
(`PyThreadState_SetAsyncExc`), handlers that were there when `install` was called on another thread than the main one,
and that what is raised in a finalizer is lost.

The bytecodes at which 3.11 to 3.13 look for signals are `RESUME`, `JUMP_BACKWARD` and all of `CALL`, the last one only
where a function of C was called. `with` (`BEFORE_WITH`) looks for none between a `__enter__` of C and the body, so
`with lock:` is whole even in code of users.
"""

from __future__ import annotations

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

from telegrad._core.atfork import in_child, renewed

BLOCKED = 4e-3  # seconds without any progress, after which a call blocks
KICK = 5e-3  # seconds between two signals for that: more than BLOCKED
STUCK = (
    50  # so often at the entry of one function: while functions are traced, 3.11 looks there until nothing is pending
)
LONGEST = 10.0  # seconds, and
MOST = 10_000  # points, after which a handler runs in any case: something goes on and on

_PACKAGE = __name__.partition(".")[0]
# What is raised in code that these call does not reach the caller: exporters of metrics; callbacks of futures, of which
# torch prints it.
_TELLERS = tuple(f"{_PACKAGE}.{name}" for name in ("insight", "reporting", "_core.calls.futures", "compat.rpc.futures"))
_BETWEEN = sys.stdlib_module_names | {"torch"}  # who has called these decides
_NEVER = {"SIGSEGV", "SIGFPE", "SIGILL", "SIGBUS", "SIGABRT"}  # the interrupted instruction would fail again
_RESUME = dis.opmap.get("RESUME")
_CALLS = {number for name, number in dis.opmap.items() if name.startswith(("CALL", "PRECALL"))}  # in which C may block
_MANAGER = contextlib._GeneratorContextManager
_MANAGERS = {_MANAGER.__enter__.__code__, _MANAGER.__exit__.__code__}
_BACKWARD = {number for name, number in dis.opmap.items() if "JUMP_BACKWARD" in name}
_WAITING_LOOPS: set[CodeType] = set()
_GIVING_BACK: dict[CodeType, Callable[[dict[str, Any]], bool]] = {}
# Within these a blocked call is not interrupted either. From the start of a thread, none could tell whether that runs.
_UNINTERRUPTED = {threading.Thread.start.__code__}


def _calls_of(code: CodeType, method: str) -> set[int]:
    """Return where a method of `self` is called."""
    instructions = list(dis.get_instructions(code))
    loads = [at for at, each in enumerate(instructions) if each.argval == method]
    return {each.offset for at in loads for each in instructions[at : at + 5] if each.opcode in _CALLS}


def _goes_back(code: CodeType, at: int) -> bool:
    """Return True if a backward jump is at this place of a short function."""
    return code.co_code[at] in _BACKWARD


_WAIT = threading.Condition.wait.__code__
_RESTORING = _calls_of(_WAIT, "_acquire_restore")  # whoever waits on a condition expects to hold its lock afterwards


class _Look(Enum):
    """What to do with a signal that came within this package."""

    WAIT = "mark it pending again"
    WAIT_FOR_KICK = "leave it until the next kick"
    RUN = "run its handler"


Handler = Callable[[int, FrameType | None], Any]


class _Deferred:
    """A signal whose handler waits. Used by the main thread only."""

    __slots__ = ("began", "last", "repeats", "runs", "spot")

    def __init__(self) -> None:
        self.began = monotonic()
        self.runs = 0
        self.spot = (0, 0)  # the frame and the instruction at which it was seen last, and
        self.last = 0.0  # when
        self.repeats = 0  # so often there, one after another

    def look(self, frame: FrameType) -> _Look:
        """Say what to do at this frame, which is one of this package."""
        if _kicking and _is_importing(frame):  # which has 100,000 points
            return _Look.WAIT_FOR_KICK
        now = monotonic()
        self.runs += 1
        if self.runs > MOST and now - self.began > LONGEST:
            return _Look.RUN
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
        may_run = is_blocked or (waits and _goes_back(code, frame.f_lasti))
        return _Look.RUN if may_run and not _is_uninterrupted(frame) else _Look.WAIT


# Guards that a kick is sent for a deferred signal only; held by the main thread or `_kick`.
_lock = renewed(threading.Lock())
_deferred: dict[int, _Deferred] = {}
_kicking = False  # whether a thread is in `_kick`
_drained = 0  # the signal whose kicks are dropped at this moment


class _Handler:
    """Stands in front of a handler."""

    __slots__ = ("again", "inner")

    def __init__(self, signum: int, inner: Handler) -> None:
        self.inner = inner
        # CPython drops what a handler returns after the last bytecode of it. So this, and nothing earlier, can mark the
        # signal pending for the interrupted frame: an instance of `again` does it as it dies, without any bytecode.
        trip = staticmethod(functools.partial(_thread.interrupt_main, signum))  # type: ignore[arg-type]
        self.again: type = type("Again", (), {"__slots__": (), "__del__": trip})

    def __call__(self, signum: int, frame: FrameType | None) -> object:
        global _drained
        if signum == _drained:
            return None
        deferred = _deferred.get(signum)
        is_ours = frame is not None and _is_ours(frame)
        if frame is not None and is_ours:
            if deferred is None:
                deferred = _deferred[signum] = _Deferred()
                _begin_to_kick()
            look = deferred.look(frame)
            if look is not _Look.RUN:
                return self.again() if look is _Look.WAIT else None
        if deferred is not None:
            with _lock:
                _deferred.pop(signum, None)
            # A kick may have been sent since this was called. It is dropped here: else the handler would run twice. A
            # signal that another thread has sent may still be on its way to this processor; after a system call it
            # has been delivered.
            try:
                _drained = signum
                os.getppid()
                _look_for_signals()
            finally:
                _drained = 0
        if signum in _postponed:
            raise _postponed.pop(signum)
        if frame is None or not is_ours or not _hands_over(frame):
            return self.inner(signum, frame)
        self.inner(signum, frame)
        raise Resumed

    def __repr__(self) -> str:
        return f"<handler of {_PACKAGE} in front of {self.inner!r}>"


def raised_by_handler(error: BaseException) -> bool:
    """Return True if a handler of a signal has raised this error."""
    return _signal_of(error) is not None


def _signal_of(error: BaseException) -> int | None:
    """Return the signal whose handler has raised an error, if one has."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _Handler.__call__.__code__:
            return int(trace.tb_frame.f_locals["signum"])
        trace = trace.tb_next
    return None


_postponed: dict[int, BaseException] = {}  # by signals; only the main thread uses it


def postpone(error: BaseException) -> bool:
    """Have an error of a signal handler raised again where it reaches the caller; False for an error of others.

    For an `except` block whose caller, such as torch, would drop the error. On other threads no handler has raised it
    just now, so it is False there.
    """
    signum = _signal_of(error)
    if signum is None or threading.current_thread() is not threading.main_thread():
        return False
    _postponed[signum] = error
    _thread.interrupt_main(signum)  # type: ignore[arg-type]
    return True


class Resumed(BaseException):
    """Raised in a function that `gives_back`, once a handler has run on top of it and has returned."""


def _hands_over(at: FrameType) -> bool:
    """Have a waiting function give back what it holds; return whether it held anything.

    Only where it waits: at its own backward jump, or two calls further in, both named `wait_readable`.
    """
    frame: FrameType | None = at
    while frame is not None and frame.f_code.co_name == "wait_readable":
        frame = frame.f_back
    give_back = _GIVING_BACK.get(frame.f_code) if frame is not None else None
    return frame is not None and give_back is not None and give_back(frame.f_locals)


def _look_for_signals() -> None:
    """Call the handlers of signals that are pending, as the entry of each function does."""


def _is_ours(at: FrameType) -> bool:
    """Return True if the handler must wait at this frame, since code of this package is at work."""
    of_user = cannot_raise = False
    frame: FrameType | None = at
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        top = name.partition(".")[0]
        code = frame.f_code
        if top == "logging" or code.co_name in ("__del__", "<module>"):
            cannot_raise = True
        if top == _PACKAGE:
            return not of_user or cannot_raise or name.startswith(_TELLERS)
        if code in _MANAGERS and _made_here(frame):  # of a `with` in the user's code
            return True
        # A name that no module has is that of code that was generated, such as the methods of a NamedTuple.
        of_user = of_user or (top not in _BETWEEN and name in sys.modules and code.co_name != "__del__")
        frame = frame.f_back
    return False


def _is_uninterrupted(at: FrameType) -> bool:
    if at.f_code is _WAIT and at.f_lasti in _RESTORING:
        return True
    frame: FrameType | None = at
    while frame is not None:
        if frame.f_code in _UNINTERRUPTED:
            return True
        frame = frame.f_back
    return False


def _is_importing(at: FrameType) -> bool:
    """Return True if this package imports torch, or a part of itself."""
    frame: FrameType | None = at
    while frame is not None:
        top = (frame.f_globals.get("__name__") or "").partition(".")[0]
        if top in ("torch", _PACKAGE) and frame.f_code.co_name == "<module>":
            return True
        if top == _PACKAGE:
            return False
        frame = frame.f_back
    return False


def _made_here(frame: FrameType) -> bool:
    """Return True if the context manager that is entered or left at this frame is a generator of this package."""
    generator = getattr(getattr(frame.f_locals.get("self"), "gen", None), "gi_frame", None)
    return generator is not None and (generator.f_globals.get("__name__") or "").partition(".")[0] == _PACKAGE


def _begin_to_kick() -> None:
    """Have the blocked main thread be woken now and then. By `_thread`, since `threading` may be interrupted."""
    global _kicking
    if _kicking or not hasattr(signal, "pthread_kill"):
        return
    _kicking = True
    try:
        _thread.start_new_thread(_kick, ())
    except RuntimeError:  # no thread is left: a handler waits until what blocks has ended
        _kicking = False


def _kick() -> None:
    global _kicking
    main = threading.main_thread().ident
    assert main is not None
    while True:
        sleep(KICK)
        with _lock:
            for signum in list(_deferred):
                signal.pthread_kill(main, signum)
        if not _deferred:
            _kicking = False
            if not _deferred:  # else a signal was deferred before that was stored
                return
            _kicking = True


F = TypeVar("F", bound=Callable[..., Any])


def waiting_loop(function: F) -> F:
    """Mark a function of which each backward jump is as good a moment for an interrupt as a blocked call is."""
    _WAITING_LOOPS.add(function.__code__)
    return function


def gives_back(give_back: Callable[[dict[str, Any]], bool]) -> Callable[[F], F]:
    """Mark a function that waits and must give back something first, where a handler is to run on top of it.

    `give_back` is called with its local variables. If it returns True, `Resumed` is raised in the function afterwards.
    """

    def mark(function: F) -> F:
        _GIVING_BACK[function.__code__] = give_back
        return function

    return mark


def uninterrupted(function: F) -> F:
    """Mark a function that ends something, in a bounded time: not even its waits are interrupted, but what follows."""
    _UNINTERRUPTED.add(function.__code__)
    return function


# Standing in front of handlers

_real: Any = sys.modules["_signal"]  # what the module `signal` calls
_real_signal = _real.signal
_real_getsignal = _real.getsignal
_installed = False
replaced: dict[int, Callable[[], None]] = {}  # by signals: called once, after the handler was replaced


def _fronted(signum: int, handler: Any) -> Any:
    """Return what to install for `handler`."""
    if not callable(handler) or isinstance(handler, _Handler) or signum in _exempt():
        return handler
    # asyncio and uvloop tell their loops by a descriptor, and have a handler that does nothing: each time that the
    # signal is marked pending again they would hear of one more.
    if getattr(handler, "__name__", "") in ("_sighandler_noop", "noop"):
        return handler
    return _Handler(signum, handler)


@functools.cache
def _exempt() -> frozenset[int]:
    return frozenset(getattr(signal, name) for name in _NEVER if hasattr(signal, name))


def _own(handler: Any) -> Any:
    """Return the handler of the program."""
    return handler.inner if isinstance(handler, _Handler) else handler


@functools.wraps(_real_signal)
def _signal(signalnum: int, handler: Any, /) -> Any:
    fronted = _fronted(signalnum, handler)
    with _lock:
        before = _real_signal(signalnum, fronted)
        if not isinstance(fronted, _Handler):
            _deferred.pop(signalnum, None)  # a kick would end the process
    if (release := replaced.pop(signalnum, None)) is not None:
        release()
        _real_signal(signalnum, fronted)  # faulthandler, whose turn is over, has put back the one that it had found
    return _own(before)


@functools.wraps(_real_getsignal)
def _getsignal(signalnum: int, /) -> Any:
    return _own(_real_getsignal(signalnum))


def install() -> None:
    """Stand in front of all signal handlers of the process, from now on; those set before, on the main thread only."""
    global _installed
    if not _installed:
        _installed = True
        _real.signal = _signal
        _real.getsignal = _getsignal
    if threading.current_thread() is not threading.main_thread():
        return
    for signum in signal.valid_signals():
        handler = _real_getsignal(signum)
        if callable(handler) and not isinstance(handler, _Handler):
            fronted = _fronted(signum, handler)
            if fronted is not handler:
                _real_signal(signum, fronted)


@in_child
def _forget_after_fork() -> None:
    """A forked child has no thread that kicks, and where another thread has forked, not that main thread."""
    global _kicking, _drained
    _kicking = False
    _drained = 0
    _deferred.clear()
    _postponed.clear()
