"""Random trees of tensors that share memory in random ways, and assertions that two trees are the same."""

import random
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from telegrad._core.wire.tensors import distinct, extent, repeats
from telegrad.weights.tree_layout import Layout, Rounding, Snapshots, bare, named
from telegrad.weights.weight_version import Version

TYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.complex128, torch.int64, torch.int8, torch.uint16, torch.bool, torch.uint8),
]


class Maker:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._bases = [self._base() for _ in range(self._random.randint(1, 4))]
        self._last: Any = None

    def tree(self) -> Any:
        chance = self._random.random()
        if self._last is None or chance < 0.4:
            if chance < 0.2:
                self._bases[self._random.randrange(len(self._bases))] = self._base()
            self._last = self._tree()
        for base in self._bases:
            if self._random.random() < 0.7:
                raw, most = base.view(torch.uint8).view(-1), 2 if base.dtype is torch.bool else 256
                raw[torch.rand(raw.shape) < self._random.choice([0.01, 0.5])] ^= self._random.randrange(1, most)
        return self._last

    def _base(self) -> Tensor:
        rows, columns = self._random.choice([(1, 4), (6, 8), (40, 16)])
        dtype = self._random.choice(TYPES)
        most = 2 if dtype is torch.bool else 256  # bools are 0 or 1
        raw = torch.randint(0, most, (rows, columns * dtype.itemsize), dtype=torch.uint8)
        return torch.from_numpy(raw.numpy()).view(dtype) if self._random.random() < 0.2 else raw.view(dtype)

    def _tensor(self) -> Tensor:
        tensor = self._random.choice(self._bases)
        for _ in range(self._random.randint(0, 3)):
            tensor = self._random.choice(VIEWS)(self._random, tensor)
        return nn.Parameter(tensor, requires_grad=False) if self._random.random() < 0.1 else tensor

    def _tree(self) -> Any:
        known: list[Tensor] = []

        def leaf() -> Any:
            chance = self._random.random()
            if known and chance < 0.2:
                return self._random.choice(known)  # the same object
            if chance < 0.25:
                return self._random.choice(["text", 3, None])
            known.append(self._tensor())
            return known[-1]

        flat = {f"t{number}": leaf() for number in range(self._random.randint(0, 7))}
        if self._random.random() < 0.5:
            return flat
        return {**flat, "deep": [leaf(), (leaf(), {"inner": leaf()})]}


def _rows(rng: random.Random, tensor: Tensor) -> Tensor:
    if not tensor.dim():
        return tensor
    start = rng.randint(0, tensor.shape[0])
    return tensor[start : rng.randint(start, tensor.shape[0]) : rng.choice([1, 1, 2])]


def _columns(rng: random.Random, tensor: Tensor) -> Tensor:
    return (
        tensor[..., rng.randrange(tensor.shape[-1]) :: rng.choice([1, 3])]
        if tensor.dim() and tensor.numel()
        else tensor
    )


def _as_bytes(_: random.Random, tensor: Tensor) -> Tensor:
    if tensor.dim() and tensor.stride(-1) == 1 and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.view(torch.uint8)
    return tensor


VIEWS: list[Callable[[random.Random, Tensor], Tensor]] = [
    _rows,
    _columns,
    lambda rng, tensor: tensor[rng.randrange(tensor.shape[0])] if tensor.dim() and tensor.shape[0] else tensor,
    lambda _, tensor: tensor.transpose(0, -1) if tensor.dim() > 1 else tensor,
    lambda rng, tensor: tensor.expand(rng.randint(1, 3), *tensor.shape) if tensor.dim() < 3 else tensor,
    lambda _, tensor: tensor.unfold(0, 2, 1) if 1 <= tensor.dim() < 3 and tensor.shape[0] > 2 else tensor,
    _as_bytes,
    lambda _, tensor: tensor.conj(),
    lambda rng, tensor: rng.choice([tensor.conj().imag, tensor.real, tensor.imag]) if tensor.is_complex() else tensor,
    lambda _, tensor: tensor.detach(),
]


_layouts: WeakKeyDictionary[Snapshots, Layout] = WeakKeyDictionary()  # the last layout that a reader received


def filled(layouts: Snapshots, tree: Any) -> tuple[Layout, Tensor]:
    snapshot = layouts.of(tree)
    memory = torch.randint(0, 256, (snapshot.layout.size,), dtype=torch.uint8)
    snapshot.fill(memory)
    return snapshot.layout, memory


def published(tree: Any, layouts: Snapshots | None = None, rounding: Rounding = None) -> Version:
    """Return a version as a reader gets it, who knows the layout if the previous version from `layouts` had it."""
    layouts = layouts or Snapshots(rounding)
    layout, memory = filled(layouts, tree)
    known = _layouts.get(layouts)
    if known is None or known.number != layout.number:
        known = _layouts[layouts] = Layout(layout.number, layout.description)
    return Version(1, known, memory)


def bits(tensor: Tensor) -> Tensor:
    row = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return row.view(-1).view(torch.uint8)


def assert_equal(found: Any, wanted: Any) -> None:
    """Assert that values, types, strides and everything else in the trees are the same, bit by bit."""
    mine, theirs = dict(named(found)), dict(named(wanted))
    assert [*mine] == [*theirs]
    assert _without(found) == _without(wanted)
    for name, tensor in theirs.items():
        own = mine[name]
        assert type(own) is type(tensor)
        assert (own.dtype, own.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(own), bits(tensor)), name
        if keeps_strides(tensor):
            assert own.stride() == tensor.stride(), name


def keeps_strides(tensor: Tensor) -> bool:
    once, strides = distinct(tensor.shape, tensor.stride()), tensor.stride()
    return repeats(once, strides) or 2 * torch.Size(once).numel() >= extent(tensor.shape, strides)


def assert_shared_alike(found: Any, wanted: Any, seed: int) -> None:
    """Assert that a write to an element of either tree shows in the same tensors of both."""
    rng = random.Random(seed)
    mine, theirs = dict(named(found)), dict(named(wanted))
    for name, tensor in theirs.items():
        if tensor.numel():
            index = tuple(rng.randrange(length) for length in tensor.shape)
            for each in (tensor, mine[name]):
                bare(each)[index].reshape(1).view(torch.uint8).bitwise_xor_(1)  # valid for bools, too
            for other, value in theirs.items():
                assert torch.equal(bits(mine[other]), bits(value)), (name, index, other)


def _without(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return "a tensor"
    if isinstance(tree, dict):
        return {name: _without(value) for name, value in tree.items()}
    return type(tree)(map(_without, tree)) if isinstance(tree, list | tuple) else tree
