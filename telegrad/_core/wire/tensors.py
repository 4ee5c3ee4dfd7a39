"""Parts of a tensor in transit: leaves, which have memory of their own, and that memory as blobs.

Blobs are one-dimensional byte tensors that alias the source if possible, because large copies are expensive. Memory
from or for an accelerator is always a blob, even if it is small, with its target device. `packing` splits tensors into
these parts, and combines them. The device maps of two workers give the target devices (`DeviceRoutes`).

The transport carries blobs only. The memory of other Python objects is viewed as a blob, so it is sent without a copy.
Large copies release the GIL: a copy of 256 MB takes 0.1 s, and no other thread could run meanwhile.

The thread that makes a tensor here may be in any mode of the program's. The tensor must not depend on that. So it is
made outside of inference mode, since autograd cannot save such tensors, and with an explicit device, since the program
may have set a default one. Operators are avoided where a mode may intercept them (`is_intercepted`): within
FakeTensorMode a new tensor has no memory.
"""

import ctypes
import functools
import mmap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from telegrad.errors import DeviceError

# torch warns about experimental kinds of tensors at the line that creates them. The program chooses to use them; the
# lines here only rebuild received tensors.
warnings.filterwarnings("ignore", category=UserWarning, module=r"telegrad\._core\.wire\.(tensors|packing)$")

CPU = torch.device("cpu")
HOST = -1  # instead of an accelerator's number
GRAD, CONJ, NEG = 1, 2, 4  # flags of a leaf

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _QUANTIZED
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}

HUGE_FROM = 1 << 22  # from this size on, huge pages take half the time of small ones to touch, and a tenth to free
PARALLEL_FROM = 1 << 21  # below this, waking torch's other threads costs more than they save
TURN = 2e-3  # seconds of work after which this thread releases the GIL
REST = 5e-5  # seconds: long enough for a waiting thread to wake, unlike sleep(0)

Spec = tuple[Any, ...]
Memory = int | bytes


def c_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    # A separate prototype: setting the types on ctypes.pythonapi's function would change them for the whole process.
    made: Callable[..., Any] = ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
    return made


_Buffer = ctypes.c_void_p * 11  # room for a Py_buffer, a struct of the stable ABI whose first field is the address
_get_buffer = c_function("PyObject_GetBuffer", ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = c_function("PyBuffer_Release", None, ctypes.c_void_p)
_view = c_function("PyMemoryView_FromMemory", ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # for `_view`
_advise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


class DeviceBlob(NamedTuple):
    """A blob that is on an accelerator, or is to arrive on one."""

    blob: Tensor
    device: int  # device of the receiver, or HOST
    ready: torch.Event | None = None  # event before which it may not be read; None: the work on the current stream

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes

    def numel(self) -> int:
        return self.blob.numel()


Blob = Tensor | DeviceBlob


def memory(blob: Tensor) -> memoryview:
    """Return the memory of a byte tensor, writable; the view does not keep the tensor alive."""
    return _view(blob.data_ptr(), blob.numel(), _WRITABLE) if blob.numel() else memoryview(bytearray())


def nothing(name: str, device: torch.device = CPU) -> Tensor:
    """Return an empty tensor that can be set to some memory. For the host, this is the fastest way."""
    if device.type != "cpu":
        with torch.inference_mode(False):
            return torch.empty(0, dtype=DTYPES[name], device=device)
    return torch.empty_like(_empty(name))


@functools.cache
def _empty(name: str) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=DTYPES[name], device=CPU)


def keep_for(tensor: Tensor, stream: torch.Stream) -> None:
    """Do not reuse the memory of a tensor before `stream` has completed the work queued until now."""
    for part in parts_of(tensor):
        with torch.no_grad():
            # A view without the conj or neg bits: torch's `record_stream` corrupts memory if they are set.
            bare = part.conj() if part.is_complex() and part.is_conj() else part
            bare = torch._neg_view(bare) if bare.is_neg() else bare
        bare.record_stream(stream)


SPARSE = {  # by layout: the methods that return the parts of a tensor
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of which a sparse tensor is made; of any other tensor, the tensor itself."""
    methods = SPARSE.get(tensor.layout)
    return [getattr(tensor, method)() for method in methods] if methods else [tensor]


Strides = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return the strides of a new tensor of that shape. Contiguous tensors may differ in dimensions of length 1."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Strides) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if prod(shape) else 0


def distinct(shape: Sequence[int], strides: Strides) -> tuple[int, ...]:
    """Return the shape without the repetitions made by `expand`."""
    return tuple(1 if step == 0 and n else n for n, step in zip(shape, strides, strict=True))


def repeats(shape: Sequence[int], strides: Strides) -> bool:
    """Return True if two elements may have the same address."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def at_address(address: int, size: int, keeper: Any) -> Tensor:
    """Return a tensor of the `size` bytes at `address`; it keeps `keeper`, their owner, alive."""
    # torch keeps the array alive, and the array keeps `keeper`: unlike a memoryview, an array of ctypes can have
    # attributes.
    array: Any = (ctypes.c_ubyte * size).from_address(address)
    array.keeper = keeper
    with torch.inference_mode(False):
        return torch.frombuffer(array, dtype=torch.uint8)


def held(blob: Tensor) -> Any:
    """Return the memory of a byte tensor as a buffer that keeps the tensor alive."""
    view: Any = (ctypes.c_ubyte * blob.numel()).from_buffer(memory(blob))
    view.blob = blob
    return view


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous buffer, which may be read-only."""
    buffer = _Buffer()
    _get_buffer(view, buffer, 0)
    try:
        return int(buffer[0] or 0)
    finally:
        _release_buffer(buffer)


def of_buffer(view: memoryview) -> Tensor:
    """Return the memory of a contiguous buffer as a tensor, which keeps the buffer alive."""
    return at_address(address_of(view), view.nbytes, view)


def fresh(size: int) -> Tensor:
    """Return a byte tensor of newly allocated, untouched memory."""
    with torch.inference_mode(False):
        made = torch.empty(size, dtype=torch.uint8, device=CPU)
    if not is_intercepted():
        advise_huge(made.data_ptr(), size)
    return made


def copy_of(view: memoryview) -> Tensor:
    made = fresh(view.nbytes)
    copy(made.data_ptr(), address_of(view), view.nbytes)
    return made


def is_intercepted() -> bool:
    """Return True if torch operators may not work on real memory here, as in a mode of fake tensors."""
    return bool(torch._C._len_torch_dispatch_stack())


def copy(target: int, source: int, size: int) -> None:
    """Copy bytes from one address to another without the GIL."""
    if size < PARALLEL_FROM or is_intercepted():
        ctypes.memmove(target, source, size)
        return
    with torch.no_grad():
        at_address(target, size, None).copy_(at_address(source, size, None))


def fill_new(target: int, source: int, size: int) -> None:
    """Copy bytes into newly allocated, untouched memory."""
    advise_huge(target, size)
    copy(target, source, size)


def advise_huge(target: int, size: int) -> None:
    """Request huge pages for untouched memory, if it is large."""
    if _advise is not None and size >= HUGE_FROM:  # a kernel without huge pages uses small ones
        start = -(-target // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (target + size) // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


# GIL


class GilYielder:
    """Release the GIL regularly during long work in Python."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = perf_counter()

    def give_way(self) -> None:
        if perf_counter() - self._since > TURN:
            sleep(REST)
            self._since = perf_counter()


# Overlaps


def extent_of(leaf: Tensor) -> int:
    return extent(leaf.shape, leaf.stride()) * leaf.itemsize


def joined(spans: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, list[int]]]:
    """Return the beginning, the end and the numbers of each group of `(start, end, number)` that overlap."""
    groups: list[tuple[int, int, list[int]]] = []
    for start, end, number in sorted(spans):
        if groups and start < groups[-1][1]:
            first, reach, members = groups[-1]
            members.append(number)
            groups[-1] = first, max(reach, end), members
        else:
            groups.append((start, end, [number]))
    return groups


def bytes_of(storage: torch.UntypedStorage, start: int, size: int) -> Tensor:
    return nothing("uint8", storage.device).set_(storage, start, (size,), (1,))


def as_views_of_shared(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, with those that share memory replaced by views of one tensor.

    Autograd then detects writes through one of them when it uses another, and refuses writes that it cannot track.
    """
    spans = []
    for number, each in enumerate(tensors):
        if each.layout is torch.strided and not each.is_nested and not each.is_meta and each.numel():
            spans.append((each.data_ptr(), each.data_ptr() + extent_of(each), number))
    found = list(tensors)
    bases: dict[int, Tensor] = {}  # by address of their storage
    with torch.inference_mode(False), torch.no_grad():
        for number in [number for *_, members in joined(spans) if len(members) > 1 for number in members]:
            each = tensors[number]
            storage = each.untyped_storage()
            base = bases.get(storage.data_ptr())
            if base is None:
                base = bytes_of(storage, 0, storage.nbytes())
                bases[storage.data_ptr()] = base
            found[number] = _view_of(base, each)
    return found


def _view_of(base: Tensor, like: Tensor) -> Tensor:
    """Return a view of the bytes `base` with the dtype, shape and strides of `like`; call this under `no_grad`."""
    first = int(like.storage_offset()) * like.itemsize
    view = base[first : first + extent_of(like)].view(like.dtype)
    view = view.as_strided(like.shape, like.stride(), int(like.storage_offset()))
    view = torch._neg_view(view) if like.is_neg() else view
    view = view.conj() if like.is_complex() and like.is_conj() else view
    return view.requires_grad_(like.requires_grad)


# Devices


class DeviceMapping(Protocol):
    """Map a device of this worker to the receiver's accelerator for its tensors, or to HOST."""

    keeps_host: bool  # tensors of the host arrive on the host

    def __call__(self, device: torch.device) -> int:
        """Return the receiver's device, or raise DeviceError if tensors of `device` cannot be sent."""


class DeviceRoute:
    """Target devices for one direction between two workers."""

    def __init__(self, table: Mapping[str, str], advice: str, otherwise: int | None = None) -> None:
        """Map devices missing in `table` to `otherwise`; if that is None, they raise DeviceError with `advice`."""
        self._places = {here: HOST if there == "cpu" else torch.device(there).index for here, there in table.items()}
        self._advice = advice
        self._otherwise = otherwise
        self.keeps_host = self._places.get("cpu", HOST) == HOST

    def __call__(self, device: torch.device) -> int:
        place = self._places.get(str(device), HOST if device.type == "cpu" else self._otherwise)
        if place is None:
            raise DeviceError(self._advice.format(device=device))
        return place


class DeviceRoutes(NamedTuple):
    """Target devices on the receiver, by the kind of message."""

    calls: DeviceMapping
    gradients: DeviceMapping


def for_calls(to: str, map_: Mapping[str, str]) -> DeviceMapping:
    return DeviceRoute(
        map_,
        "a tensor on {device} cannot be sent to worker "
        f"{to!r}: TensorPipe RPC backend only supports CPU tensors by default, and the device map to that worker has "
        "no entry for {device}. Add one with `set_device_map` on `TensorPipeRpcBackendOptions`, such as "
        f"options.set_device_map({to!r}, " + "{{'{device}': '{device}'}}), or send tensor.cpu()",
    )


def for_answers(to: str, map_: Mapping[str, str]) -> DeviceMapping:
    """Return the target devices of results: the inverse of the caller's map."""
    return DeviceRoute(
        _turned(map_),
        "Response device mapping is not available for {device}: "
        f"the device map of the caller, {to!r}, to this worker has no such target. Add one on worker {to!r} with "
        "`set_device_map` on `TensorPipeRpcBackendOptions`, or return tensor.cpu()",
    )


def for_gradients(map_: Mapping[str, str], theirs: Mapping[str, str]) -> DeviceMapping:
    """Return the target devices of gradients, which go back along both maps; the receiver moves them further."""
    return DeviceRoute({**map_, **_turned(theirs)}, "", otherwise=HOST)


def _turned(map_: Mapping[str, str]) -> dict[str, str]:
    return {target: source for source, target in map_.items()}
