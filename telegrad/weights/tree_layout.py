"""Copies of a tree of tensors in one block of memory: their layout, and how a publisher makes them.

`wire.packing` finds overlapping tensors. Tensors that share memory have one slot of a version, to which their bytes are
copied once; each other tensor has its own slot. In a reader's memory each tensor is a view of its slot, with the
publisher's offset and strides. So readers have the same sharing: a write to one tensor changes the others.

A tensor keeps its strides, unless most of the memory between its elements does not belong to it. Then only its elements
are copied, in the order of its strides.
"""

import ctypes
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from telegrad.errors import InvalidArgument
from telegrad.ext.values import (
    CONJ,
    DTYPES,
    NEG,
    Strides,
    contiguous_strides,
    decode,
    distinct,
    encode,
    extent_of,
    joined,
    pack,
    repeats,
)

ALIGNED = 64  # bytes in a cache line
SMALL = 1 << 17  # bytes: to create a tensor of them would take as long as to copy them
AT_ONCE = 16  # small copies after which other threads may run
TRIES = 3  # attempts to copy a changing source before it is refused
PLAIN = (Tensor, nn.Parameter)  # types whose values are in their own memory
Rounding = torch.dtype | Callable[[str, Tensor], torch.dtype | None] | None

_LOOKS: tuple[Callable[[Tensor], Any], ...] = (
    *(type, attrgetter("device", "dtype", "shape"), Tensor.stride, Tensor.is_conj, Tensor.is_neg, Tensor.data_ptr),
    Tensor.is_inference,
)
# `memmove` by way of PYFUNCTYPE, which holds the interpreter lock during the call, as `Copies.run` needs.
_move = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class TensorView(NamedTuple):
    """The position of a tensor in a version: its first element, and the strides to the others."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: Strides
    start: int  # bytes
    flags: int


class Views:
    """Creates the tensors of versions, in few Python steps, since there may be thousands."""

    def __init__(self, views: Sequence[TensorView]) -> None:
        self._count = len(views)
        self._flagged = [(number, view.flags) for number, view in enumerate(views) if view.flags]
        rows: dict[torch.dtype, list[Any]] = {}
        for number, (dtype, shape, strides, start, _) in enumerate(views):
            rows.setdefault(dtype, []).append((number, shape, strides, start // dtype.itemsize))
        self._by_type = {dtype: [*zip(*each, strict=True)] for dtype, each in rows.items()}

    def of(self, memory: Tensor) -> list[Tensor]:
        """Return the tensors in the memory of a version."""
        found: list[Any] = [None] * self._count
        for dtype, (numbers, *places) in self._by_type.items():
            made = map(memory.view(dtype).as_strided, *places)
            for number, tensor in zip(numbers, made, strict=True):
                found[number] = tensor
        for number, flags in self._flagged:
            tensor = found[number].conj() if flags & CONJ else found[number]
            found[number] = torch._neg_view(tensor) if flags & NEG else tensor
        return found


class Copy(NamedTuple):
    """Elements of a tensor, and their destination."""

    number: int  # of the tensor
    part: tuple[tuple[int, ...], Strides, int] | None  # shape, strides, and offset to its first element; None: all
    there: TensorView


class Copies:
    """Copies between tensors and the memory of a version, in few Python steps."""

    def __init__(self, copies: Sequence[Copy], tensors: Sequence[Tensor], small: int) -> None:
        """`tensors` look like those that will be copied. Up to `small` bytes are copied without views and threads."""
        plain = [each for each in copies if _is_plain(each, tensors[each.number], small)]
        self._others = [each for each in copies if not _is_plain(each, tensors[each.number], small)]
        self._places = Views([each.there for each in self._others])
        self._numbers = [each.number for each in plain]
        self._starts = [each.there.start for each in plain]
        self._sizes = [tensors[number].nbytes for number in self._numbers]

    def run(self, tensors: Sequence[Tensor], memory: Tensor, loads: bool = False) -> None:
        """Copy the tensors to the memory, or with `loads` from it."""
        mine = [tensors[number] for number in self._numbers]
        ends: list[Any] = [map(memory.data_ptr().__add__, self._starts), map(Tensor.data_ptr, mine)]
        moves = map(_move, *ends[:: -1 if loads else 1], map(min, self._sizes, map(attrgetter("nbytes"), mine)))
        # Each step of `moves` reads two addresses and copies. All of its functions are C functions that hold the
        # interpreter lock, and `deque` runs AT_ONCE steps in one call. So no other thread can free or resize a tensor
        # between the read of its address and the copy. Between two calls other threads may run. The smaller of both
        # sizes is copied, since a tensor may have become smaller after the plan was made.
        while deque(islice(moves, AT_ONCE), 1):
            pass
        # Autograd does not see these copies. Without the count, a backward pass would use a changed tensor that a
        # forward pass has saved, without an error.
        if loads:
            torch.autograd.graph.increment_version(mine)
        if self._others:
            with torch.no_grad():
                ends = [self._places.of(memory), [_part(tensors[number], part) for number, part, _ in self._others]]
                torch._foreach_copy_(*ends[:: -1 if loads else 1])


def _is_plain(copy: Copy, tensor: Tensor, small: int) -> bool:
    """Return True if the bytes of a small tensor are to be copied as they are."""
    _, part, there = copy
    is_plain = type(tensor) in PLAIN and tensor.is_cpu and tensor.is_contiguous() and not tensor._is_zerotensor()
    is_same = not there.flags and (tensor.dtype, tensor.stride()) == (there.dtype, there.strides)
    return part is None and is_plain and is_same and tensor.nbytes <= small


class Layout:
    """The memory layout of a tree, and of each tree that differs from it only in the values of its tensors."""

    def __init__(self, number: int, description: bytes) -> None:
        self.number: int = number
        self.description: bytes = description
        self.size: int
        self.slots: list[tuple[int, int, int]]
        # Of each slot the first byte, the size, and the size of its elements; 1 if these have several sizes.
        self._body, views, self.slots, self.size = pickle.loads(description)
        self.views: list[TensorView] = [TensorView(*view) for view in views]
        self._views = Views(self.views)
        self.checked: Any = None  # targets that any version may be copied into: see `Version._load`
        # Not a `cached_property`: before Python 3.12 it has one lock for all objects, which stays locked in a child
        # that is forked while another thread holds it.
        self.names: list[dict[str, int] | None] = []  # one item once they are computed: see `Version._sources`

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """Return the published tensors in the memory of a version."""
        # The caller may be in inference mode. Tensors that are made in it cannot be saved for a backward pass.
        with torch.inference_mode(False):
            return self._views.of(memory)

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """Return the published tree with these tensors."""
        return decode(self._body, tensors)


class Snapshot(NamedTuple):
    """The tensors of one tree, and how to copy them into the memory of a version."""

    layout: Layout
    copies: Copies
    tensors: list[Tensor]

    def fill(self, memory: Tensor) -> None:
        """Copy the tensors; raise InvalidArgument if other threads keep changing the tensors."""
        # The version counters of torch show a write during the copy, as by an optimizer on another thread. Writes that
        # torch does not count are not noticed: of `.data`, of NumPy, of inference tensors.
        for _ in range(TRIES):
            before = _versions(self.tensors)
            self.copies.run(self.tensors, memory)
            if _versions(self.tensors) == before:
                return
        raise InvalidArgument(
            "the published tensors were changed by another thread while they were copied, and the version would "
            "mix several steps: publish between the steps, or give a function that returns a copy made under a lock"
        )


def _part(tensor: Tensor, part: tuple[tuple[int, ...], Strides, int] | None) -> Tensor:
    if part is None:
        return tensor
    shape, strides, skip = part
    return bare(tensor).as_strided(shape, strides, int(tensor.storage_offset()) + skip)


class Snapshots:
    """The snapshots of one publisher. The last layout is reused while trees have the same one."""

    def __init__(self, rounding: Rounding = None) -> None:
        self._rounding = rounding
        self._last: Layout | None = None
        self._copies = Copies([], [], SMALL)
        self._kind: Any = None  # of the last tree, if its body follows from that
        self._body = b""
        self._looks: Any = None  # of the last tree's tensors
        self._shape: Any = None  # the complete content of the last layout

    def of(self, tree: Any) -> Snapshot:
        """Return the tensors of a tree, with their layout. Raise InvalidArgument for a value that cannot be published,
        and CannotEncode for one that cannot be pickled, or a tensor whose memory was freed."""
        kind = _kind_of(tree)
        is_alike = kind is not None and kind == self._kind
        body, tensors = (self._body, [*tree.values()]) if is_alike else _taken_apart(tree)
        seen = looks(tensors)
        # The last layout and plan of copies fit if the tree has the same body and the tensors have the same looks,
        # addresses included. So a tree of thousands of tensors is laid out once. A function of types may decide
        # differently each time, and some tensors have no looks.
        if not (seen and seen == self._looks and body == self._body) or callable(self._rounding):
            self._arrange(tree, body, tensors)
        # After `_arrange`, which may refuse the tree: a refused tree must not be taken for the last one when it is
        # published again.
        self._kind, self._body, self._looks = kind, body, seen
        assert self._last is not None
        return Snapshot(self._last, self._copies, tensors)

    def _arrange(self, tree: Any, body: bytes, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            _check(tensor)
        meta, bound, _ = pack([tensor.detach() for tensor in tensors], _AsBlobs())
        specs, *_ = pickle.loads(meta)
        blobs: list[Tensor] = [each.blob for each in bound]  # type: ignore[union-attr]
        # `pack` puts tensors that overlap into one blob if it can. Otherwise two slots would have copies of the same
        # memory, and readers would not share it.
        if any(len({specs[number][3] for number in group}) > 1 for group in groups_of(tensors)):
            raise InvalidArgument(
                "two tensors overlap in memory by a part of an element, or their arrays by a part of each, so "
                "they cannot be published together: clone one"
            )
        members: list[list[int]] = [[] for _ in blobs]
        for number, (_, _, _, blob, *_) in enumerate(specs):
            members[blob].append(number)
        names: dict[Any, list[str]] = {}  # by tensor, if the type depends on the name
        for name, tensor in named(tree) if callable(self._rounding) else ():
            names.setdefault(_identity(tensor), []).append(name)
        views: list[Any] = [None] * len(tensors)
        slots: list[tuple[int, int, int]] = []
        copies: list[Copy] = []
        end = 0
        for blob, group in zip(blobs, members, strict=True):
            to = self._rounded_to([tensors[number] for number in group], names)
            for number in group:
                name, shape, flags, _, offset, strides = (*specs[number], 0, None)[:6]
                dtype = to or DTYPES[name]
                there = contiguous_strides(shape) if strides is None else strides
                if offset is None:
                    there = _closed_up(distinct(shape, strides), strides)
                views[number] = TensorView(dtype, tuple(shape), there, end + (offset or 0) * dtype.itemsize, flags)
            if len(blob):
                copies.append(_copy(group, tensors, blob, views[group[0]], end, to))
                itemsizes = {views[number].dtype.itemsize for number in group}
                itemsize = itemsizes.pop() if len(itemsizes) == 1 else 1
                size = len(blob) // tensors[group[0]].itemsize * itemsize if to else len(blob)
                slots.append((end, size, itemsize))
                end += -(-size // ALIGNED) * ALIGNED
        shape = body, [*map(tuple, views)], slots, max(end, ALIGNED)
        self._copies = Copies(copies, tensors, SMALL)
        # The number stays while the content stays: readers that know it get no description again, and deltas lead only
        # between versions of one layout.
        if self._last is None or shape != self._shape:
            description = pickle.dumps(shape, 5)
            self._last, self._shape = Layout(self._last.number + 1 if self._last else 1, description), shape

    def _rounded_to(self, tensors: Sequence[Tensor], names: Mapping[Any, list[str]]) -> torch.dtype | None:
        """Return the type of all tensors in one slot, or None if they have several types and keep them; raise
        InvalidArgument if they would get several types, and so could not share memory."""
        own = {tensor.dtype for tensor in tensors}
        wanted = {
            publish_dtype(self._rounding, name, tensor)
            for tensor in tensors
            for name in (names and names.get(_identity(tensor))) or [""]
        }
        if len(own) == len(wanted) == 1:
            return wanted.pop()
        # a single type for all leaves tensors unchanged that cannot have it
        if wanted == own or not callable(self._rounding):
            return None
        raise InvalidArgument(
            f"tensors of shape {', '.join(str(tuple(tensor.shape)) for tensor in tensors)} share memory, and are to be "
            f"published as {', '.join(sorted(map(str, wanted)))}: give one type for all of them"
        )


def publish_dtype(rounding: Rounding, name: str, tensor: Tensor) -> torch.dtype:
    """Return the type in which the tensor of that name is published. Only real floating-point tensors of larger types
    are rounded; a function decides for each tensor. Raise InvalidArgument if the type is no floating-point type."""
    if rounding is None or not tensor.is_floating_point():
        return tensor.dtype
    chosen = rounding if isinstance(rounding, torch.dtype) else rounding(name, tensor)
    if chosen is None or (chosen is rounding and chosen.itemsize >= tensor.itemsize):
        return tensor.dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise InvalidArgument(
            f"{name!r} cannot be published as {chosen}: weights are rounded to floating numbers, such as torch.bfloat16"
        )
    return chosen


class _AsBlobs:
    """Make `pack` put all memory into blobs, even small ones, as if for devices of a receiver."""

    keeps_host = False

    def __init__(self) -> None:
        self._numbers: dict[torch.device, int] = {}

    def __call__(self, device: torch.device) -> int:
        return self._numbers.setdefault(device, len(self._numbers))


def _copy(
    group: list[int], tensors: list[Tensor], blob: Tensor, first: TensorView, start: int, dtype: torch.dtype | None
) -> Copy:
    """Return how to copy the memory of some tensors to the slot at `start`, in which the first of them is `first`."""
    number, tensor, size = group[0], tensors[group[0]], len(blob)
    once = distinct(tensor.shape, tensor.stride())
    if len(group) == 1 and prod(once) * tensor.itemsize == size and not repeats(once, tensor.stride()):
        is_all = once == tensor.shape and not first.flags
        return Copy(number, None if is_all else (once, tensor.stride(), 0), first._replace(shape=once, flags=0))
    # Copy the whole blob through one tensor of the group, whose storage must contain the blob, and whose elements must
    # divide it. Small elements divide it most often.
    begin = blob.data_ptr()
    for number in sorted(group, key=lambda number: tensors[number].itemsize):
        tensor = tensors[number]
        storage = tensor.untyped_storage()
        skip, rest = divmod(begin - tensor.data_ptr(), tensor.itemsize)
        is_inside = storage.data_ptr() <= begin and begin + size <= storage.data_ptr() + storage.nbytes()
        if is_inside and not rest and size % tensor.itemsize == 0:
            shape = (size // tensor.itemsize,)
            return Copy(number, (shape, (1,), skip), TensorView(dtype or tensor.dtype, shape, (1,), start, 0))
    raise InvalidArgument("tensors over arrays of several types overlap in memory, and cannot be published: clone one")


def looks(tensors: Sequence[Tensor]) -> list[list[Any]] | None:
    """Return all properties that copies depend on, except values. Return None if a tensor has no memory of its own."""
    try:
        return [
            *([*map(look, tensors)] for look in _LOOKS),
            [*map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))],
        ]
    except RuntimeError:
        return None


def groups_of(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of tensors that share memory, in groups."""
    spans: dict[torch.device, list[tuple[int, int, int]]] = {}
    for number, tensor in enumerate(tensors):
        if size := extent_of(tensor):
            start = tensor.data_ptr()
            spans.setdefault(tensor.device, []).append((start, start + size, number))
    return [group for each in spans.values() for _, _, group in joined(each) if len(group) > 1]


def named(tree: Any, name: str = "", kind: type = Tensor) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree of dictionaries, lists and tuples, with paths such as `layers.0.weight`."""
    if isinstance(tree, kind):
        yield name, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from named(part, f"{name}.{key}" if name else str(key), kind)


def bare(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory, without the conjugate and negative bits."""
    tensor = tensor.detach()
    if tensor.is_complex() and tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def place_of(tensor: Tensor) -> Any:
    """Return a key that identifies the elements of a tensor."""
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, flags


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # inference tensors do not count changes
        return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _taken_apart(tree: Any) -> tuple[bytes, list[Tensor]]:
    """Return the tree without its tensors, as bytes, and the tensors."""
    # A DTensor exists only if its module was imported. Another thread may be importing it just now, so it may lack the
    # class.
    distributed = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    try:
        values = [*named(tree)]
    except RecursionError:
        raise InvalidArgument("the published value contains itself, or is nested too deeply") from None
    for name, value in values:
        if is_lazy(value):
            raise InvalidArgument(f"{name!r} has no values yet: run the lazy module once before it is published")
        if isinstance(value, distributed):
            raise InvalidArgument(
                f"{name!r} is a DTensor, and this worker has only a part of it: publish it with a ShardedPublisher, or "
                "publish its full_tensor()"
            )
    body, tensors, references, _ = encode(tree, same_program=False)
    if references:
        raise InvalidArgument(f"published weights cannot contain references such as {references[0]!r}")
    return bytes(body), [*tensors]


def _identity(tensor: Tensor) -> Any:
    """Return a key that identifies a tensor, even after conversion from another class."""
    try:
        return place_of(tensor) if tensor.numel() else id(tensor)
    except RuntimeError:  # the tensor consists of others
        return id(tensor)


def _closed_up(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Return strides in the same order, without gaps between the elements."""
    order = sorted(range(len(shape)), key=lambda dimension: (-strides[dimension], dimension))
    closed = dict(zip(order, contiguous_strides([shape[dimension] for dimension in order]), strict=True))
    return tuple(closed[dimension] if strides[dimension] else 0 for dimension in range(len(shape)))


def _kind_of(tree: Any) -> Any:
    """Return a key that determines the body of a plain dictionary of plain tensors. Return None for other trees."""
    if type(tree) is not dict and type(tree) is not OrderedDict:
        return None
    values = tree.values()
    if not ({*map(type, values)} <= {Tensor} and {*map(type, tree)} <= {str}):
        return None
    # The body also has the attributes of tensors, and refers to a tensor that occurs twice by its first occurrence.
    if any(map(attrgetter("__dict__"), values)) or len({*map(id, values)}) < len(values):
        return None
    try:
        return type(tree), [*tree], pickle.dumps(vars(tree), 5) if type(tree) is OrderedDict else b""
    except Exception:
        return None


def _check(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        nature = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise InvalidArgument(
            f"a tensor{'' if tensor.is_nested else f' of shape {tuple(tensor.shape)}'} cannot be published, because "
            f"it is {'on the meta device' if tensor.is_meta else nature}: publish its parts as a dictionary of "
            "plain tensors"
        )
