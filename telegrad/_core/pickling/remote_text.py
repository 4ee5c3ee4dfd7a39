"""Remote tracebacks in the texts of exceptions: for each worker its name, the function, and the user's lines.

    On worker 'w1', in __main__.step (most recent call last):
      File "train.py", line 9, in step
        return rpc.rpc_sync("w2", loss, (x,))
    On worker 'w2', in __main__.loss (most recent call last):
      File "train.py", line 5, in loss
        raise ValueError("no data")
    ValueError: no data

Frames of this package, and of modules that run code on other threads, are omitted; `TELEGRAD_DEBUG=1` keeps them.
"""

import array
import asyncio
import concurrent.futures
import contextlib
import functools
import linecache
import os
import re
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from itertools import islice
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, TypeVar

import torch

from telegrad._core.interrupts import raised_by_handler, runs_handler
from telegrad._core.pickling.main_program import SPAWNED_MAIN, is_plain
from telegrad._core.processes import PACKAGE

LARGEST = 1 << 20  # bytes of an exception that is sent as a whole
LONGEST_TEXT = 1 << 16
MOST_OBJECTS = 10_000  # examined one by one; numbers in a container count by size only
SHOWN = 10  # elements shown of a large container

F = TypeVar("F", bound=Callable[..., Any])

_TEXTS = (str, bytes, bytearray)
_CONTAINERS = (tuple, list, dict, set, frozenset, deque)
_NUMBERS = frozenset({float, bool, complex, type(None)})
_ORDERED = frozenset({int, float, bool})


def cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[: LONGEST_TEXT // 2]}\n[...]\n{text[-LONGEST_TEXT // 2 :]}"


def is_large(value: Any, most: int = LARGEST) -> bool:
    """Return True if the pickle of a value takes more than about `most` bytes, or the value has too many parts.

    Memory with pickling rules of its own, such as that of tensors, does not count.
    """
    seen: set[int] = set()
    waiting = [value]
    # An estimate from lengths, in bounded time: to pickle or print a value in order to learn its size would take the
    # time that the answer is to save.
    for _ in range(MOST_OBJECTS):
        if not waiting:
            return False
        each = waiting.pop()
        if type(each) in _NUMBERS or id(each) in seen:
            continue
        seen.add(id(each))
        size, parts = _size_and_parts(each)
        most -= size
        if most < 0:
            return True
        for part in parts:
            if not _are_numbers(part):
                if len(part) > MOST_OBJECTS:
                    return True
                waiting.extend(part)
    return bool(waiting)


def _size_and_parts(value: Any) -> tuple[int, tuple[Any, ...]]:
    """Return the size in bytes of a value without its elements, and the collections of its elements."""
    if isinstance(value, int):
        return value.bit_length() // 8, ()
    if isinstance(value, _TEXTS):
        return len(value), ()
    if isinstance(value, array.array):
        return len(value) * value.itemsize, ()
    if isinstance(value, _CONTAINERS):
        return 8 * len(value), (value, value.values()) if isinstance(value, dict) else (value,)
    if isinstance(value, BaseException):
        return 0, ((value.args, vars(value)),)
    own: Any = getattr(value, "__dict__", None)
    kind: Any = type(value)
    # An object counts with all attributes unless it is pickled by name, or by rules of its own.
    has_rules = not is_plain(kind) or kind.__getstate__ is not object.__getstate__
    return 0, (own.values(),) if isinstance(own, dict) and not has_rules and not issubclass(kind, ModuleType) else ()


def _are_numbers(parts: Any) -> bool:
    """Return True for many numbers of at most eight bytes each."""
    if len(parts) <= SHOWN or not _ORDERED.issuperset(map(type, parts)):
        return False
    return all(-(1 << 63) <= each < 1 << 63 for each in (min(parts), max(parts)))


def brief(value: Any, depth: int = 3) -> str:
    """Return the repr of a value, shortened; of a large container its first elements and its length."""
    if not is_large(value, LONGEST_TEXT):
        return cut(repr(value))
    if isinstance(value, str):
        return cut(repr(cut(value)))
    if isinstance(value, bytes | bytearray):
        return cut(repr(bytes(value[:LONGEST_TEXT])))
    kind = type(value).__qualname__
    if isinstance(value, _CONTAINERS):
        values = value.items() if isinstance(value, dict) else value
        first = ", ".join(cut(brief(each, depth - 1)) for each in islice(values, SHOWN)) if depth else ""
        return cut(f"<{kind} of {len(value)}: {first}, ...>")
    if isinstance(value, BaseException):
        return cut(f"{kind}({', '.join(brief(each, depth - 1) for each in value.args[:SHOWN] if depth)})")
    if isinstance(value, int | array.array):
        return f"<{kind}, too large to be shown>"
    return cut(repr(value))  # calls the user's code


def text_of(error: BaseException) -> str:
    """Return the text of an exception, shortened. Errors of the exception's own code are raised."""
    shown: Any = type(error).__str__
    args = error.args
    # The user's code, or the text of a group: it has the number of members and not their texts.
    if isinstance(shown, FunctionType) or shown is BaseExceptionGroup.__str__:
        return cut(str(error))
    if shown is BaseException.__str__ and len(args) == 1:
        return cut(str(_light(args[0])))
    # The size of a UnicodeError's data does not matter, because its text contains only a position in it.
    if not is_large(args[:1] + args[2:] if isinstance(error, UnicodeError) else args):
        return cut(str(error))
    if len(args) == 1:
        return brief(args[0])
    if shown is OSError.__str__:
        return cut(str(OSError(*map(_light, OSError.__reduce__(error)[1]))))
    return cut(f"({', '.join(map(brief, args[:SHOWN]))}{', ...' if len(args) > SHOWN else ''})")


def _light(value: Any) -> Any:
    if isinstance(value, str):
        return cut(value)
    return brief(value) if is_large(value) else value


DEBUG_VARIABLE = "TELEGRAD_DEBUG"
LONGEST_LINE = 2_000  # characters of a log line, or of a name
MOST_TOLD = 100  # exceptions in a chain of causes, and members of groups
MOST_ROOM = 2 * LONGEST_TEXT  # characters of all of them, before the final cut
MOST_NOTES = 100  # this many first and last notes
MOST_FRAMES = 500  # this many outermost and innermost frames
REMOTE_TRACEBACK = "_telegrad_story"  # slot of a rebuilt exception for its remote traceback: not in its `vars`
TRACEBACK = "Traceback (most recent call last):\n"

# Found beside torch, because its import would make each start slower.
_CLOUDPICKLE = os.path.join(os.path.dirname(torch.__path__[0]), "cloudpickle")
_INTERNALS = (
    *(os.path.join(folder, "") for folder in (PACKAGE, _CLOUDPICKLE, *asyncio.__path__, *concurrent.futures.__path__)),
    *(str(module.__file__) for module in (torch.futures, threading, contextlib)),
)
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")  # frames of each call of a `torch.nn.Module`
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
_MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"
_LEFT_OUT = "[further exceptions are left out]\n"
_EXPLAINED = (SyntaxError, ImportError, AttributeError)  # Python prints more than the text of these


# a frame without its source line; the length of names is bounded, since a line may match at many positions
_BARE_FRAME = re.compile(
    r"""^(?P<indent>[ |]*)File "(?P<file>.+)", line (?P<line>\d+), in .{1,200}\n(?!(?P=indent)  \S)""", re.MULTILINE
)


def debugging() -> bool:
    """Return True if the environment requests all details, for developers of this package."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


class Text(str):
    """The only argument of a rebuilt exception: equal to the original one, but shown with the remote traceback."""

    story: str

    def __str__(self) -> str:
        return with_story(str.__str__(self), self.story)

    def __repr__(self) -> str:
        return with_story(str.__repr__(self), self.story)

    def __reduce__(self) -> "tuple[type[Text], tuple[str], dict[str, str]]":
        return Text, (str.__str__(self),), vars(self)


def without_story(value: Any) -> Any:
    return str.__str__(value) if type(value) is Text else value


def with_story(text: str, story: str) -> str:
    """Return the text of an exception, and its remote traceback; if that has no lines, only its worker and function."""
    head, _, rest = story.partition(":\n")
    # A traceback without lines of the program is one line, the type and the text, and would only repeat the text. If
    # there is no text, that line is needed for the type.
    repeats = text and rest.count("\n") == 1 and rest.endswith(f"{text}\n")
    return f"{text}\n{head if repeats else story}"


class TracebackLines(str):
    """A note with the lines where an exception was raised, kept without its frames."""


def tell(error: BaseException, worker: str, function: str = "") -> str:
    """Return the remote traceback of an exception: of this worker, and of the workers before it."""
    before = remote_traceback_of(error)
    # This worker has described the error before, and it has not been raised since: it would get a block without lines.
    head = f"On worker {worker!r}"
    if before.startswith(head) and not _all_lines(error):
        return before
    try:
        told = _told(error, Room())
    except BaseException:  # the exception's own code may raise anything
        told = f"{type(error).__qualname__} (its text could not be formatted)\n"
    if function:
        head += f", in {function}"
    if told.startswith(TRACEBACK):  # without a line of its own, as one follows for each worker
        head, told = head + TRACEBACK.removeprefix("Traceback").rstrip(":\n"), told.removeprefix(TRACEBACK)
    return cut(f"{head}:\n{as_main(told)}")


def as_main(text: str) -> str:
    """Return a text whose lines name `__main__`, not the module as which a worker imports that program."""
    return re.sub(f"^([ |]*){SPAWNED_MAIN}[.]", r"\1__main__.", text, flags=re.MULTILINE)


def kind_of(value: Any) -> str:
    """Return the full name of a value's class."""
    return as_main(f"{type(value).__module__}.{type(value).__qualname__}")


def with_lines(story: str) -> str:
    """Add source lines that only this process knows, such as those of notebook cells, which have no files."""
    return _BARE_FRAME.sub(_with_line, story)


def _with_line(frame: re.Match[str]) -> str:
    line = linecache.getline(frame["file"], int(frame["line"])).strip() if frame["file"] in linecache.cache else ""
    return f"{frame[0]}{frame['indent']}  {line}\n" if line else frame[0]


def safe_text_of(error: BaseException) -> str:
    """Return the text of an exception, shortened; raise only the error of a signal handler that runs meanwhile."""
    try:
        return text_of(error)
    except BaseException as raised:  # the exception's own code may raise anything
        if raised_by_handler(raised):
            raise
        return "(its text could not be formatted)"


def first_line(error: BaseException) -> str:
    """Return the first line of the text, shortened, without a full stop; the last line for TorchScript errors."""
    lines = safe_text_of(error).strip().split("\n")
    return short(lines[-1 if issubclass(type(error), torch.jit.Error) else 0]).rstrip(".")


def remote_traceback_of(error: BaseException) -> str:
    """Return the remote traceback of an exception; "" if it was raised here."""
    args = error.args
    if len(args) == 1 and type(args[0]) is Text:
        return args[0].story
    try:  # without the `__getattr__` of its class
        return object.__getattribute__(error, REMOTE_TRACEBACK)  # type: ignore[no-any-return]
    except AttributeError:
        return ""


def keep_lines(error: BaseException, traceback_: TracebackType | None) -> None:
    """Add a note with the lines where an exception was raised, before its frames are dropped."""
    lines = _lines(traceback_)
    if lines:
        # Not by setattr, which a property of its class may refuse.
        vars(error)["__notes__"] = [*notes_of(error), TracebackLines(lines)]


def notes_of(error: BaseException) -> list[Any]:
    """Return the notes of an exception, without the `__getattr__` of its class."""
    notes = vars(error).get("__notes__")
    return [*notes] if isinstance(notes, list | tuple) else []


def own_notes(error: BaseException) -> list[str]:
    return [cut(note) if isinstance(note, str) else note for note in _notes(error) if type(note) is not TracebackLines]


def _notes(error: BaseException) -> list[str]:
    notes = notes_of(error)
    return [*notes[:MOST_NOTES], "[...]", *notes[-MOST_NOTES:]] if len(notes) > 2 * MOST_NOTES else notes


def short(name: str) -> str:
    """Return a name or line, cut if it is too long for a message."""
    return name if len(name) <= LONGEST_LINE else f"{name[:LONGEST_LINE]}..."


class Room:
    """The remaining limits for one exception with its causes and members."""

    def __init__(self) -> None:
        self.exceptions, self.characters = MOST_TOLD, MOST_ROOM


def _told(error: BaseException, room: Room, seen: frozenset[int] = frozenset()) -> str:
    """Format an exception as Python prints it, after its causes and contexts, within the limits."""
    if room.exceptions <= 0 or room.characters <= 0:
        return _LEFT_OUT
    room.exceptions -= 1
    seen |= {id(error)}
    lines, story = cut(_all_lines(error)), remote_traceback_of(error)
    own = (TRACEBACK + lines if lines else "") + (story or cut(_summary(error, room)))
    room.characters -= len(own)
    before, link = _before(error)
    if before is None or id(before) in seen:
        return own
    came = remote_traceback_of(before)
    # The text of a rebuilt exception includes its remote traceback. So one of the two may already have all that the
    # other would add.
    if (came and came in text_of(error)) or (story and story in text_of(before)):
        return own
    return _told(before, room, seen) + link + own


def _before(error: BaseException) -> tuple[BaseException | None, str]:
    cause = error.__cause__
    if cause is not None:
        return cause, _CAUSED
    context = error.__context__
    if context is None or error.__suppress_context__ or _same(context, error):
        return None, ""
    return context, _MEANWHILE


def _same(one: BaseException, other: BaseException) -> bool:
    """Return True if one exception is the other, raised again."""
    try:
        return type(one) is type(other) and brief(one) == brief(other)
    except Exception:
        return False


def _summary(error: BaseException, room: Room) -> str:
    """Return the type and text of an exception, and the members of a group."""
    if isinstance(error, _EXPLAINED) and not is_large(error):
        # With `_seen`, Python does not format the causes, which takes quadratic time along a chain.
        telling = traceback.TracebackException(type(error), error, None, _seen=set())
        telling.__notes__ = telling.exceptions = None  # both are described separately; Python 3.13 reads them
        text = "".join(telling.format_exception_only())
    else:
        text = _type_and_text(error)
    text = text.partition("\nOn worker ")[0].rstrip("\n") + "\n"  # the rest is part of the remote traceback
    members = []
    for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        members.append(told := _told(each, room))
        if told == _LEFT_OUT:
            break
    return text + "".join(f"  | {line}\n" for line in "".join(members).splitlines())


def _type_and_text(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    text = safe_text_of(error)
    return f"{short(name)}: {text}" if text else short(name)


def _all_lines(error: BaseException) -> str:
    """Return the lines of the current traceback, then those kept from earlier raises, the latest first."""
    notes = [note for note in _notes(error) if type(note) is TracebackLines]
    return _lines(error.__traceback__) + "".join(reversed(notes))


def _lines(traceback_: TracebackType | None) -> str:
    frames = [(frame, line) for frame, line in traceback.walk_tb(traceback_) if _is_shown(frame)]
    if len(frames) > 2 * MOST_FRAMES:
        return f"{_formatted(frames[:MOST_FRAMES])}  [...]\n{_formatted(frames[-MOST_FRAMES:])}"
    return _formatted(frames)


def _is_shown(frame: FrameType) -> bool:
    return debugging() or not (frame.f_code.co_filename.startswith(_INTERNALS) or frame.f_code.co_name in _MODULE_CALLS)


def fold(error: BaseException) -> None:
    """Take the frames of this package out of the traceback; a `raise` without arguments then adds none.

    The frame that runs a signal handler stays while functions of this package are left, because these know the
    handler's errors by it.
    """
    links = []
    link = error.__traceback__
    while link is not None:
        links.append(link)
        link = link.tb_next
    handled = any(runs_handler(link.tb_frame) for link in links) and _is_called_within_package(sys._getframe(1))
    kept = None
    for link in reversed(links):
        if _is_shown(link.tb_frame) or (handled and runs_handler(link.tb_frame)):
            kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    BaseException.with_traceback(error, kept)  # its class may forbid an assignment


def _is_called_within_package(public: FrameType) -> bool:
    frame = public.f_back
    while frame is not None and _is_shown(frame):
        frame = frame.f_back
    return frame is not None


def folded(function: F) -> F:
    """Decorate a function that users call, or a class for its public methods: errors show no frames of this package.

    Each call takes longer by a call of Python. Functions that calls often use have `fold` instead.
    """
    if isinstance(function, type):
        for name, value in [*vars(function).items()]:
            if isinstance(value, FunctionType | classmethod) and (name == "__init__" or not name.startswith("_")):
                inner = folded(value.__func__ if isinstance(value, classmethod) else value)
                setattr(function, name, classmethod(inner) if isinstance(value, classmethod) else inner)
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            fold(error)
            raise

    return call  # type: ignore[return-value]


def _formatted(frames: list[tuple[FrameType, int]]) -> str:
    return "".join(traceback.StackSummary.extract(iter(frames)).format())
