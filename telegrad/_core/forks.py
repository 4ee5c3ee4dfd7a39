"""What a process that was forked from a worker inherits, and must not use.

A forked child has the memory of its parent and none of its threads. The parent's agent has closed descriptors there,
and perhaps locks that no thread will ever release: a call by way of it would raise a foreign error, or wait for ever.
So the child gives the agent, and all through which it is reached, a class whose every attribute raises NotInitialized.
References, streams, optimizers and whatever else a program holds need no check of their own: each of their uses loads
an attribute of one of these objects. Futures, which know no agent once a callback has made them, compare `depth`.

A remote function may fork, too, and so may any other code of the user that a thread of this package runs. The child is
that thread alone. Once the user's code has returned or raised there, the frames of this package below it must not go
on: they would serve the parent's calls. So the child keeps the stack of the moment of the fork (`_Origin`), and ends
by `os._exit` at the first use of a disabled object after the user's frame has gone. The objects in the locals of these
frames are disabled as well, so that each of them comes to such a use before it calls the user's code again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import os
import sys
import threading
import traceback
from collections import deque
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from telegrad._core.atfork import in_child
from telegrad.errors import NotInitialized

ADVICE = (
    "A process that a worker starts, as a DataLoader with num_workers does, is not that worker: call from the worker "
    "itself, or have the process join a dynamic group under a name of its own"
)

_PACKAGE = __name__.partition(".")[0]
_SUSPENDED = {
    dis.opmap.get("YIELD_VALUE"),
    dis.opmap.get("YIELD_FROM"),
}  # a frame that is at one of these goes on later

depth = 0  # how many forks lie between this process and the one that was started; only a fork changes it
_classes: dict[type, type] = {}  # of what was disabled, by the class it had


def thread() -> tuple[int, int]:
    """Return what this thread alone is called: new threads of a forked child have numbers of the parent's threads."""
    return depth, threading.get_ident()


def refuse(*_: object) -> NoReturn:
    """Raise that this process is not the worker whose objects it has; end a child whose own code is over."""
    end_if_over()
    raise NotInitialized(f"this process was forked from a worker, and is in no group. {ADVICE}")


def check(made_at: int) -> None:
    """Raise NotInitialized for something that was made at another depth: whoever would end it is in the parent."""
    if made_at != depth:
        refuse()


def disable(thing: Any) -> None:
    """In a forked child: have each use of `thing` raise NotInitialized, whatever holds it."""
    kind = type(thing)
    if is_inherited(thing) or not kind.__module__.startswith("telegrad.") or isinstance(thing, tuple | type):
        return
    if kind not in _classes:
        namespace = {
            "__slots__": (),
            "__module__": kind.__module__,
            "__getattribute__": _find,
            "__setattr__": refuse,
            "__repr__": lambda _: f"<{kind.__name__} of the process that this one was forked from>",
            "__eq__": object.__eq__,
            "__hash__": object.__hash__,
            "__del__": lambda _: None,
            _MARK: True,
        }
        meta: Any = type(kind)
        _classes[kind] = meta(kind.__name__, (kind,), namespace)
    thing.__class__ = _classes[kind]


def disable_all(owner: Any) -> None:
    """Likewise for `owner` and what its attributes hold."""
    if hasattr(owner, "__dict__"):
        for thing in list(vars(owner).values()):
            disable(thing)
    disable(owner)


def is_inherited(thing: object) -> bool:
    """Whether it was disabled: its end, too, is the parent's to see to."""
    return _MARK in type(thing).__dict__


_MARK = "_telegrad_inherited"


def _find(thing: object, name: str) -> Any:
    if name in ("__class__", "__dict__", "__weakref__"):  # isinstance() asks for them
        return object.__getattribute__(thing, name)
    refuse()


class _Origin(NamedTuple):
    """Where a thread of this package was as it forked."""

    thread: int
    ours: FrameType  # of this package, and
    users: FrameType | None  # what that had called: code of the user; None where this package has forked by itself

    def is_over(self) -> bool:
        """Return True if this is that thread, and the code of the user has returned, raised, or was suspended."""
        if threading.get_ident() != self.thread:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.users:
            frame = frame.f_back
        return frame is None


_origin: _Origin | None = None  # only a fork changes it


def _find_origin() -> _Origin | None:
    """Return where this thread is; None for a thread of the user, whose code this package tells by an error."""
    stack: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)  # what has forked: between are `_count` and this
    while frame is not None:
        stack.insert(0, frame)
        frame = frame.f_back
    # Functions of torch and of the standard library lie between this package and the user's code: loops, hooks.
    first = next((at for at, each in enumerate(stack) if not (_is_ours(each) or _is_between(each))), len(stack))
    ours = next((at for at in reversed(range(first)) if _is_ours(stack[at])), None)
    if ours is None:
        return None
    if first == len(stack):  # such as a process of multiprocessing that is started by a call of its method
        first = ours + 1
    return _Origin(threading.get_ident(), stack[ours], stack[first] if first < len(stack) else None)


def _top(frame: FrameType) -> str:
    return (frame.f_globals.get("__name__") or "").partition(".")[0]


def _is_ours(frame: FrameType) -> bool:
    return _top(frame) == _PACKAGE


def _is_between(frame: FrameType) -> bool:
    return _top(frame) in sys.stdlib_module_names or _top(frame) == "torch"


def disable_stack() -> None:
    """In a forked child, once all else is disabled: likewise for what the frames of this package on its stack use.

    But not for what the user's code was given. Of an event loop on that thread, nothing runs that its queue holds.
    """
    origin = _origin
    if origin is None:
        return
    given = {id(value) for value in origin.users.f_locals.values()} if origin.users is not None else set()
    frame: FrameType | None = origin.ours
    while frame is not None:
        for value in list(frame.f_locals.values()) if _is_ours(frame) else ():
            if id(value) not in given:
                with contextlib.suppress(TypeError):  # of a class whose objects cannot change it
                    disable(value)
        loop: Any = frame.f_locals.get("self")  # in the child, asyncio tells of no loop that runs
        if isinstance(loop, asyncio.AbstractEventLoop):
            if isinstance(queue := getattr(loop, "_ready", None), deque):
                queue.appendleft(asyncio.Handle(_end_suspended, (), loop))  # behind what runs just now, and has forked
            else:
                loop.call_soon(_end_suspended)
            break
        frame = frame.f_back


def _end_suspended() -> NoReturn:
    _end(_origin.users if _origin is not None else None, suspended=True)


def end_if_over() -> None:
    """In a forked child whose own code is over, end it. For where the user's code would be called again, or an error
    of it be logged, before anything is used that is disabled.
    """
    if _origin is not None and _origin.is_over():
        _end(_origin.users)


def _end(users: FrameType | None, suspended: bool = False) -> NoReturn:
    """End this child as a program ends whose main function has ended so; without `atexit`, as multiprocessing does."""
    code: Any = 0
    with contextlib.suppress(Exception):  # of the streams, which are the program's
        if (error := sys.exc_info()[1]) is not None:
            code = _ended_by(error, users)
        elif suspended or (users is not None and users.f_code.co_code[users.f_lasti] in _SUSPENDED):
            code = 1
            where = users.f_code.co_name if users is not None else "a coroutine"
            print(
                f"telegrad: process {os.getpid()} ends: {where} on a worker has forked it and then given control back "
                f"by `yield` or `await`, and only the worker goes on with that. {ADVICE}",
                file=sys.stderr,
            )
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def _ended_by(error: BaseException, users: FrameType | None) -> Any:
    """Print what the user's code has raised, from its own frames on; return the exit code."""
    raised: BaseException | None = error
    while raised is not None:  # an error of this package may stand in front of it
        trace = raised.__traceback__
        while trace is not None and trace.tb_frame is not users:
            trace = trace.tb_next
        if trace is not None:
            break
        raised = raised.__cause__ or raised.__context__
    error = raised or error
    if not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, trace)
        return 1
    if not isinstance(error.code, int | None):
        print(error.code, file=sys.stderr)
    return error.code


@in_child
def _count() -> None:
    global depth, _origin
    depth += 1
    _origin = _find_origin()
