"""Pickle values without their tensors and without the references of the layers above.

Each tensor of a value gets a numbered slot, in order of appearance; the pickle contains only the numbers. So the layers
above can inspect or replace the tensors before they are packed and after they are unpacked, and unpickling only builds
the value.

Functions and classes are sent by name if the name leads to them at the receiver, else by value (cloudpickle). Other
objects with large memory of their own (numpy arrays) get slots after those of the tensors.

The last byte of a body gives its format; the pickle ends before it, and unpickling ignores the rest.

    .   a pickle without slots, which ends with this byte anyway: C alone decodes it
    C   arguments of a call, some of which are plain tensors
    T   one plain tensor; there is no pickle
    A   any value
    S   any value, large: its pickle is cut into segments, most of which are blobs (`segments`)

There are three ways to encode, the fastest first. The type checks of `encode_call` and `_extent_of` find values that C
pickles without a call of Python code. A pickler with reducers takes all other values. It raises at a function or class
without a name, and then, as after any error, the pickler of `by_value` begins anew: so cloudpickle is imported only by
processes that need it.

A pickle in C holds the GIL from beginning to end, and no other call of the worker runs meanwhile. So large values go
through `SegmentWriter`, which releases it between pieces. The price is that other threads may change the value between
two pieces. Containers of atoms are copied first (`_held_still`); others are pickled again in one piece if Python
notices the change.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from telegrad._core import forks, processes
from telegrad._core.interrupts import raised_by_handler
from telegrad._core.pickling.function_names import cause_of, import_anew, not_found
from telegrad._core.pickling.reducers import FROM_REFERENCES, FROM_SLOTS, REBUILDERS, Pickler
from telegrad._core.pickling.remote_text import fold, safe_text_of
from telegrad._core.pickling.segments import OWN_FROM, LargeText, SegmentReader, SegmentWriter, to_text
from telegrad._core.wire.tensors import held, of_buffer
from telegrad.errors import CannotDecode, CannotEncode, CodecError

if TYPE_CHECKING:
    from telegrad._core.pickling.by_value import ValuePickler

LARGE = 1 << 16  # buffers of at least this many bytes get a slot

_PLAIN = ord(pickle.STOP)  # a pickle of built-in types only
_CALL = ord("C")  # values, indices of the tensors among them, names of keyword arguments
_ONE = ord("T")  # a single tensor
_ANY = ord("A")  # preceded by the number of buffers
_TAIL = struct.Struct("<IB")
_CUT = ord("S")  # preceded by the places of the segments, and the numbers of buffers, segments and texts
_CUT_TAIL = struct.Struct("<IIIB")

_NUMBERS = frozenset({int, float, bool, complex, type(None)})
_STRINGS = frozenset({str, bytes})
_ATOMS = _NUMBERS | _STRINGS
_CONTAINERS = frozenset({tuple, list, dict})
_new = tuple.__new__  # takes half the time of a NamedTuple's constructor, which is Python code
MANY = 1 << 12  # larger containers are checked and pickled in pieces
FEW = 8  # elements: up to this number a loop is faster than maps


class Encoded(NamedTuple):
    """A value split into parts."""

    body: bytes
    tensors: Sequence[Tensor]
    references: Sequence[Any] = ()
    buffers: int = 0  # number of the last tensors that are memory of other objects


_NO_ARGUMENTS = Encoded(pickle.dumps(((), {}), 5), ())  # shared by all calls without arguments


def encode(value: Any, same_program: bool) -> Encoded:
    """Pickle `value` without its tensors; raise CannotEncode if a part of it cannot be pickled.

    `same_program`: the other process runs the same main program.
    """
    kind = type(value)
    if kind is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict:
        return encode_call(value[0], value[1], same_program)
    if kind in _NUMBERS or (kind in _STRINGS and len(value) < OWN_FROM):
        return _new(Encoded, (pickle.dumps(value, 5), (), (), 0))
    if kind is Tensor and not value.__dict__:
        return _new(Encoded, (b"T", (value,), (), 0))
    texts = False
    if kind in _CONTAINERS or kind in _STRINGS:
        extent = _extent_of(value)
        if extent == _SMALL:
            return Encoded(pickle.dumps(value, 5), [])
        if extent != _OTHER:
            (value,), texts = _held_still([value], extent == _TEXTS)
    return _encode_any(value, same_program, texts)


def _encode_any(value: Any, same_program: bool, texts: bool = False) -> Encoded:
    try:
        return _dump(_Pickler, value, same_program, texts)
    except CodecError:
        raise
    except Exception as error:
        return _encode_again(value, same_program, texts, error)


def decode(body: bytes | memoryview, tensors: Sequence[Tensor], references: Sequence[Any] = ()) -> Any:
    """Return the value of a body whose slots are `tensors` and `references`; raise FunctionNotFound if a function or
    class is not importable here, CannotDecode if the value cannot be rebuilt for another reason."""
    try:
        how = body[-1]
        if how == _PLAIN:
            return pickle.loads(body)
        if how == _ONE:
            return tensors[0]
        if how == _CALL:
            values, places, names = pickle.loads(body)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            first = len(values) - len(names)
            return tuple(values[:first]), dict(zip(names, values[first:], strict=True))
        if how == _CUT:
            return _load_cut(body, tensors, references)
        return _load(body, tensors, references)
    except CodecError:
        raise
    except BaseException as error:  # also SystemExit: a value from one worker must not end another
        if raised_by_handler(error):
            raise
        forks.exit_if_user_code_ended()
        advice = "use the same versions of its packages on all workers, or send the data that it is built from"
        raise CannotDecode(
            f"a value arrived but cannot be rebuilt: {type(error).__name__}: {safe_text_of(error)}; "
            f"{processes.advice(error, advice)}"
        ) from error


# The usual cases, without a Python pickler


_SMALL, _BIG, _TEXTS, _OTHER = range(4)


def _extent_of(value: Any) -> int:
    """Return for strings and containers of atoms: _SMALL, or _BIG (to be pickled in pieces), or _TEXTS if texts are
    among these. Return _OTHER for all other values."""
    kind = type(value)
    if kind in _STRINGS:
        return _SMALL if len(value) < OWN_FROM else _TEXTS
    if len(value) > MANY:
        kinds: set[type] = set()
        for piece in _pieces(value):
            kinds.update(map(type, piece))
            if not kinds <= _ATOMS:
                return _OTHER
        return _TEXTS if str in kinds else _BIG
    if kind is not dict:
        return _extent_of_all(value)
    return _extent_of_all(value.values()) if _ATOMS.issuperset(map(type, value)) else _OTHER


def _extent_of_all(values: Collection[Any]) -> int:
    if len(values) > FEW:
        if _NUMBERS.issuperset(map(type, values)):
            return _SMALL
        if _STRINGS.issuperset(map(type, values)):
            return _SMALL if sum(map(len, values)) < OWN_FROM else _TEXTS
    size = 0
    for value in values:
        kind = type(value)
        if kind in _STRINGS:
            size += len(value)
        elif kind not in _NUMBERS:
            return _OTHER
    return _SMALL if size < OWN_FROM else _TEXTS


def _pieces(container: Any) -> Iterator[Iterator[Any]]:
    """Yield the elements of a container in pieces. Other threads can run in between, and may change it."""
    for elements in (container, container.values()) if type(container) is dict else (container,):
        # An iterator of a list stays valid when the list changes. That of a dict raises, so keys and values are copied
        # first, each in one step of C.
        rest = iter(elements if type(container) in (list, tuple) else list(elements))
        for _ in range(0, len(elements), MANY):
            yield islice(rest, MANY)


def _held_still(values: Sequence[Any], texts: bool) -> tuple[list[Any], bool]:
    """Copy containers of atoms, because other threads run while large ones are pickled.

    Return the values, and True if a text among them is large. `texts`: there may be one.
    """
    copies = {id(value): copy(value) for value in values if type(value) in _CONTAINERS}  # one for each object
    pieces = (piece for each in (values, *copies.values()) for piece in _pieces(each))
    texts = texts and any(type(value) is str and len(value) >= OWN_FROM for piece in pieces for value in piece)
    return [copies.get(id(value), value) for value in values], texts


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any], same_program: bool) -> Encoded:
    """Encode arguments as `encode` does, in less time if all are atoms, containers of atoms, and plain tensors."""
    if not args and not kwargs:
        return _NO_ARGUMENTS
    values = [*args, *kwargs.values()] if kwargs else list(args)
    tensors: list[Tensor] = []
    places: list[int] = []
    is_big, texts = len(values) > MANY, False
    for place, value in enumerate(values):
        kind = type(value)
        if kind in _NUMBERS or (kind in _STRINGS and len(value) < OWN_FROM):
            continue
        if kind in _STRINGS or kind in _CONTAINERS:
            extent = _extent_of(value)
            if extent == _OTHER:
                return _encode_any((args, kwargs), same_program)
            is_big, texts = is_big or extent != _SMALL, texts or extent == _TEXTS
            continue
        if kind is not Tensor or value.__dict__:
            return _encode_any((args, kwargs), same_program)
        tensors.append(value)
        places.append(place)
        values[place] = None
    # Format C has no segments. A large call with tensors goes through the pickler with reducers.
    if is_big:
        if tensors:
            return _encode_any((args, kwargs), same_program)
        values, texts = _held_still(values, texts)
        call = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
        return _encode_any(call, same_program, texts)
    if not tensors:
        return _new(Encoded, (pickle.dumps((args, kwargs), 5), (), (), 0))
    if len(tensors) > 1 and len({id(tensor) for tensor in tensors}) < len(tensors):
        return _encode_any((args, kwargs), same_program)  # a tensor that occurs twice has one slot
    return _new(Encoded, (pickle.dumps((values, places, [*kwargs]), 5) + b"C", tensors, (), 0))


# All other values


def _dump(
    kind: type[_Pickler | ValuePickler],
    value: Any,
    same_program: bool,
    texts: bool = False,
    at_once: bool = False,
    sent: list[Any] | None = None,
) -> Encoded:
    """Pickle a value. `at_once`: no other thread runs while built-in types are pickled.

    `texts`: the value contains a large text. If pickling finds one without it, pickling starts again with `texts`.
    `sent`: the globals in the pickle are added to it.
    """
    # The pickler calls `write` of a Python class for each frame, and other threads may run there. `write` of a BytesIO
    # runs no Python code, so `at_once` has the pickler write to one.
    file, whole = SegmentWriter(), io.BytesIO()
    buffers: list[Tensor] = []
    pickler = kind(whole if at_once else file, 5, buffer_callback=partial(_keep, buffers))
    pickler.same_program = same_program
    pickler.tensors = []
    pickler.references = []
    pickler.plain = True
    pickler.globals_sent = [] if sent is None else sent
    pickler.file = file
    file.may_repeat = not (texts or at_once)
    if texts:
        pickler.expect_texts()
    try:
        pickler.dump(value)
    except LargeText:
        return _dump(kind, value, same_program, True, sent=sent)
    if at_once:
        file = SegmentWriter(whole.getvalue())
    body = file.whole()
    if body is None or pickler.texts is not None:
        return _cut(pickler, file, buffers)
    # Without a tail, the body ends with STOP, which is format `.`: no reducer ran, so `pickle.loads` can read it.
    if not pickler.plain or buffers:
        body += _TAIL.pack(len(buffers), _ANY)
    return Encoded(body, pickler.tensors + buffers, pickler.references, len(buffers))


def _cut(pickler: _Pickler | ValuePickler, file: SegmentWriter, buffers: list[Tensor]) -> Encoded:
    parts, places, blobs = file.finish()
    texts = pickler.texts.blobs() if pickler.texts is not None else []
    parts.append(struct.pack(f"<{len(places)}q", *places))
    parts.append(_CUT_TAIL.pack(len(buffers), len(places), len(texts), _CUT))
    # All of these are the last tensors of the value, in this order. `_load_cut` finds them by their numbers, from the
    # end.
    buffers = [*buffers, *blobs, *texts]
    return Encoded(b"".join(parts), pickler.tensors + buffers, pickler.references, len(buffers))


def _keep(buffers: list[Tensor], buffer: pickle.PickleBuffer) -> bool:
    """Return True if a buffer stays in the pickle."""
    raw = buffer.raw()
    if raw.nbytes < LARGE:
        return True
    buffers.append(of_buffer(raw))
    return False


def _load(body: bytes | memoryview, tensors: Sequence[Tensor], references: Sequence[Any]) -> Any:
    count, _ = _TAIL.unpack_from(body, len(body) - _TAIL.size)
    buffers = tensors[len(tensors) - count :] if count else ()
    unpickler = _Unpickler(io.BytesIO(body), buffers=map(held, buffers))
    unpickler.tensors = tensors
    unpickler.references = references
    return unpickler.load()


def _load_cut(body: bytes | memoryview, tensors: Sequence[Tensor], references: Sequence[Any]) -> Any:
    end = len(body) - _CUT_TAIL.size
    count, segments, texts, _ = _CUT_TAIL.unpack_from(body, end)
    places = struct.unpack_from(f"<{segments}q", body, end - 8 * segments)
    blobs = len([place for place in places if place < 0])
    buffers = tensors[len(tensors) - count - blobs - texts :]
    file = SegmentReader(memoryview(body), places, buffers[count : count + blobs])
    unpickler = _Unpickler(file, buffers=map(held, buffers[:count]))
    unpickler.tensors = tensors
    unpickler.references = references
    unpickler.texts = buffers[count + blobs :]
    unpickler.found = {}
    return unpickler.load()


class _Pickler(Pickler, pickle.Pickler):
    """A pickler for values whose functions and classes all have names."""


def _value_pickler() -> type[ValuePickler]:
    """Return the pickler for functions and classes without a name; its module is imported only when needed."""
    from telegrad._core.pickling.by_value import ValuePickler, register_spawned_main

    register_spawned_main()
    ValuePickler.can_dump = staticmethod(can_dump)
    return ValuePickler


class _Unpickler(pickle.Unpickler):
    tensors: Sequence[Tensor]
    references: Sequence[Any]
    texts: Sequence[Tensor]  # of a pickle in segments, by their persistent ids
    found: dict[int, str]

    def find_class(self, module: str, name: str) -> Any:
        if module == REBUILDERS:
            if name in FROM_SLOTS:
                return partial(FROM_SLOTS[name], self.tensors)
            if name in FROM_REFERENCES:
                return partial(FROM_REFERENCES[name], self.references)
        try:
            if module not in sys.modules:
                import_anew(module)
            return super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            raise not_found(module, name, error) from cause_of(module, error)

    def persistent_load(self, number: int) -> str:
        if number not in self.found:
            self.found[number] = to_text(self.texts[number])
        return self.found[number]


def _encode_again(value: Any, same_program: bool, texts: bool, error: Exception) -> Encoded:
    """Pickle a value that the fast way could not pickle."""
    # The exception of a signal handler that ran meanwhile belongs to the caller. A forked child must not continue here
    # after its user code has ended.
    if raised_by_handler(error):
        raise error
    forks.exit_if_user_code_ended()
    # Another thread changed a dict or a set between two frames of the pickle. The exact type is compared, since
    # NotImplementedError, the error of a function without a name, and RecursionError are RuntimeErrors, too.
    if type(error) is RuntimeError:
        with contextlib.suppress(Exception):
            return _dump(_Pickler, value, same_program, texts, at_once=True)
    sent: list[Any] = []
    try:
        encoded = _dump(_value_pickler(), value, same_program, sent=sent)
    except CodecError:
        raise
    except Exception as error:
        if raised_by_handler(error):
            raise
        fold(error)
        error.__context__ = None  # the same error in the fast way
        from telegrad._core.pickling.by_value import find_unpicklable_part

        raise find_unpicklable_part(value, same_program, error) from error
    if sent:
        from telegrad._core.pickling.main_modules import note_sent

        note_sent(sent)
    return encoded


def blame_again(value: Any, said: CannotEncode, same_program: bool) -> CannotEncode:
    """Return the error for `value`: the call or result that was to be sent, in the form that users know."""
    if said.__cause__ is None or can_dump(value, same_program):
        return said
    from telegrad._core.pickling.by_value import find_unpicklable_part

    return find_unpicklable_part(value, same_program, said.__cause__)


def can_dump(value: Any, same_program: bool) -> bool:
    try:
        _dump(_value_pickler(), value, same_program)
    except Exception as error:
        if raised_by_handler(error):
            raise
        return False
    return True
