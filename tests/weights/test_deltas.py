"""Deltas are exact and small, and refused if they do not fit; other hosts get them, or whole pieces."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad._core.worker.current import Worker
from telegrad.errors import DeltaRefused, UsageError
from telegrad.weights import Publisher, Subscriber, publisher, subscriber, weight_service
from telegrad.weights.deltas import (
    MAX_SKIPPED,
    PLANES,
    SAME,
    SPARSE,
    WHOLE,
    Delta,
    DeltaCache,
    DeltaEncoder,
    apply,
    apply_deltas,
    encode,
)
from telegrad.weights.transfer import Refused, VersionInfo, WeightPiece
from telegrad.weights.tree_layout import Layout, Snapshots
from tests.cluster import PATIENCE, wait_until
from tests.seeds import by_day_and_night, run_each
from tests.weights.test_weights import on, on_hosts

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECE = 4096
SIZE = 50_000
LONG = 1 << 18  # elements

Sent = list[tuple[int, int]]  # per piece: the version of its base, and the bytes sent


# Rows


def filled(dtype: torch.dtype, count: int) -> Tensor:
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def changed(row: Tensor, share: float) -> Tensor:
    return torch.where(torch.rand(len(row)) < share, filled(row.dtype, len(row)), row)


def check(old: list[Tensor], new: list[Tensor], small: bool = True) -> Delta:
    delta = encode(old, new, small)
    here = [row.clone() for row in old]
    apply(delta, here)
    assert all(map(torch.equal, here, new))
    return delta


@pytest.mark.parametrize("dtype", INTEGERS.values(), ids=str)
@pytest.mark.parametrize(("share", "fewer"), [(0, 1 << 20), (0.001, 100), (0.02, 10), (0.3, 1), (1, 1)])
def test_bytes_of_deltas(dtype: torch.dtype, share: float, fewer: int) -> None:
    torch.manual_seed(1)
    old = filled(dtype, LONG)
    assert check([old], [changed(old, share)]).size * fewer <= old.nbytes


def test_a_row_is_encoded_in_the_smallest_encoding() -> None:
    torch.manual_seed(3)
    weights = torch.randn(LONG, dtype=torch.float64)
    old = weights.bfloat16()
    sparse = old.clone()
    sparse[::1000] = 7
    nearby = (weights * (1 + 1e-3 * torch.randn(LONG, dtype=torch.float64))).bfloat16()
    for new, small, fast in (
        (old, SAME, SAME),
        (sparse, SPARSE, SPARSE),
        (nearby, PLANES, SPARSE),
        (filled(torch.bfloat16, LONG), WHOLE, WHOLE),
    ):
        rows = [old.view(torch.int16)], [new.view(torch.int16)]
        assert [check(*rows, each).heads[0][0] for each in (True, False)] == [small, fast]


def test_small_steps_of_all_weights_take_fewer_bytes() -> None:
    torch.manual_seed(4)
    weights = torch.randn(LONG, dtype=torch.float64)
    after = weights * (1 + 1e-4 * torch.randn(LONG, dtype=torch.float64))
    for dtype, fewer in ((torch.float32, 2), (torch.bfloat16, 30)):
        old, new = (each.to(dtype).view(INTEGERS[dtype.itemsize]) for each in (weights, after))
        assert check([old], [new]).size * fewer < old.nbytes


@pytest.mark.parametrize("at", [[0], [255], [256], [65_535], [65_536], [LONG - 1], [0, 510, 511], [70_000, 200_000]])
def test_elements_far_apart(at: list[int]) -> None:
    old = filled(torch.int32, LONG)
    new = old.clone()
    new[at] += 1
    assert check([old], [new]).size < 500


def run_seed(seed: int) -> None:
    """Encode random rows and changes; then decode randomly damaged deltas, as an attacker might send them."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    old = [
        filled(chance.choice([*INTEGERS.values()]), chance.choice([1, 2, 7, 33, 5000]))
        for _ in range(chance.randrange(6))
    ]
    new = [changed(row, chance.choice([0, 0.0001, 0.01, 0.1, 0.5, 1])) for row in old]
    delta = check(old, new, chance.random() < 0.7)
    for _ in range(5):
        heads, tensors = [*delta.heads], [tensor.clone() for tensor in delta.tensors]
        for _ in range(chance.randrange(1, 4)):
            way = chance.randrange(4)
            if way == 0 and heads:
                place, field = chance.randrange(len(heads)), chance.randrange(3)
                head = [*heads[place]]
                head[field] = chance.choice([0, 1, 2, 3, 9, head[field] ^ 1])
                heads[place] = head[0], head[1], head[2]
            elif way == 1 and heads:
                heads.pop(chance.randrange(len(heads)))
            elif tensors:
                place = chance.randrange(len(tensors))
                if way == 2 and tensors[place].nbytes:
                    tensors[place].view(torch.uint8)[chance.randrange(tensors[place].nbytes)] = chance.randrange(256)
                elif way == 3:
                    tensors[place] = chance.choice([tensors[place][:-1], tensors[place].view(torch.uint8)])
        here = [row.clone() for row in old]
        try:
            apply(Delta(heads, tensors), here)
        except DeltaRefused:
            continue
        rights = [torch.equal(one, other) for one, other in zip(here, new, strict=True)]
        assert all(rights) or any(head[1] != good[1] for head, good in zip(heads, delta.heads, strict=True))


@by_day_and_night(range(150), range(150, 5_000))
def test_random_rows_and_damage(seeds: range) -> None:
    run_each(seeds, run_seed)


# Versions


def described(tree: Any) -> tuple[Layout, VersionInfo, Tensor]:
    snapshot = Snapshots().of(tree)
    layout = snapshot.layout
    memory = torch.zeros(layout.size, dtype=torch.uint8)
    snapshot.fill(memory)
    return layout, VersionInfo(layout.number, layout.description, layout.size, PIECE), memory


def tree(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "weight": torch.randn(SIZE),
        "half": torch.randn(70, 30).bfloat16(),
        "none": torch.empty(0),
        "steps": torch.tensor(3),
        "complex": torch.randn(99, dtype=torch.complex128),
        **{f"small.{number}": torch.randn(number) for number in range(40)},
    }


def nudged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state with 2% of its values changed."""
    new = {name: value.clone() for name, value in state.items()}
    for value in new.values():
        value[torch.rand(value.shape) < 0.02] += 1
    return new


def test_pieces_are_rebuilt_from_older_ones() -> None:
    layout, info, old = described(tree())
    _, _, new = described(nudged(tree()))
    _, _, other = described(tree(1))
    found = DeltaEncoder("fast").encode(layout, info, old, new)
    assert sum(delta.size for delta in found.values()) * 5 < info.size
    made = torch.zeros_like(new)
    for piece in range(info.pieces):
        if piece in found:
            with pytest.raises(DeltaRefused, match="values other than those"):
                apply_deltas(layout, info, other, made, piece, [found[piece]])
            apply_deltas(layout, info, old, made, piece, [found[piece]])
        else:
            span = slice(piece * PIECE, (piece + 1) * PIECE)
            made[span] = new[span]
    assert torch.equal(made, new)


def test_after_large_changes_no_deltas_are_tried_for_a_while() -> None:
    layout, info, old = described(tree())
    _, _, new = described(tree(1))
    _, _, near = described(nudged(tree()))
    encoder = DeltaEncoder("fast")
    assert encoder.encode(layout, info, old, new) == {}
    assert [bool(encoder.encode(layout, info, old, near)) for _ in range(3)] == [False, True, True]
    for _ in range(3 * MAX_SKIPPED):
        encoder.encode(layout, info, old, new)
    assert any(encoder.encode(layout, info, old, near) for _ in range(MAX_SKIPPED + 1))
    assert DeltaEncoder("off").encode(layout, info, old, near) == {}


def test_the_deltas_of_the_last_versions_are_kept() -> None:
    cache, delta = DeltaCache(), Delta([], [torch.zeros(10, dtype=torch.uint8)])
    for number in range(2, 9):
        for piece in range(2):
            cache.keep(number, piece, delta, 100)
    assert [len(cache.between(base, 8, 1, 1000)) for base in range(8)] == [0, 0, 0, 5, 4, 3, 2, 1]
    assert cache.between(3, 8, 1, 50) == []  # deltas as large as the whole piece
    assert cache.between(7, 8, 2, 1000) == []
    assert cache.between(7, 9, 1, 1000) == []


# Between workers


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    seen: Sent = []
    send = weight_service.WeightsService.send

    def watched(self: Any, to: Any, envelope: Any) -> None:
        if isinstance(envelope.message, WeightPiece):
            seen.append((envelope.message.base, sum(tensor.nbytes for tensor in envelope.tensors)))
        send(self, to, envelope)

    monkeypatch.setattr(weight_service.WeightsService, "send", watched)
    return seen


def begin(workers: list[Worker], state: Any, **options: Any) -> tuple[Publisher, list[Subscriber]]:
    policy = on(workers[0], Publisher, "policy", state, **options)
    policy.publish()
    readers = [on(worker, Subscriber, "w0", "policy") for worker in workers[1:]]
    for reader in readers:
        assert reader.newest().number == 1
    return policy, readers


def assert_is(version: Any, state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        assert torch.equal(version.state[name], value), name


def test_other_hosts_get_deltas(monkeypatch: pytest.MonkeyPatch, sent: Sent) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B", "C") as workers:
        policy, readers = begin(workers, state)
        whole = sum(size for _, size in sent)
        for number in (2, 3):
            sent.clear()
            state |= nudged(state)
            policy.publish()
            for reader in readers:
                assert_is(reader.at_least(number), state)
            assert {base for base, _ in sent} == {number - 1}
            assert sum(size for _, size in sent) * 10 < whole


def test_a_reader_several_versions_behind_gets_all_deltas(monkeypatch: pytest.MonkeyPatch, sent: Sent) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B") as workers:
        policy, (reader,) = begin(workers, state)
        endpoint = reader._endpoint
        hears, endpoint.take = endpoint.take, lambda *_: None  # the reader misses some versions
        for _ in range(3):
            state |= nudged(state)
            policy.publish()
        endpoint.take = hears
        sent.clear()
        endpoint.join()
        assert_is(reader.at_least(4), state)
        assert {base for base, _ in sent} == {1}


def test_a_piece_whose_delta_does_not_fit_is_fetched_whole(monkeypatch: pytest.MonkeyPatch, sent: Sent) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B") as workers:
        policy, (reader,) = begin(workers, state)
        reader._endpoint.memory[1][8] ^= 1  # a flipped bit at the reader
        sent.clear()
        state |= nudged(state)
        policy.publish()
        assert_is(reader.at_least(2), state)
        assert {base for base, _ in sent} >= {0, 1}


class OnePiece:
    """A version that is sent as one delta; its pieces that arrive are noted, and may be handled in another way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: list[Worker]) -> None:
        self.state = {"weight": torch.randn(SIZE)}
        monkeypatch.setattr(publisher, "PIECE", 1 << 20)
        self._policy, (self.reader,) = begin(workers, self.state)
        self.state |= nudged(self.state)
        self.arrived: list[tuple[Any, ...]] = []
        self.endpoint = self.reader._endpoint
        self.take = self.endpoint.take
        self._patch = monkeypatch

    def publish(self, handle: Callable[..., None], before: Callable[[], None]) -> None:
        """Publish. `handle` gets each piece that arrives; `before` runs before the deltas of a piece are applied."""

        def apply_later(*args: Any) -> None:
            before()
            apply_deltas(*args)

        def take(*message: Any) -> None:
            is_piece = isinstance(message[1], WeightPiece)
            self.arrived += [message] * is_piece
            (handle if is_piece else self.take)(*message)

        self._patch.setattr(self.endpoint, "take", take)
        self._patch.setattr(subscriber, "apply_deltas", apply_later)
        self._policy.publish()


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnePiece]:
    with on_hosts(monkeypatch, "A", "B") as workers:
        yield OnePiece(monkeypatch, workers)


def test_a_complete_version_is_not_written_to(one: OnePiece) -> None:
    """A piece arrives again while a thread stores it, and another thread handles the second one."""
    complete: list[bool] = []

    def twice() -> None:
        if len(one.arrived) == 1:
            one.endpoint.take(*one.arrived[0])
        complete.append(one.endpoint.machine.store.is_complete(2))

    one.publish(one.take, twice)
    assert_is(one.reader.at_least(2), one.state)
    assert complete
    assert not any(complete)


def test_a_piece_of_memory_that_was_dropped_is_not_counted(one: OnePiece) -> None:
    """The version is opened again while a thread still stores a piece of its former memory."""
    stored = threading.Event()

    def first(*message: Any) -> None:
        if len(one.arrived) == 1:
            one.take(*message)
            stored.set()

    def opened_again() -> None:
        if len(one.arrived) == 1:
            one.take(one.arrived[0][0], Refused(2, 2, 2), ())
            wait_until(lambda: len(one.arrived) > 1)

    one.publish(first, opened_again)
    assert stored.wait(PATIENCE)
    assert not one.endpoint.machine.store.is_complete(2)
    one.take(*one.arrived[-1])
    assert_is(one.reader.at_least(2), one.state)


def test_a_piece_that_could_not_be_stored_may_arrive_again(one: OnePiece) -> None:
    def again(*message: Any) -> None:
        with pytest.raises(MemoryError) if len(one.arrived) == 1 else contextlib.nullcontext():
            one.take(*message)
        if len(one.arrived) == 1:
            one.endpoint.take(*message)

    def fails_once() -> None:
        if len(one.arrived) == 1:
            raise MemoryError

    one.publish(again, fails_once)
    assert_is(one.reader.at_least(2), one.state)
    assert len(one.arrived) == 2


def test_a_new_layout_is_sent_whole(monkeypatch: pytest.MonkeyPatch, sent: Sent) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B") as workers:
        policy, (reader,) = begin(workers, state)
        sent.clear()
        state["bias"] = torch.ones(3)
        policy.publish()
        assert_is(reader.at_least(2), state)
        assert {base for base, _ in sent} == {0}


def test_without_other_hosts_no_deltas_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_hosts(monkeypatch, "A", "A") as workers:
        monkeypatch.setattr(DeltaEncoder, "encode", lambda *_: pytest.fail("looked for changes"))
        policy, (reader,) = begin(workers, {"weight": torch.ones(SIZE)})
        policy.publish()
        assert reader.at_least(2).number == 2


@pytest.mark.parametrize("off", [False, True])
def test_deltas_can_be_disabled(monkeypatch: pytest.MonkeyPatch, sent: Sent, off: bool) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B") as workers:
        policy, (reader,) = begin(workers, state, deltas="off" if off else "small")
        state |= nudged(state)
        policy.publish()
        assert_is(reader.at_least(2), state)
        wait_until(lambda: bool(sent))
        assert {base for base, _ in sent} == {0} if off else {0, 1}
        with pytest.raises(UsageError, match="'sometimes'"):
            on(workers[0], Publisher, "other", state, deltas="sometimes")


# Rounded copies


def test_rounded_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {"weight": torch.randn(SIZE), "steps": torch.tensor(3), "inner": [torch.randn(3)]}
    with on_hosts(monkeypatch, "A", "A", "B") as workers:
        policy, readers = begin(workers, state, dtype=torch.bfloat16)
        for number in (2, 3):
            state["weight"] += 1
            policy.publish()
            for reader in readers:
                found = reader.at_least(number).state
                assert torch.equal(found["weight"], state["weight"].bfloat16())
                assert torch.equal(found["steps"], state["steps"])
                assert torch.equal(found["inner"][0], state["inner"][0].bfloat16())
        model = torch.nn.Linear(1, 1)
        own = on(workers[0], Publisher, "named", model, dtype=lambda name, _: torch.float16 if name == "bias" else None)
        own.publish()
        found = on(workers[2], Subscriber, "w0", "named").newest()
        assert [value.dtype for value in found.state.values()] == [torch.float32, torch.float16]
        found.load_into(model)
