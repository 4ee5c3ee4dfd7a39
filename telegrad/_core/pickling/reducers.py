"""Reduce and rebuild types that pickle should not handle itself.

To handle one more type, add an entry to `REDUCERS`. A reducer gets the pickler and the object. It returns a
`__reduce__` value, or NotImplemented to leave the object to pickle.
"""

from __future__ import annotations

import io
import pickle
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from functools import _lru_cache_wrapper, lru_cache
from multiprocessing.connection import _ConnectionBase
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.nn import Parameter

from telegrad._core.pickling.function_names import OPERATORS, name_of, resolve
from telegrad._core.pickling.segments import OWN_FROM, PIECE, SegmentWriter, Texts, expect_texts
from telegrad._core.wire.tensors import GilYielder, copy_of, held, is_intercepted
from telegrad.errors import CannotEncode

REBUILDERS = __name__  # the module where the unpickler finds FROM_SLOTS


Reducer = Callable[[Any, Any], Any]


def _lift(pickler: Pickler, tensor: Tensor) -> int:
    pickler.tensors.append(tensor)
    return len(pickler.tensors) - 1


# Tensors


def _reduce_tensor(pickler: Pickler, tensor: Tensor) -> Any:
    kind: Any = type(tensor)
    attributes = tensor.__dict__
    if kind is Tensor:
        if not attributes:
            return _slot, (_lift(pickler, tensor),)
        return _slot_as, (_lift(pickler, tensor), None, dict(attributes))
    if kind is Parameter and not attributes:
        return _parameter, (_lift(pickler, tensor), tensor.requires_grad)
    # A subclass of Tensor that neither changes how it is pickled nor intercepts operators keeps its values in its own
    # memory, so that memory gets a slot. A wrapper computes with inner tensors in `__torch_dispatch__`: these are
    # pickled, or the result of its own rules. The receiver then makes a new object, which has no history.
    has_rules, flattens = kind.__reduce_ex__ not in _TORCH_RULES, hasattr(kind, "__tensor_flatten__")
    if not (has_rules or flattens or kind.__torch_dispatch__ != Tensor.__torch_dispatch__):
        return _slot_as, (_lift(pickler, tensor.as_subclass(Tensor)), kind, dict(attributes))
    if tensor.requires_grad and _records[0]():
        raise CannotEncode(
            f"a tensor of the type {kind.__name__} that requires a gradient cannot be sent in an autograd context: its "
            "gradient would not come back, since the receiver creates a new object. Send a plain tensor made from it, "
            "such as tensor.to_local() or tensor.values(), or tensor.detach()"
        )
    if kind.__module__.startswith("torch._subclasses."):
        raise CannotEncode(
            f"a {kind.__name__} cannot be sent, as it has no values: torch.export, or another mode, uses it to "
            "record operators. Record the part that runs on one worker, and call the recording"
        )
    if has_rules:
        return NotImplemented
    if flattens:
        names, context = kind.__tensor_flatten__(tensor)
        inner = {name: getattr(tensor, name) for name in names}
        shape, stride = tuple(tensor.shape), tensor.stride()
        return _unflatten, (kind, inner, context, shape, stride, tensor.requires_grad)
    return NotImplemented  # its own storage may not hold its values


_records: list[Callable[[], bool]] = [bool]  # which returns False


def ask_whether_recorded(records: Callable[[], bool]) -> None:
    """Set the function that returns True if autograd history is recorded for tensors reduced on this thread."""
    _records[:] = [records]


_TORCH_RULES = (Tensor.__reduce_ex__, Parameter.__reduce_ex__)


def _slot(tensors: Sequence[Tensor], number: int) -> Tensor:
    return tensors[number]


def _slot_as(tensors: Sequence[Tensor], number: int, kind: type[Tensor] | None, attributes: dict[str, Any]) -> Tensor:
    tensor = tensors[number]
    if kind is not None:
        tensor = _become(tensor, kind, tensor.requires_grad)
    tensor.__dict__.update(attributes)
    return tensor


def _parameter(tensors: Sequence[Tensor], number: int, requires_grad: bool) -> Tensor:
    return _become(tensors[number], Parameter, requires_grad)


def _become(tensor: Tensor, kind: type[Tensor], requires_grad: bool) -> Tensor:
    """Return the same memory as another type: a leaf remains a leaf, and a tensor with history keeps it."""
    if tensor.grad_fn is not None:
        return tensor.as_subclass(kind)
    return Tensor._make_subclass(kind, tensor, requires_grad)


def _unflatten(
    kind: Any, inner: dict[str, Tensor], context: Any, shape: Any, stride: Any, requires_grad: bool
) -> Tensor:
    tensor: Tensor = kind.__tensor_unflatten__(inner, context, torch.Size(shape), stride)
    return tensor.requires_grad_() if requires_grad and not tensor.requires_grad else tensor


# References of the layers above, which add their types to REDUCERS


def reduce_reference(pickler: Pickler, reference: Any) -> Any:
    pickler.references.append(reference)
    return _reference, (len(pickler.references) - 1,)


def _reference(references: Sequence[Any], number: int) -> Any:
    return references[number]


# Plain memory


def _reduce_storage(pickler: Pickler, storage: torch.UntypedStorage) -> Any:
    return _storage, (_lift(pickler, torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)),)


def _storage(tensors: Sequence[Tensor], number: int) -> torch.UntypedStorage:
    return tensors[number].untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _reduce_ndarray(pickler: Pickler, array: Any) -> Any:
    """Copy a strided array: numpy keeps only dense arrays out of the pickle."""
    flags = array.flags
    if array.dtype.hasobject or flags.c_contiguous or flags.f_contiguous:
        return NotImplemented
    return array.copy().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _reduce_elements(pickler: Pickler, values: Any) -> Any:
    """Send a large `array.array` as a buffer: its own pickling would copy all elements at once."""
    if type(values) is not array or len(values) * values.itemsize < OWN_FROM or is_intercepted():
        return NotImplemented
    data = copy_of(memoryview(values))  # it may change before it is sent
    return _elements, (values.typecode, _format_of(values.typecode), pickle.PickleBuffer(held(data)))


def _format_of(typecode: str) -> int:
    """Return the machine format code of elements, as defined by the module `array`."""
    reduced: Any = array(typecode).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return int(reduced[1][2])


def _elements(typecode: str, layout: int, data: Any) -> Any:
    view = memoryview(data).cast("B")
    values: Any = array(typecode)
    if layout != _format_of(typecode):  # from a machine with another format
        return values.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[0](array, typecode, layout, bytes(view))
    turns = GilYielder()
    for start in range(0, len(view), PIECE):
        values.frombytes(view[start : start + PIECE])
        turns.give_way()
    return values


def _reduce_file(pickler: Pickler, file: Any) -> Any:
    """Send a large BytesIO by its content: its own unpickling would copy the received bytes."""
    if type(file) is not io.BytesIO or file.closed or file.getbuffer().nbytes < OWN_FROM:
        return NotImplemented
    return _file, file.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2]


def _file(content: bytes, position: int, attributes: dict[str, Any] | None) -> io.BytesIO:
    file = io.BytesIO(content)
    file.seek(position)
    file.__dict__.update(attributes or {})
    return file


# Functions and classes


def _reduce_named(pickler: Pickler, obj: Any) -> Any:
    name = name_of(obj, pickler.same_program)
    if name is None:
        if isinstance(obj, BuiltinFunctionType) or obj in _UNNAMED:
            return NotImplemented  # a bound method, or a type that pickle handles
        return pickler.by_value(obj)
    module, _, path = name.partition(":")
    if obj.__module__ == module and obj.__qualname__ == path:
        return NotImplemented  # pickle uses the same name
    return resolve, (name,)


_UNNAMED = (type(None), type(NotImplemented), type(...))


def _reduce_function(pickler: Pickler, function: Any) -> Any:
    if function in _OWN:
        return NotImplemented
    original = getattr(function, "_torchdynamo_orig_callable", None)
    if original is None:
        return _reduce_named(pickler, function)
    name = name_of(function, pickler.same_program)
    if name is not None:
        return resolve, (name,)
    source = name_of(original, pickler.same_program) or pickler.dump_by_value(original)
    return _compile, (source, pickler.dump_by_value(_compiler_of(function)))


def _compiler_of(compiled: Any) -> Any:
    """Return the `torch.compile` context that made a function; it holds the backend."""
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    return cells["self"].cell_contents if "self" in cells else torch.compile


def _compile(source: str | bytes, compiler: bytes) -> Any:
    return _compiled(source if isinstance(source, bytes) else resolve(source), compiler)


# A function that is received repeatedly is compiled once. With a name it is one object. By value it is a new object
# each time it is unpickled, so it is known by its bytes.
@lru_cache(maxsize=1024)
def _compiled(source: Any, compiler: bytes) -> Any:
    return pickle.loads(compiler)(pickle.loads(source) if isinstance(source, bytes) else source)


def _reduce_script(pickler: Pickler, obj: Any) -> Any:
    if isinstance(obj, torch.jit.ScriptFunction) and (name := name_of(obj, pickler.same_program)) is not None:
        return resolve, (name,)
    if _records[0]() and any(tensor.requires_grad for tensor in getattr(obj, "parameters", list)()):
        raise CannotEncode(
            "a module of torch.jit whose parameters require gradients cannot be sent in an autograd context: their "
            "gradients would not come back, since the receiver loads it from an archive. Create it there, for "
            "example with RemoteModule, or call requires_grad_(False) on it"
        )
    file = io.BytesIO()
    torch.jit.save(obj, file)
    return _load_script, (file.getvalue(),)


def _load_script(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]


# Objects bound to this process, such as open files, connections and views of memory, are not sent. Pickling refuses
# most of them, and copies the others: cloudpickle converts a text file to a `StringIO`. A `multiprocessing` connection
# arrives as a descriptor number, which is another file at the receiver and is closed with the connection. A memoryview
# would arrive as bytes, without its format and shape.


_FILE = "Send its path and open it there, or send its content, file.read()"
_ADVICE: dict[type, str] = {
    io.TextIOWrapper: _FILE,
    io.BufferedReader: _FILE,
    io.BufferedWriter: _FILE,
    io.BufferedRandom: _FILE,
    io.BufferedRWPair: _FILE,
    io.FileIO: _FILE,
    tempfile._TemporaryFileWrapper: _FILE,
    tempfile.SpooledTemporaryFile: _FILE,
    tempfile.TemporaryDirectory: "Send its path, its attribute `name`",
    torch.fx.Proxy: "torch.fx traces with it: trace the part that runs on one worker, and call the result",
    memoryview: "Send bytes(view), or the object that it is a view of",
    _ConnectionBase: "Send the values by calls instead: rpc_sync, or rpc_stream for many",
}
_OWN_WAY = {"__reduce__", "__reduce_ex__", "__getstate__"}  # methods by which a subclass defines its own pickling


class BoundToProcess(TypeError):
    """Raised for an object of a class that cannot be sent; `advice` names an alternative."""

    def __init__(self, advice: str, kind: type = object) -> None:
        super().__init__("it belongs to this process only")
        self.advice = advice
        self.kind = kind


def _refuse(pickler: Any, obj: Any) -> Any:
    for name in ("stdout", "stderr"):
        if obj is getattr(sys, name):
            return _stream, (name,)
    for kind in type(obj).__mro__:
        if kind in _ADVICE:
            raise BoundToProcess(_ADVICE[kind], kind)
        if _OWN_WAY & vars(kind).keys():
            break
    return NotImplemented


def _stream(name: str) -> Any:
    return getattr(sys, name)


# Looked up along the MRO of the type.
REDUCERS: dict[type, Reducer] = {
    Tensor: _reduce_tensor,
    torch.UntypedStorage: _reduce_storage,
    torch.TypedStorage: lambda _, storage: (_typed_storage, (storage._untyped_storage, storage.dtype)),
    FunctionType: _reduce_function,
    BuiltinFunctionType: _reduce_named,
    type: _reduce_named,
    _lru_cache_wrapper: _reduce_named,
    **dict.fromkeys(OPERATORS, lambda pickler, operator: (resolve, (name_of(operator, pickler.same_program),))),
    torch.jit.ScriptFunction: _reduce_script,
    torch.jit.ScriptModule: _reduce_script,
    array: _reduce_elements,
    io.BytesIO: _reduce_file,
    **dict.fromkeys(_ADVICE, _refuse),
}

# The unpickler passes these the tensors, or the references, of the value before their own arguments.
FROM_SLOTS: dict[str, Callable[..., Any]] = {made.__name__: made for made in (_slot, _slot_as, _parameter, _storage)}
FROM_REFERENCES: dict[str, Callable[..., Any]] = {_reference.__name__: _reference}
_OWN = {*FROM_SLOTS.values(), _reference, resolve, _unflatten, _typed_storage, _compile, _load_script, _elements, _file}

try:
    import numpy
except ImportError:
    pass
else:
    REDUCERS[numpy.ndarray] = _reduce_ndarray


def reduce(pickler: Any, obj: Any) -> Any:
    """Reduce an object; the `reducer_override` of every pickler."""
    pickler.plain = False
    for kind in type(obj).__mro__:
        reducer = REDUCERS.get(kind)
        if reducer is not None:
            reduced = reducer(pickler, obj)
            break
    else:
        reduced = NotImplemented
        # The pickler would copy a large text in an attribute. No code of the object has run yet, so pickling can start
        # again.
        for value in getattr(obj, "__dict__", {}).values() if type(obj) is not ModuleType else ():
            if type(value) is str and len(value) >= OWN_FROM:
                pickler.expect_texts()
    # From here on pickle may call methods of the object, such as `__getstate__`. They do not run again for the sake of
    # a text.
    if reduced is NotImplemented:
        pickler.file.may_repeat = False
    return reduced


class Pickler:
    """The part of a pickler that reducers use."""

    same_program: bool
    tensors: list[Tensor]
    references: list[Any]
    plain: bool  # only built-in types so far
    globals_sent: list[Any]  # globals of the main program in the pickle, which receivers keep
    file: SegmentWriter
    texts: Texts | None = None

    reducer_override = reduce
    expect_texts = expect_texts

    def by_value(self, obj: Any) -> Any:
        """Reduce a function or class without a usable name."""
        raise NotImplementedError

    def dump_by_value(self, obj: Any) -> bytes:
        """Return a separate pickle of an object that is sent by value."""
        raise NotImplementedError
