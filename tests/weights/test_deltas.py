"""Deltas are exact, small, and refused where they do not fit."""

from __future__ import annotations

import mmap
import os
import random
import zlib

import pytest
import torch
from torch import Tensor

from telegrad.errors import DeltaRefused, UsageError
from telegrad.weights import deltas
from telegrad.weights.deltas import HEAD, MARK, PIECE, PLANES, SAME, SPARSE, SUMMED, WHOLE, apply, encode
from telegrad.wire.tensors import memory

SEED = os.environ.get("TELEGRAD_SEED")
SEEDS = [int(SEED)] if SEED else range(150)
MANY_SEEDS = [int(SEED)] if SEED else range(150, 5_000)
DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def filled(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random bits, with whatever NaN these make."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def changed(tensor: Tensor, share: float) -> Tensor:
    """A copy with new bits in some of the elements."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().clone().view(-1)
    integers = flat.view(INTEGERS[min(flat.itemsize, 8)])
    where = torch.rand(len(integers)) < share
    other = filled(tensor.dtype, len(flat)).view(integers.dtype)
    integers[where] = other[where]
    return flat.view(tensor.shape)


def check(old: list[Tensor], new: list[Tensor]) -> Tensor:
    """The delta, once it has proved to lead from one to the other."""
    delta = encode(old, new)
    here = [tensor.detach().resolve_conj().resolve_neg().contiguous().clone() for tensor in old]
    apply(delta, here)
    for one, other in zip(here, new, strict=True):
        assert torch.equal(bits(one), bits(other))
    return delta


def ways(delta: Tensor, pieces: int) -> list[int]:
    """The ways that the pieces take, where they are all of one element."""
    found, at = [], HEAD.size
    for _ in range(pieces):
        way, *_ = deltas.PIECE_HEAD.unpack_from(memory(delta), at)
        found.append(way)
        at += deltas.PIECE_HEAD.size
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0, 0.001, 0.02, 0.3, 1])
def test_every_type_comes_out_as_it_went_in(dtype: torch.dtype, share: float) -> None:
    torch.manual_seed(1)
    old = filled(dtype, 300, 70)
    check([old], [changed(old, share)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_percent_take_at_least_ten_times_fewer_bytes(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    old = filled(dtype, 1000, 1000)
    delta = check([old], [changed(old, 0.02)])
    assert len(delta) * 10 <= old.nbytes


def test_what_has_not_changed_takes_next_to_nothing() -> None:
    old = [torch.randn(3000, 1000), torch.randn(5)]
    assert len(check(old, [tensor.clone() for tensor in old])) < old[0].nbytes // 50_000


def test_bits_count_not_values() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000, 0], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, 0x7FC00001, 0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    assert ways(check([nan], [nan.clone()]), 1) == [SAME]
    assert ways(check([nan], [other]), 1) != [SAME]
    zero, negative = torch.zeros(100), torch.zeros(100)
    negative[70] = -0.0
    assert ways(check([zero], [negative]), 1) != [SAME]


def test_each_piece_goes_in_the_way_that_takes_the_fewest_bytes() -> None:
    torch.manual_seed(3)
    weights = torch.randn(PIECE, dtype=torch.float64)
    old = weights.bfloat16()
    sparse = old.clone()
    sparse[::1000] = 7
    nearby = (weights * (1 + 1e-3 * torch.randn(PIECE, dtype=torch.float64))).bfloat16()
    for new, way in ((old.clone(), SAME), (sparse, SPARSE), (nearby, PLANES), (filled(torch.bfloat16, PIECE), WHOLE)):
        assert ways(check([old], [new]), 1) == [way]


def test_small_steps_of_all_weights_take_fewer_bytes_too() -> None:
    torch.manual_seed(4)
    weights = torch.randn(PIECE, dtype=torch.float64)
    after = weights * (1 + 1e-4 * torch.randn(PIECE, dtype=torch.float64))
    for dtype, fewer in ((torch.float32, 2), (torch.bfloat16, 30)):
        assert len(check([weights.to(dtype)], [after.to(dtype)])) * fewer < PIECE * dtype.itemsize


@pytest.mark.parametrize("at", [[0], [255], [256], [65_535], [65_536], [PIECE - 1], [0, 510, 511], [70_000, 200_000]])
def test_elements_far_apart(at: list[int]) -> None:
    old = torch.randn(PIECE)
    new = old.clone()
    new[at] += 1
    assert len(check([old], [new])) < 500


def test_empty_tensors_scalars_and_no_tensor_at_all() -> None:
    check([], [])
    check([torch.empty(0), torch.empty(3, 0, dtype=torch.int8)], [torch.empty(0), torch.empty(3, 0, dtype=torch.int8)])
    check([torch.tensor(3), torch.tensor(1.5)], [torch.tensor(4), torch.tensor(1.5)])


def test_sources_of_any_strides() -> None:
    torch.manual_seed(5)
    grid = torch.randn(60, 50)
    old = [grid.t(), grid[::2, ::3], grid[3:4].expand(7, 50), torch.randn(9, dtype=torch.complex64).conj()]
    old.append(torch.randn(9, dtype=torch.complex64).conj().imag)  # its bit for the sign is set
    check(old, [changed(tensor, 0.1) for tensor in old])
    check([changed(tensor, 0.1) for tensor in old], old)


def test_parameters_keep_their_graph_out_of_it() -> None:
    weight = torch.nn.Parameter(torch.randn(5))
    after = torch.randn(5)
    delta = encode([weight], [after])
    apply(delta, [weight])
    assert torch.equal(weight, after)
    assert weight.requires_grad


def test_many_small_tensors_share_pieces() -> None:
    torch.manual_seed(6)
    old = [
        torch.randn(random.Random(n).randrange(400), dtype=[torch.float32, torch.bfloat16][n % 2]) for n in range(1000)
    ]
    new = [changed(tensor, 0.02) for tensor in old]
    assert len(check(old, new)) * 15 < sum(tensor.nbytes for tensor in old)


def test_tensors_across_the_bounds_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "PIECE", 64)
    torch.manual_seed(7)
    old = [torch.randn(size) for size in (1, 62, 1, 64, 65, 200, 0, 3)]
    check(old, [changed(tensor, 0.2) for tensor in old])


def run_seed(seed: int) -> None:
    """Random tensors, random changes; then random damage."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    old, new = [], []
    for _ in range(chance.randrange(6)):
        shape = [chance.choice([0, 1, 2, 7, 33, 90]) for _ in range(chance.randrange(4))]
        tensor = filled(chance.choice(DTYPES), *shape) if chance.random() < 0.7 else torch.randn(shape)
        if chance.random() < 0.3 and tensor.dim() > 1:
            tensor = tensor.transpose(0, 1)
        old.append(tensor)
        new.append(changed(tensor, chance.choice([0, 0.0001, 0.01, 0.1, 0.5, 1])))
    delta = check(old, new)
    for _ in range(5):
        damaged = delta.clone()
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(SUMMED, len(damaged))] = chance.randrange(256)
        if chance.random() < 0.3:
            damaged = damaged[: chance.randrange(len(damaged))]
        if chance.random() < 0.3:
            damaged = torch.cat([damaged, damaged[-chance.randrange(1, 40) :]])
        if len(damaged) >= HEAD.size and chance.random() < 0.8:  # as one would who means harm
            digest = bytes(damaged[SUMMED : HEAD.size].tolist())
            HEAD.pack_into(memory(damaged), 0, MARK, zlib.crc32(memory(damaged)[SUMMED:]), digest)
        here = [tensor.contiguous().clone() for tensor in old]
        try:
            apply(damaged, here)
        except DeltaRefused:
            continue
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(here, new, strict=True))


def run_seeds(seeds: list[int] | range) -> None:
    for seed in seeds:
        try:
            run_seed(seed)
        except Exception as error:
            raise AssertionError(f"SEED={seed} {error!r}") from error


def test_random_tensors_and_damage() -> None:
    run_seeds(SEEDS)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_many_random_tensors_and_damage() -> None:
    run_seeds(MANY_SEEDS)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_more_elements_than_31_bits_count() -> None:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # what is never written to takes no memory
    old, new = (torch.frombuffer(mmap.mmap(-1, (1 << 31) + 9, private), dtype=torch.bool) for _ in range(2))
    new[-1] = new[1 << 30] = True
    delta = encode([old], [new])
    apply(delta, [old])
    assert old[-1]
    assert old[1 << 30]
    assert int(old.count_nonzero()) == 2
    assert len(delta) < 1 << 20


def test_what_is_no_delta_is_refused() -> None:
    tensors = [torch.randn(9)]
    for foreign in (
        torch.empty(0, dtype=torch.uint8),
        torch.zeros(40, dtype=torch.uint8),
        torch.zeros(40),
        torch.zeros(4, 40, dtype=torch.uint8),
    ):
        with pytest.raises(DeltaRefused, match="this is no delta"):
            apply(foreign, tensors)


def test_a_delta_of_other_tensors_is_refused() -> None:
    old, new = torch.randn(6, 4), torch.randn(6, 4)
    delta = encode([old], [new])
    for other in ([old.view(4, 6)], [old.view(torch.int32)], [old, old], []):
        with pytest.raises(DeltaRefused, match="other types or shapes"):
            apply(delta, other)
    with pytest.raises(UsageError, match="same number"):
        encode([old], [new.view(24)])
    with pytest.raises(UsageError, match="contiguous"):
        apply(delta, [torch.randn(4, 6).t()])


@pytest.mark.parametrize("share", [0, 0.01])
def test_a_delta_of_another_version_is_refused(share: float) -> None:
    old = torch.randn(3, 40_000)
    delta = encode([old], [changed(old, share)])
    old[2, 7] += 1
    with pytest.raises(DeltaRefused, match="other values"):
        apply(delta, [old])


def test_a_delta_that_is_damaged_is_refused_before_anything_changes() -> None:
    old = torch.randn(3, 4000)
    delta = encode([old], [changed(old, 0.1)])
    before = old.clone()
    for at in range(SUMMED, len(delta), 97):
        delta[at] ^= 4
        with pytest.raises(DeltaRefused, match="damaged"):
            apply(delta, [old])
        delta[at] ^= 4
    assert torch.equal(old, before)


def test_a_delta_can_lie_anywhere() -> None:
    old, new = torch.randn(5000), torch.randn(5000)
    delta = encode([old], [new])
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), delta])[3:]
    scattered = torch.stack([delta, delta], 1)[:, 0]
    for odd in (shifted, scattered):
        here = old.clone()
        apply(odd, [here])
        assert torch.equal(here, new)
