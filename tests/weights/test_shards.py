"""The plan of copies from owners to readers, compared with brute force."""

import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.resharding import _shards_get_overlap_region_wrt_saved_tensor

from telegrad.errors import UsageError
from telegrad.weights.shards import Box, Part, is_within, overlap, plan, slices, within, without
from tests.seeds import by_day_and_night, run_each


def box(*spans: tuple[int, int]) -> Box:
    return Box(tuple(start for start, _ in spans), tuple(end - start for start, end in spans))


def test_a_part_with_several_owners_comes_from_the_first() -> None:
    whole = Part("w", box((0, 9)))
    assert {copy.owner for copy in plan({"b": [whole], "a": [whole]}, [whole])} == {"b"}
    near = {"near": [Part("w", box((3, 5)))], "far": [whole]}
    assert [(copy.owner, copy.target) for copy in plan(near, [whole])] == [
        ("near", box((3, 5))),
        ("far", box((0, 3))),
        ("far", box((5, 9))),
    ]


def test_only_boxes_inside_of_the_tensor_are_accepted() -> None:
    assert is_within(Box((1,), (2,)), (3,))
    for wrong in (Box((0.5,), (1,)), Box((0, 0), (1,)), Box((-1,), (2,)), Box((2,), (2,))):  # type: ignore[arg-type]
        assert not is_within(wrong, (3,))


def test_missing_parts_are_an_error() -> None:
    with pytest.raises(
        UsageError, match=r"no workers hold all of 'w': the part at offsets \(3,\) with sizes \(2,\).*'a'"
    ):
        plan({"a": [Part("w", box((0, 3)))]}, [Part("w", box((0, 5)))])
    with pytest.raises(UsageError, match="no workers"):
        plan({}, [Part("w", box((0, 5)))])
    with pytest.raises(UsageError, match="'w' has 2 dimensions on 'a', but 1"):
        plan({"a": [Part("w", box((0, 3), (0, 3)))]}, [Part("w", box((0, 5)))])


def random_box(chance: random.Random, shape: list[int]) -> Box:
    spans = [sorted((chance.randint(0, size), chance.randint(0, size))) for size in shape]
    return box(*((start, end) for start, end in spans))


def split(chance: random.Random, whole: Box) -> list[Box]:
    parts = [whole]
    for _ in range(chance.randrange(6)):
        cut = random_box(chance, [*whole.sizes])
        parts = [piece for part in parts for piece in (*without(part, cut), overlap(part, cut)) if piece is not None]
    return parts


def run_seed(seed: int) -> None:
    """Plan copies of random parts from random owners, with replicas; each wanted element is copied once."""
    chance = random.Random(seed)
    owners = [f"w{number}" for number in range(chance.randint(1, 5))]
    owned: dict[str, list[Part]] = {owner: [] for owner in owners}
    wholes, wanted = {}, []
    for name in ("a", "b", "c")[: chance.randint(1, 3)]:
        shape = [chance.randint(0, 7) for _ in range(chance.randrange(4))]
        wholes[name] = torch.arange(torch.Size(shape).numel()).view(shape)
        for _ in range(chance.randint(1, 2)):
            for piece in split(chance, Box((0,) * len(shape), tuple(shape))):
                owned[chance.choice(owners)].append(Part(name, piece))
        wanted += [Part(name, random_box(chance, shape)) for _ in range(chance.randrange(4))]
    results = [torch.full(part.box.sizes, -1) for part in wanted]
    for copy in plan(owned, wanted):
        theirs = owned[copy.owner][copy.owned]
        source = wholes[theirs.name][slices(theirs.box)][slices(copy.source)]
        target = results[copy.wanted][slices(copy.target)]
        assert source.shape == target.shape
        assert bool((target == -1).all()), "twice"
        target.copy_(source)
    for part, result in zip(wanted, results, strict=True):
        assert torch.equal(result, wholes[part.name][slices(part.box)])
    check_overlaps(chance)


def check_overlaps(chance: random.Random) -> None:
    """Compare overlaps of random boxes with those of `torch.distributed.checkpoint`."""
    shape = [chance.randint(1, 6) for _ in range(chance.randint(1, 3))]
    one, other = random_box(chance, shape), random_box(chance, shape)
    if 0 in one.sizes + other.sizes:
        assert overlap(one, other) is None
        return
    chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in (one, other)]
    regions = _shards_get_overlap_region_wrt_saved_tensor(*chunks)
    both = overlap(one, other)
    if both is None:
        assert any(length <= 0 for *_, length in regions)
    else:
        assert [(dimension, start, length) for dimension, start, _, length in regions] == [
            (dimension, start, length)
            for dimension, (start, length) in enumerate(zip(within(both, one).offsets, both.sizes, strict=True))
        ]
        assert [at for _, _, at, _ in regions] == [*within(both, other).offsets]


@by_day_and_night(range(300), range(300, 10_000))
def test_each_wanted_element_is_copied_once(seeds: range) -> None:
    run_each(seeds, run_seed)
