"""Send exceptions: the exception itself if possible, with its remote traceback in its text.

The description contains the exception, pickled whole or in parts, and its remote traceback (`remote_text`). The
traceback becomes part of the text of the rebuilt exception. If that one is raised and described again, on its way over
several workers, the next traceback is a block of its own, followed by the earlier ones.

Almost every step here may run code of the exception's class: its `__str__`, `__repr__`, `__reduce__` or a property.
That code may raise anything, also SystemExit. An error that left `describe` or `rebuild` would keep the callee's slot,
and the caller's future would never be done. So both catch everything, and fall back to something simpler. They also
bound their work: Python takes 0.2 s and more to format and pickle a text of 64 MB, and no other call of the worker runs
meanwhile.
"""

import atexit
import copyreg
import functools
import inspect
import operator
import pickle
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from telegrad._core.pickling.pickling import decode, encode
from telegrad._core.pickling.remote_text import (
    LARGEST,
    MOST_TOLD,
    REMOTE_TRACEBACK,
    Room,
    Text,
    as_main,
    brief,
    cut,
    is_large,
    keep_lines,
    notes_of,
    own_notes,
    remote_traceback_of,
    short,
    tell,
    with_lines,
    with_story,
    without_story,
)
from telegrad._core.wire.packing import pack, unpack
from telegrad._core.wire.tensors import memory
from telegrad.errors import CannotDecode, CannotEncode, RemoteError, VersionMismatch

UNREADABLE = "an exception was raised whose attributes cannot be read: its own code raises"
_ATTRIBUTES = ("__dict__", *dir(BaseException))
MOST_ARGUMENTS = 256  # limit for the arguments, attributes and group members of an exception that is sent in parts


def describe(error: BaseException, worker: str, function: str = "", same_program: bool = False) -> bytes:
    """Return the data that `rebuild` needs; never raise.

    `function` is the called function, as users know it. `same_program`: a class of the main program is sent by name.
    """
    try:
        return _description(error, worker, function, same_program)
    except BaseException:
        return pickle.dumps((None, "An exception", f"On worker {worker!r}: {UNREADABLE}"), 5)


def readable(error: BaseException) -> BaseException:
    """Return the exception, or a RemoteError if its own code raises when its attributes are read; never raise."""
    try:
        kind = type(error)
        operator.attrgetter("__name__", "__qualname__", "__module__")(kind)
        operator.attrgetter(*_ATTRIBUTES)(error)
        if hasattr(kind, "__getattr__"):  # which may raise for notes, where `traceback` expects an AttributeError
            _set(error, "__notes__", vars(error).get("__notes__", []))
        getattr(error, "__notes__", None)
    except BaseException:
        return RemoteError(UNREADABLE)
    return error


def _description(error: BaseException, worker: str, function: str, same_program: bool) -> bytes:
    story = tell(error, worker, function)
    kind = _original(type(error))
    name = short(as_main(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")))
    if not isinstance(error, Exception):  # an exit of the callee must not end the caller
        return pickle.dumps((None, f"{name}, which is no Exception,", story), 5)
    # From the most faithful to the most robust: whole, as pickle restores it; in parts, without a call of its
    # constructor; in parts, with a class that the receiver must have. A large exception is not tried whole, since
    # `_whole` pickles, unpickles and formats it.
    attempts: list[Callable[[Exception, bool], Any]] = [_whole, _in_parts, functools.partial(_in_parts, by_name=True)]
    for attempt in attempts[is_large(error) or _has_many(error) :]:
        try:
            sent = _dump(attempt(error, same_program), same_program)
        except BaseException:  # the exception's own code may raise anything, such as SystemExit
            continue
        if len(sent[0]) + sum(map(len, sent[2])) <= LARGEST:
            return pickle.dumps((sent, name, story), 5)
    return pickle.dumps((None, name, story), 5)


def _has_many(error: BaseException) -> bool:
    """Return True if a group has more than MOST_TOLD members, in inner groups too, each counted where it occurs."""
    waiting = [error]
    for _ in range(MOST_TOLD):
        if not waiting:
            return False
        each = waiting.pop()
        waiting += each.exceptions[:MOST_TOLD] if isinstance(each, BaseExceptionGroup) else ()
    return bool(waiting)


def refused(worker: str, why: bytes) -> VersionMismatch:
    """Return the error for a request that a worker of another version did not understand."""
    return VersionMismatch(f"worker {worker!r} did not run the call: it received {why.decode(errors='replace')}")


def rebuild(data: bytes | memoryview) -> BaseException:
    """Return the described exception, or a RemoteError with its text; never raise."""
    try:
        if len(data) > 2 * LARGEST:  # no worker of this version sends so much
            raise CannotDecode(f"it has {len(data)} bytes")
        sent, name, told = pickle.loads(data)
        story = with_lines(told)
    except Exception as error:
        return RemoteError(f"an exception was raised whose description cannot be read: {error}")
    try:
        if sent is not None:
            made = _telling(_load(sent), story)
            if readable(made) is made:
                return made
    except BaseException:  # the exception's own code may raise anything
        pass
    return RemoteError(f"{name} was raised and cannot be rebuilt on this worker\n{story}")


def fresh(error: BaseException) -> BaseException:
    """Return a copy of an error with its causes, without their tracebacks.

    Code that keeps an error raises a fresh copy each time: frames of a traceback would keep their objects alive.
    """
    first = made = _fresh(error)
    for _ in range(MOST_TOLD):  # there may be many causes, or a cycle
        if made is error or error.__cause__ is None:
            break
        error = error.__cause__
        cause = _fresh(error)
        _set(made, "__cause__", cause)
        made = cause
    return first


def _fresh(error: BaseException) -> BaseException:
    try:
        made: BaseException = _copy(error, type(error))
    except Exception:
        return error.with_traceback(None)
    if notes := notes_of(error):
        _set(made, "__notes__", notes)
    return made


def without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error to be kept: its traceback is stored as text, without its frames."""
    made = fresh(error)
    keep_lines(made, error.__traceback__)
    return made


# At the worker that raised


Sent = tuple[bytes, bytes, list[bytes]]


def _dump(value: Any, same_program: bool) -> Sent:
    body, tensors, references, _ = encode(value, same_program)
    # A description is bytes, and may be kept or passed on. Forks of references belong to one message and one receiver.
    if references:
        raise CannotEncode("an exception cannot contain a reference")
    if sum(tensor.nbytes for tensor in tensors) > LARGEST:
        raise CannotEncode("it is too large for an exception")
    meta, blobs, _ = pack(tensors)
    return body, meta, [bytes(memory(blob)) for blob in cast(list[Tensor], blobs)]


def _load(sent: Sent) -> Any:
    body, meta, blobs = sent
    return decode(body, unpack(meta, [torch.frombuffer(bytearray(blob), dtype=torch.uint8) for blob in blobs]))


def _whole(error: Exception, same_program: bool) -> Exception:
    """Return the exception if pickling restores it unchanged; else raise."""
    # Pickle stores the class, `args` and the attributes, and calls the class with `args`. If the constructor has other
    # parameters, or makes a text of them, that raises or makes another exception. Only a try shows this. The sender
    # makes it, because it can still send the parts instead.
    kind = type(error)
    has_notes = "__notes__" in vars(error)
    changed = remote_traceback_of(error) or has_notes or _original(kind) is not kind
    plain = _plain(error, _original(kind)) if changed else error
    if has_notes:
        _set(plain, "__notes__", own_notes(error))
    if _slots_of(type(plain)) and type(plain).__reduce__ is BaseException.__reduce__:
        raise TypeError("would lose what is in its slots")
    back = _load(_dump(plain, same_program))
    if type(back) is not type(plain) or repr(back) != repr(plain) or str(back) != str(plain):
        raise TypeError("comes back as something else")
    return plain


class _Call:
    """Wrapper to pickle an object as the call that makes it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._made = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made


def _in_parts(error: BaseException, same_program: bool, by_name: bool = False, room: Room | None = None) -> _Call:
    """Return an exception to be pickled in parts, and rebuilt without a call of its constructor.

    `by_name`: if its class is of a main program, the receiver must have it. Else the class may be sent by value, with
    the globals that its methods read. `room` is common to all members of a group.
    """
    room = Room() if room is None else room
    args, attributes = _contents(error)
    attributes.pop(REMOTE_TRACEBACK, None)
    if max(len(args), len(attributes)) > MOST_ARGUMENTS:
        raise CannotEncode("it has too many arguments or attributes for an exception")
    if "__notes__" in attributes:
        attributes["__notes__"] = own_notes(error)
    attributes = {name: value for name, value in attributes.items() if _travels(value, same_program)}
    args = tuple(_sendable(arg, same_program, by_name, room) for arg in args)
    return _Call(_assemble, _class_sent(_original(type(error)), by_name), args, attributes)


def _sendable(value: Any, same_program: bool, by_name: bool, room: Room) -> Any:
    """Return the value, or its closest substitute that can be sent."""
    if isinstance(value, BaseException):
        if room.exceptions <= 0:
            return RemoteError("further exceptions are left out")
        room.exceptions -= 1
        return _in_parts(value, same_program, by_name, room)
    parts = value[:MOST_ARGUMENTS] if isinstance(value, (list, tuple)) else ()
    if any(isinstance(part, BaseException) for part in parts):  # members of an exception group
        sent = []
        for part in parts:
            sent.append(_sendable(part, same_program, by_name, room))
            if room.exceptions <= 0:
                break
        return type(value)(sent)
    if isinstance(value, str):
        return cut(without_story(value))
    return value if _travels(value, same_program) else brief(value)


def _class_sent(kind: type[BaseException], by_name: bool = False) -> Any:
    """Return a class to be pickled, or the call that makes it if it is made here; `by_name`: see `_in_parts`."""
    for name, make in ((ORIGINAL, _teller_of), (BASED_ON, _also_runtime_error)):
        if name in vars(kind):
            return _Call(make, _class_sent(vars(kind)[name], by_name))
    return _named_class(kind) if by_name else kind


def _named_class(kind: type) -> _Call:
    """Return a class to be pickled as its place in a main program."""
    from telegrad._core.pickling.main_modules import class_at, scope_from

    scope, path = scope_from(kind) or (None, "")
    if not path:
        raise CannotEncode("its class is not at the top level of a main program")
    return _Call(class_at, scope, path)


def _travels(value: Any, same_program: bool) -> bool:
    if is_large(value, LARGEST // 4):
        return False
    try:
        body, meta, blobs = sent = _dump(value, same_program)
        _load(sent)
    except BaseException:
        return False
    return len(body) + len(meta) + sum(map(len, blobs)) < LARGEST // 4


_slots_of: Callable[[type], list[str]] = copyreg._slotnames  # type: ignore[attr-defined]


def _assemble(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    builtin = _builtin_base(kind)
    error: BaseException = builtin.__new__(kind, *args)
    builtin.__init__(error, *args)
    _set_all(error, attributes)
    return error


def _set_all(error: BaseException, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        _set(error, name, value)


_set = object.__setattr__  # a type may forbid changes, like a frozen dataclass


def _builtin_base(kind: Any) -> Any:
    """Return the built-in base, which determines the memory layout of instances."""
    while kind.__module__ != "builtins":
        kind = kind.__base__
    return kind


# At the receiver: the remote traceback becomes part of the text


ORIGINAL = "_telegrad_original"  # attribute of a subclass made here: the original type, as which it is sent


def _telling(error: Any, story: str) -> BaseException:
    # A program may compare types and `args`, so the exception is changed as little as possible. The first choice
    # replaces only the argument, by a string that is equal to it. The second replaces the type by a subclass. The last
    # adds a cause that has the traceback.
    kind: Any = type(error)
    one_text = len(error.args) == 1 and type(error.args[0]) is str
    if one_text and not _is_odd(kind) and _tells_with_its_argument(error, story):
        return error  # type: ignore[no-any-return]
    try:
        made: BaseException = _copy(error, _teller_of(kind))
        _set(made, REMOTE_TRACEBACK, story)
        return made
    except Exception:  # a type that cannot be subclassed or copied
        _set(error, "__cause__", RemoteError(story))
        _set(error, REMOTE_TRACEBACK, story)
        return error  # type: ignore[no-any-return]


def _tells_with_its_argument(error: Any, story: str) -> bool:
    """Put the remote traceback into the only argument, if the exception shows that as its text."""
    plain = error.args
    text = Text(plain[0])
    text.story = story
    _set(error, "args", (text,))
    try:
        if story.partition(":\n")[0] in str(error):
            return True
    except Exception:
        pass
    _set(error, "args", plain)
    return False


def _original(kind: type[BaseException]) -> type[BaseException]:
    return vars(kind).get(ORIGINAL, kind)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1024)
def _teller_of(kind: type[BaseException]) -> type[BaseException]:
    """Return a subclass of `kind` that looks the same, except that its text includes the remote traceback."""
    # torch.distributed.rpc calls the constructor with one text. If that fails, it raises a RuntimeError with such a
    # preface, and programs expect that type.
    odd = _is_odd(kind)
    preface = "Original exception on remote side was:\n" if odd else ""

    def tell(self: BaseException) -> str:
        return with_story(kind.__str__(self), preface + remote_traceback_of(self))

    members = {**_members(kind), "__slots__": (REMOTE_TRACEBACK,), "__str__": tell, ORIGINAL: kind}
    try:  # RemoteError is a RuntimeError
        return type(kind.__name__, (kind, RemoteError) if odd else (kind,), members)
    except TypeError:  # the layouts may conflict
        return type(kind.__name__, (kind,), members)


def _is_odd(kind: type[BaseException]) -> bool:
    """Return True if the constructor does not accept a single text."""
    if kind.__init__ in _PLAIN or issubclass(kind, RuntimeError):
        return False
    try:
        inspect.signature(kind.__init__).bind(None, "")
    except TypeError:
        return True
    except ValueError:  # a built-in constructor without a signature
        pass
    return False


_PLAIN = (BaseException.__init__, Exception.__init__)


def _copy(error: BaseException, kind: type[BaseException]) -> Any:
    """Return a copy of an exception as `kind`, which has the same layout, without a call of its own constructor."""
    return _assemble(kind, *_contents(error))


def _contents(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and attributes of an exception, for `_assemble`."""
    # The `__reduce__` of the built-in base returns also the state that is in neither `args` nor `__dict__`, such as the
    # file name of an OSError. A `__reduce__` or constructor of the class itself is user code, and is not called.
    kind = type(error)
    _, args, *states = _builtin_base(kind).__reduce__(error)
    slots = {name: getattr(error, name) for name in _slots_of(kind) if hasattr(error, name)}
    attributes = dict(*states, **slots)
    attributes.pop("args", None)  # of an AttributeError in Python 3.12
    return args, attributes


def _plain(error: BaseException, kind: type[BaseException]) -> Any:
    """Return a copy of an exception as `kind`, without its remote traceback."""
    args, attributes = _contents(error)
    attributes.pop(REMOTE_TRACEBACK, None)
    return _assemble(kind, tuple(map(without_story, args)), attributes)


# Copies and pickles that a program makes of the classes made here, which pickle does not find by their names


def _members(kind: type[BaseException]) -> dict[str, Any]:
    """Return the members of a subclass of `kind` that looks the same."""
    return {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__copy__": lambda self: _copy(self, type(self)),
        "__reduce_ex__": _reduce,
        "__setstate__": _set_all,
    }


def _reduce(error: BaseException, _: Any) -> tuple[Any, ...]:
    args, attributes = _contents(error)
    return _assemble, (_class_sent(type(error)), tuple(map(_reducible, args)), {}), attributes


def _reducible(arg: Any) -> Any:
    """Return an argument with each exception in it as the call that makes it, since its constructor may be odd."""
    if issubclass(type(arg), BaseException):
        args, attributes = _contents(arg)
        return _Call(_assemble, _class_sent(type(arg)), tuple(map(_reducible, args)), attributes)
    if type(arg) in (list, tuple) and any(issubclass(type(each), BaseException) for each in arg):  # members of a group
        return type(arg)(map(_reducible, arg))
    return arg


# At the caller of a program for torch.distributed.rpc


BASED_ON = "_telegrad_based_on"  # attribute of a class that is also a RuntimeError: the class without that base


@functools.lru_cache(maxsize=1024)
def _also_runtime_error(kind: type[BaseException]) -> type[BaseException]:
    """Return a subclass of `kind` that looks the same, and is a RuntimeError."""
    return type(kind.__name__, (kind, RuntimeError), {**_members(kind), "__slots__": (), BASED_ON: kind})


def as_runtime_error(error: BaseException) -> BaseException:
    """Return a copy of a rebuilt exception that is a RuntimeError, too; itself if there can be none. Never raise."""
    try:
        kind: Any = _original(type(error))
        return _telling(_plain(error, _also_runtime_error(kind)), remote_traceback_of(error))
    except BaseException:  # the class may raise anything as it is subclassed
        return error


# Each caches classes of the program: see `_own` in main_modules.py
atexit.register(_teller_of.cache_clear)
atexit.register(_also_runtime_error.cache_clear)
