"""Values as a pickle with their tensors lifted out.

Every tensor of a value gets a numbered slot, in order of appearance; the pickle holds the numbers only. So the rooms
above can look at the tensors, or put others in their places, before they are packed and after they are unpacked, and
reading a pickle does nothing but build the value.

Functions and classes travel by name where a name leads back to them on the other side, else by value (cloudpickle).
"""

from __future__ import annotations

import io
import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor
from torch.nn import Buffer, Parameter

from telegrad.errors import CannotDecode, CannotEncode, CodecError, FunctionNotFound
from telegrad.wire.functions import name_of, resolve

LIFT_ARRAYS_FROM = 1 << 16

_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})
_UNNAMED = (type(None), type(NotImplemented), type(...))
_NAMED = (FunctionType, BuiltinFunctionType, type)
_NOTHING: Any = ((), {})
_NOTHING_PICKLED = pickle.dumps(_NOTHING, 5)


class Encoded(NamedTuple):
    """A value in two parts."""

    body: bytes
    tensors: list[Tensor]


def encode(value: Any, same_program: bool) -> Encoded:
    """Pickle `value`, its tensors lifted out. `same_program`: the other process runs the same main program.

    Raises:
        CannotEncode: something in the value cannot be pickled.
    """
    if value == _NOTHING if type(value) is tuple and len(value) == 2 and not value[1] and not value[0] else False:
        return Encoded(_NOTHING_PICKLED, [])
    try:
        try:
            return _dump(_Pickler, value, same_program)
        except _NeedsValue:
            _register_spawned_main()
            return _dump(_ValuePickler, value, same_program)
    except CodecError:
        raise
    except Exception as error:
        raise CannotEncode(
            f"{_culprit(value, same_program)} cannot be sent: {error}. Send what it is made of, "
            "or keep it where it is and call functions there"
        ) from error


def decode(body: bytes | memoryview, tensors: Sequence[Tensor]) -> Any:
    """The value of a pickle whose slots are `tensors`.

    Raises:
        FunctionNotFound: a function or class is not importable here.
        CannotDecode: something else keeps the value from being rebuilt.
    """
    try:
        if not tensors:
            return pickle.loads(body)
        return _Unpickler(body, tensors).load()
    except CodecError:
        raise
    except (ModuleNotFoundError, AttributeError) as error:
        raise FunctionNotFound(
            f"a function or class is missing on this worker ({error}); make the same modules importable on all workers"
        ) from error
    except Exception as error:
        raise CannotDecode(f"a value arrived but cannot be rebuilt: {type(error).__name__}: {error}") from error


class _NeedsValue(Exception):
    """A function or class has no name that serves."""


def _dump(kind: type[_Pickler | _ValuePickler], value: Any, same_program: bool) -> Encoded:
    file = io.BytesIO()
    pickler = kind(file, 5)
    pickler.same_program = same_program
    pickler.tensors = []
    pickler.dump(value)
    return Encoded(file.getvalue(), pickler.tensors)


class _Pickler(pickle.Pickler):
    """The usual case: everything has a name."""

    same_program: bool
    tensors: list[Tensor]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return _reduce_tensor(self.tensors, obj)
        if isinstance(obj, _NAMED):
            return _reduce_named(obj, self.same_program)
        return _reduce_other(obj, self.same_program)


class _ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Where something has none."""

    same_program: bool
    tensors: list[Tensor]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return _reduce_tensor(self.tensors, obj)
        if isinstance(obj, _NAMED):
            try:
                return _reduce_named(obj, self.same_program)
            except _NeedsValue:
                original = getattr(obj, "_torchdynamo_orig_callable", None)
                if original is not None:
                    return _compile, (original,)
                return super().reducer_override(obj)
        return _reduce_other(obj, self.same_program)


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes | memoryview, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if name == "slot" and module == __name__:
            return self._tensors.__getitem__
        return super().find_class(module, name)


def slot(number: int) -> Tensor:
    """Stands in a pickle for the tensor of that number; the unpickler puts the tensor there."""
    raise CannotDecode(f"tensor {number} of a value is missing")


# How things are taken apart


def _lift(tensors: list[Tensor], tensor: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    tensors.append(tensor)
    return slot, (len(tensors) - 1,)


def _reduce_tensor(tensors: list[Tensor], tensor: Tensor) -> Any:
    kind = type(tensor)
    if kind is Tensor and not tensor.__dict__:
        return _lift(tensors, tensor)
    if kind is Parameter or kind is Buffer:
        plain = tensor.detach().as_subclass(Tensor)
        extra = (tensor.requires_grad,) if kind is Parameter else (getattr(tensor, "persistent", True),)
        return _rebuild_module_tensor, (kind, plain, *extra)
    if kind.__reduce_ex__ is not Tensor.__reduce_ex__:
        return NotImplemented
    if hasattr(kind, "__tensor_flatten__") and not tensor.is_nested:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(tensor, name) for name in names}
        return _unflatten, (kind, inner, context, tensor.shape, tensor.stride())
    if tensor.is_nested:
        return _lift(tensors, tensor)
    return _rebuild_subclass, (kind, _without_attributes(tensor), dict(tensor.__dict__))


def _without_attributes(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor) if type(tensor) is not Tensor else tensor.view_as(tensor)


def _rebuild_module_tensor(kind: type, plain: Tensor, extra: bool) -> Tensor:
    return kind(plain, extra) if kind is Parameter else kind(plain, persistent=extra)


def _rebuild_subclass(kind: type[Tensor], plain: Tensor, attributes: dict[str, Any]) -> Tensor:
    tensor = plain if kind is Tensor else plain.as_subclass(kind)
    tensor.__dict__.update(attributes)
    return tensor


def _unflatten(kind: Any, inner: dict[str, Tensor], context: Any, shape: Any, stride: Any) -> Tensor:
    return kind.__tensor_unflatten__(inner, context, shape, stride)  # type: ignore[no-any-return]


def _reduce_named(obj: Any, same_program: bool) -> Any:
    name = name_of(obj, same_program)
    if name is None:
        if isinstance(obj, BuiltinFunctionType) or obj in _UNNAMED:
            return NotImplemented  # a method of an object, or a type that pickle knows
        raise _NeedsValue
    module, _, path = name.partition(":")
    if obj.__module__ == module and getattr(obj, "__qualname__", None) == path:
        return NotImplemented  # pickle finds the same name
    return resolve, (name,)


def _reduce_other(obj: Any, same_program: bool) -> Any:
    if isinstance(obj, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return resolve, (name_of(obj, same_program),)
    if isinstance(obj, torch.jit.ScriptFunction):
        name = name_of(obj, same_program)
        return (resolve, (name,)) if name is not None else (_load_script, (_save_script(obj),))
    if isinstance(obj, torch.jit.ScriptModule):
        return _load_script, (_save_script(obj),)
    if isinstance(obj, torch.UntypedStorage):
        return _storage_of, (torch.empty(0, dtype=torch.uint8).set_(obj),)
    numpy = sys.modules.get("numpy")
    if (
        numpy is not None
        and type(obj) is numpy.ndarray
        and obj.nbytes >= LIFT_ARRAYS_FROM
        and obj.dtype.kind in "biufc"
    ):
        order = "F" if obj.flags.f_contiguous and not obj.flags.c_contiguous else "C"
        flat = numpy.ravel(obj, order=order)
        flat = flat if flat.flags.writeable else flat.copy()
        return _array_of, (torch.from_numpy(flat.view(numpy.uint8)), obj.dtype, obj.shape, order)
    return NotImplemented


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _array_of(tensor: Tensor, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    return tensor.numpy().view(dtype).reshape(shape, order=order)


def _save_script(obj: Any) -> bytes:
    file = io.BytesIO()
    torch.jit.save(obj, file)
    return file.getvalue()


def _load_script(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]


_compiled: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _compile(original: Any) -> Any:
    """Compile once what arrives again and again."""
    if original not in _compiled:
        _compiled[original] = torch.compile(original)
    return _compiled[original]


def _register_spawned_main() -> None:
    """In a spawned child the main program's functions belong to `__mp_main__`, which no other process can import."""
    spawned = sys.modules.get("__mp_main__")
    if spawned is not None and "__mp_main__" not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(spawned)


def _culprit(value: Any, same_program: bool) -> str:
    """Which part of a value cannot be pickled, as far as a look at its upper layers tells."""
    where = ""
    for _ in range(8):
        parts = _parts_of(value)
        bad = next((part for part in parts if not _can_dump(part[1], same_program)), None)
        if bad is None:
            break
        where, value = where + bad[0], bad[1]
    return f"{where.lstrip('.') or 'a value'} of type {type(value).__module__}.{type(value).__qualname__}"


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()] if not callable(value) else []


def _can_dump(value: Any, same_program: bool) -> bool:
    try:
        _dump(_ValuePickler, value, same_program)
    except Exception:
        return False
    return True
