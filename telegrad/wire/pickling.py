"""Values as a pickle with their tensors, and references of the layers above, lifted out.

Every tensor of a value gets a numbered slot, in order of appearance; the pickle holds the numbers only. So the layers
above can look at the tensors, or put others in their places, before they are packed and after they are unpacked, and
reading a pickle does nothing but build the value.

Functions and classes travel by name where a name leads back to them on the other side, else by value (cloudpickle).
What has large memory of its own but is no tensor (an array of numpy) gets slots behind those of the tensors.

The last byte of a body says how to read it; a pickle ends before it and ignores what follows.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import CannotDecode, CannotEncode, CodecError
from telegrad.wire.culprits import blame
from telegrad.wire.functions import import_anew, not_found
from telegrad.wire.reducers import FROM_REFERENCES, FROM_SLOTS, REBUILDERS, NeedsValue, reduce
from telegrad.wire.tensors import memory

if TYPE_CHECKING:
    from telegrad.wire.byvalue import ValuePickler

LARGE = 1 << 16  # bytes from which a buffer gets a slot

_PLAIN = ord(pickle.STOP)  # a pickle of built-in types alone
_CALL = ord("C")  # values, the numbers of those that are tensors, names of keyword arguments
_ONE = ord("T")  # the only tensor
_ANY = ord("A")  # before it stands the number of buffers
_TAIL = struct.Struct("<IB")

_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})
_CONTAINERS = frozenset({tuple, list, dict})
_NOTHING = pickle.dumps(((), {}), 5)


class Encoded(NamedTuple):
    """A value in parts."""

    body: bytes
    tensors: list[Tensor]
    references: Sequence[Any] = ()
    buffers: int = 0  # how many of the tensors, the last ones, are memory of other things


def encode(value: Any, same_program: bool) -> Encoded:
    """Pickle `value`, its tensors lifted out. `same_program`: the other process runs the same main program.

    Raises:
        CannotEncode: something in the value cannot be pickled.
    """
    kind = type(value)
    if kind is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict:
        lean = _encode_call(*value)
        if lean is not None:
            return lean
    elif kind in _ATOMS or (kind in _CONTAINERS and _has_atoms_only(value)):
        return Encoded(pickle.dumps(value, 5), [])
    elif kind is Tensor and not value.__dict__:
        return Encoded(b"T", [value])
    try:
        return _dump(_Pickler, value, same_program)
    except CodecError:
        raise
    except Exception:
        return _encode_by_value(value, same_program)


def decode(body: bytes | memoryview, tensors: Sequence[Tensor], references: Sequence[Any] = ()) -> Any:
    """The value of a body whose slots are `tensors` and `references`.

    Raises:
        FunctionNotFound: a function or class is not importable here.
        CannotDecode: something else keeps the value from being rebuilt.
    """
    try:
        how = body[-1]
        if how == _PLAIN:
            return pickle.loads(body)
        if how == _ONE:
            return tensors[0]
        if how == _CALL:
            return _decode_call(body, tensors)
        return _load(body, tensors, references)
    except CodecError:
        raise
    except Exception as error:
        raise CannotDecode(
            f"a value arrived but cannot be rebuilt: {type(error).__name__}: {error}; "
            "use the same versions of its packages on all workers, or send what it is made of"
        ) from error


# The usual cases, without a pickler in Python


def _has_atoms_only(container: Any) -> bool:
    values = container.values() if type(container) is dict else ()
    return _ATOMS.issuperset(map(type, container)) and _ATOMS.issuperset(map(type, values))


def _encode_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded | None:
    """Arguments that are atoms, containers of such, and plain tensors; None where one is anything else."""
    if not args and not kwargs:
        return Encoded(_NOTHING, [])
    values = [*args, *kwargs.values()] if kwargs else list(args)
    tensors: list[Tensor] = []
    places: list[int] = []
    for place, value in enumerate(values):
        kind = type(value)
        if kind in _ATOMS or (kind in _CONTAINERS and _has_atoms_only(value)):
            continue
        if kind is not Tensor or value.__dict__:
            return None
        tensors.append(value)
        places.append(place)
        values[place] = None
    if not tensors:
        return Encoded(pickle.dumps((args, kwargs), 5), tensors)
    if len(tensors) > 1 and len({id(tensor) for tensor in tensors}) < len(tensors):
        return None  # a tensor that is there twice has one slot
    return Encoded(pickle.dumps((values, places, [*kwargs]), 5) + b"C", tensors)


def _decode_call(body: bytes | memoryview, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    values, places, names = pickle.loads(body)
    for place, tensor in zip(places, tensors, strict=True):
        values[place] = tensor
    if not names:
        return tuple(values), {}
    first = len(values) - len(names)
    return tuple(values[:first]), dict(zip(names, values[first:], strict=True))


# All others


def _dump(kind: type[_Pickler | ValuePickler], value: Any, same_program: bool) -> Encoded:
    file = io.BytesIO()
    buffers: list[Tensor] = []
    pickler = kind(file, 5, buffer_callback=partial(_keep, buffers))
    pickler.same_program = same_program
    pickler.tensors = []
    pickler.references = []
    pickler.plain = True
    pickler.dump(value)
    if not pickler.plain or buffers:
        file.write(_TAIL.pack(len(buffers), _ANY))
    return Encoded(file.getvalue(), pickler.tensors + buffers, pickler.references, len(buffers))


def _keep(buffers: list[Tensor], buffer: pickle.PickleBuffer) -> bool:
    """Whether a buffer stays in the pickle."""
    raw = buffer.raw()
    if raw.nbytes < LARGE:
        return True
    buffers.append(torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=torch.uint8))
    return False


def _load(body: bytes | memoryview, tensors: Sequence[Tensor], references: Sequence[Any]) -> Any:
    count, _ = _TAIL.unpack_from(body, len(body) - _TAIL.size)
    buffers = tensors[len(tensors) - count :] if count else ()
    unpickler = _Unpickler(io.BytesIO(body), buffers=map(_held, buffers))
    unpickler.tensors = tensors
    unpickler.references = references
    return unpickler.load()


def _held(blob: Tensor) -> Any:
    """The memory of a tensor of bytes, which it keeps alive."""
    view: Any = (ctypes.c_ubyte * blob.numel()).from_buffer(memory(blob))
    view.blob = blob
    return view


class _Pickler(pickle.Pickler):
    """Where everything has a name."""

    same_program: bool
    tensors: list[Tensor]
    references: list[Any]
    plain: bool  # nothing but built-in types so far

    reducer_override = reduce

    def by_value(self, obj: Any) -> Any:
        raise NeedsValue

    def dump_by_value(self, obj: Any) -> bytes:
        from telegrad.wire.byvalue import dump_by_value

        return dump_by_value(obj)


def _value_pickler() -> type[ValuePickler]:
    """For where something has no name; imported only there."""
    from telegrad.wire.byvalue import ValuePickler, register_spawned_main

    register_spawned_main()
    return ValuePickler


class _Unpickler(pickle.Unpickler):
    tensors: Sequence[Tensor]
    references: Sequence[Any]

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
            raise not_found(module, name, error) from error


def _encode_by_value(value: Any, same_program: bool) -> Encoded:
    try:
        return _dump(_value_pickler(), value, same_program)
    except CodecError:
        raise
    except Exception as error:
        raise blame(value, same_program, _can_dump, error) from error


def blame_again(value: Any, said: CannotEncode, same_program: bool) -> CannotEncode:
    """The same for a part of what could not be sent: as users see a call to which this package has added arguments."""
    if said.__cause__ is None or _can_dump(value, same_program):
        return said
    return blame(value, same_program, _can_dump, said.__cause__)


def _can_dump(value: Any, same_program: bool) -> bool:
    try:
        _dump(_value_pickler(), value, same_program)
    except Exception:
        return False
    return True
