"""Reset locks and state in a forked child, and disable what it inherits from a worker.

A forked child has the memory of its parent and one thread, the one that forked. A lock that another thread of the
parent held at that moment is never released in the child: the child would wait for it forever. Therefore a lock that
belongs to a module or to an object used by the whole process, and not to one worker, is created by
`renewed(threading.Lock())`. State that belongs to threads or calls of the parent is reset by a function that is marked
with `in_child`.

In the child, the parent's agent has closed descriptors, and perhaps locks that no thread will ever release. A call
through this agent would raise an unrelated error, or wait forever. Therefore the child changes the class of the agent,
and of all objects that lead to it, to one whose every attribute raises NotInitialized. References, streams, optimizers
and other objects need no check of their own: each use of them loads an attribute of a disabled object. Futures compare
`depth`, because a future that a callback made has no agent.

User code may also fork on a thread of this package, for example in a remote function. The child then has that thread
alone. Once the user code has returned or raised in the child, the frames of this package below it must not continue:
they would serve the parent's calls. So the child records its stack at the fork (`_Origin`), and ends by `os._exit` at
the first use of a disabled object after the user's frame has gone. The objects in the locals of these frames are
disabled too: each frame uses one of them before it calls user code again.

The functions in the child run in the order in which modules were imported. That order matters: `_renew` first, then
`_count`, which records the stack, and `current.forget`, which disables objects and needs that record, after both.
"""

import asyncio
import contextlib
import dis
import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

from telegrad.errors import NotInitialized

L = TypeVar("L")
F = TypeVar("F", bound=Callable[[], object])

# Weak: a lock may belong to an object that is freed, and needs no renewal then.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def renewed(lock: L) -> L:
    """Register a lock, condition or event for release in each forked child; return it.

    A reentrant lock that the forking thread itself holds stays held: that thread continues in the child, and releases
    it.
    """
    _locks.add(lock)
    return lock


def in_child(act: F) -> F:
    """Mark a function that each forked child calls at once, on the thread that forked, in the order of the marks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)
    return act


@in_child  # registered first: the functions after this one can then take the locks
def _renew() -> None:
    for lock in list(_locks):
        if not (hasattr(lock, "_is_owned") and lock._is_owned()):
            lock._at_fork_reinit()


ADVICE = (
    "A process that a worker starts, as a DataLoader with num_workers does, is not that worker: call from the worker "
    "itself, or have the process join a dynamic group under a name of its own"
)

_PACKAGE = __name__.partition(".")[0]
# A frame stopped at one of these opcodes can be resumed.
_SUSPENDED = {dis.opmap.get("YIELD_VALUE"), dis.opmap.get("YIELD_FROM")}

_classes: dict[type, type] = {}  # classes of disabled objects, by the original class


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def thread() -> tuple[int, int]:
    """Return an identifier of this thread, with `depth`: a child's new threads may reuse idents of its parent."""
    return process.depth, threading.get_ident()


def refuse(*_: object) -> NoReturn:
    """Raise NotInitialized: this process does not own the objects. End a child whose user code has ended."""
    exit_if_user_code_ended()
    raise NotInitialized(f"this process was forked from a worker and is not in a group. {ADVICE}")


def check(made_at: int) -> None:
    """Raise NotInitialized for an object made at another depth: the code that would complete it runs in the parent."""
    if made_at != process.depth:
        refuse()


def disable(thing: Any) -> None:
    """In a forked child, make each use of `thing` raise NotInitialized, through all references to it."""
    kind = type(thing)
    if is_inherited(thing) or not kind.__module__.startswith("telegrad.") or isinstance(thing, tuple | type):
        return
    if kind not in _classes:
        # The new class is a subclass without slots of its own, so that its objects have the same memory layout: Python
        # refuses any other change of `__class__`. Equality and hashes are those of `object`, since those of the class
        # may load attributes. The finalizer does nothing: what it would release belongs to the parent.
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
    # Not by an assignment: a class may refuse it by a `__setattr__` of its own.
    object.__setattr__(thing, "__class__", _classes[kind])


def disable_all(owner: Any) -> None:
    """In a forked child, disable `owner` and the objects that its attributes, or dictionaries in them, hold."""
    if hasattr(owner, "__dict__"):
        for held in list(vars(owner).values()):
            for thing in held.values() if type(held) is dict else (held,):
                disable(thing)
    disable(owner)


def is_inherited(thing: object) -> bool:
    """Return True if `thing` was disabled: only the parent may end or release it."""
    return _MARK in type(thing).__dict__


_MARK = "_telegrad_inherited"


def _find(thing: object, name: str) -> Any:
    if name in ("__class__", "__dict__", "__weakref__"):  # used by isinstance()
        return object.__getattribute__(thing, name)
    refuse()


class _Origin(NamedTuple):
    """The stack position at which a thread of this package forked."""

    thread: int
    ours: FrameType  # the innermost frame of this package below user code
    users: FrameType | None  # the user frame that it called; None if this package itself forked

    def is_over(self) -> bool:
        """Return True if this is that thread, and the user code has returned, raised, or was suspended."""
        is_here = threading.get_ident() == self.thread
        return is_here and all(frame is not self.users for frame in outwards(sys._getframe()))


class Process:
    """How this process came to be; only a fork changes it."""

    def __init__(self) -> None:
        self.depth = 0  # forks between the process that was started and this one
        self.origin: _Origin | None = None


process = Process()


def _find_origin() -> _Origin | None:
    """Return the position of this thread; None for a user's thread, which gets errors from this package instead."""
    stack = [*outwards(sys._getframe(2))][::-1]  # from the frame that forked; `_count` and this function are above it
    # Functions of torch and of the standard library, such as loops and hooks, lie between this package and the user
    # code.
    others = {_PACKAGE, "torch", *sys.stdlib_module_names}
    first = next((at for at, each in enumerate(stack) if _top(each) not in others), len(stack))
    ours = next((at for at in reversed(range(first)) if _top(stack[at]) == _PACKAGE), None)
    if ours is None:
        return None
    if first == len(stack):  # for example a multiprocessing process, started by a call of its method
        first = ours + 1
    return _Origin(threading.get_ident(), stack[ours], stack[first] if first < len(stack) else None)


def _top(frame: FrameType) -> str:
    return (frame.f_globals.get("__name__") or "").partition(".")[0]


def disable_stack() -> None:
    """Disable the objects used by the frames of this package on the stack of a forked child, after all others.

    Arguments and locals of the user's frame are not disabled. If an event loop runs on that thread, the child ends
    before the loop runs anything else from its queue.
    """
    origin = process.origin
    if origin is None:
        return
    # The user's code in the child may go on with its own arguments and locals, even where a frame of this package holds
    # them, too.
    given = {id(value) for value in origin.users.f_locals.values()} if origin.users is not None else set()
    for frame in outwards(origin.ours):
        for value in list(frame.f_locals.values()) if _top(frame) == _PACKAGE else ():
            # Python itself uses the object of the thread that has forked: it is the main thread of the child.
            if id(value) not in given and not isinstance(value, threading.Thread):
                with contextlib.suppress(TypeError):  # the class of the object cannot be changed
                    disable(value)
        # A coroutine that forks gives control back at its next `await`. The loop would then run the parent's callbacks,
        # so a callback that ends the child is put in front of them.
        loop: Any = frame.f_locals.get("self")  # found by its frame: in the child, asyncio reports no running loop
        if isinstance(loop, asyncio.AbstractEventLoop):
            if isinstance(queue := getattr(loop, "_ready", None), deque):
                # runs right after the current callback, which has forked
                queue.appendleft(asyncio.Handle(_end_suspended, (), loop))
            else:
                loop.call_soon(_end_suspended)
            break


def _end_suspended() -> NoReturn:
    _end(process.origin.users if process.origin is not None else None, suspended=True)


def exit_if_user_code_ended() -> None:
    """End a forked child whose user code has ended.

    For places that would next call user code again, or log its error, before they use a disabled object.
    """
    if process.origin is not None and process.origin.is_over():
        _end(process.origin.users)


def _end(users: FrameType | None, suspended: bool = False) -> NoReturn:
    """End this child with the exit code of a program whose main function ended like this.

    Like multiprocessing, this skips `atexit` functions.
    """
    code: Any = 0
    with contextlib.suppress(Exception):  # from stdout or stderr, which the program may have replaced
        if (error := sys.exc_info()[1]) is not None:
            code = _ended_by(error, users)
        elif suspended or (users is not None and users.f_code.co_code[users.f_lasti] in _SUSPENDED):
            code = 1
            where = users.f_code.co_name if users is not None else "a coroutine"
            print(
                f"telegrad: process {os.getpid()} ends: {where} on a worker forked it and then gave control back by "
                f"`yield` or `await`, and only the worker continues from there. {ADVICE}",
                file=sys.stderr,
            )
        sys.stdout.flush()
        sys.stderr.flush()
    # As the interpreter does: the low byte of a number, 0 for None, and 1 for any other object.
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def _ended_by(error: BaseException, users: FrameType | None) -> Any:
    """Print the exception of the user code, from the user's own frames on; return the exit code."""
    # Search the chain of causes for the error whose traceback goes through the user's frame, and print that one from
    # this frame on.
    raised: BaseException | None = error
    while raised is not None:  # an error of this package may wrap it
        trace = raised.__traceback__
        while trace is not None and trace.tb_frame is not users:
            trace = trace.tb_next
        if trace is not None:
            break
        raised = raised.__context__ if raised.__cause__ is None else raised.__cause__
    error = error if raised is None else raised
    if not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, trace)
        return 1
    if not isinstance(error.code, int | None):
        print(error.code, file=sys.stderr)
    return error.code


@in_child
def _count() -> None:
    process.depth += 1
    process.origin = _find_origin()
