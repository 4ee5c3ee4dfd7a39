"""Other hosts get what has changed, and all of it where that is not enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad.errors import DeltaRefused, UsageError
from telegrad.rpc.worker import Worker
from telegrad.weights import Publisher, Subscriber, desk, publisher
from telegrad.weights.arranging import Layouts
from telegrad.weights.changes import RESTS, Changes, Finder, part, renew
from telegrad.weights.layout import Layout
from telegrad.weights.words import About, Piece
from tests.weights.test_weights import eventually, on, on_hosts

PIECE = 4096
SIZE = 50_000

Sent = list[tuple[int, int]]  # per piece: its base, and the bytes that went along


def described(tree: Any) -> tuple[Layout, About, Tensor]:
    arranged = Layouts().of(tree)
    layout = arranged.layout
    memory = torch.zeros(layout.size, dtype=torch.uint8)
    arranged.fill(memory)
    return layout, About(layout.number, layout.description, layout.size, PIECE), memory


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
    """With 2% of the values changed."""
    new = {name: value.clone() for name, value in state.items()}
    for value in new.values():
        value[torch.rand(value.shape) < 0.02] += 1
    return new


# What was found, and what is kept of it


def test_pieces_are_made_of_older_ones() -> None:
    layout, about, old = described(tree())
    _, _, new = described(nudged(tree()))
    found = Finder("fast").find(layout, about, old, new)
    assert sum(map(len, found.values())) * 5 < about.size
    made = torch.zeros_like(new)
    for piece in range(about.pieces):
        if piece in found:
            renew(layout, about, old, made, piece, [found[piece]])
        else:
            span = slice(piece * PIECE, (piece + 1) * PIECE)
            made[span] = new[span]
    made_tree, new_tree = layout.tree(made), layout.tree(new)
    assert all(torch.equal(made_tree[name], value) for name, value in new_tree.items())


def test_a_piece_of_another_base_is_refused() -> None:
    layout, about, old = described(tree())
    _, _, new = described(nudged(tree()))
    found = Finder("fast").find(layout, about, old, new)
    _, _, other = described(tree(1))
    with pytest.raises(DeltaRefused):
        renew(layout, about, other, torch.zeros_like(new), 3, [found[3]])


def test_the_parts_of_pieces_are_all_there_is() -> None:
    layout, about, memory = described(tree())
    parts = [each for piece in range(about.pieces) for each in part(layout, about, memory, piece)]
    assert sum(each.nbytes for each in parts) == sum(each.nbytes for each in tree().values())


def test_where_nearly_all_has_changed_nothing_is_looked_for_in_a_while() -> None:
    layout, about, old = described(tree())
    _, _, new = described(tree(1))
    _, _, near = described(nudged(tree()))
    finder = Finder("fast")
    assert finder.find(layout, about, old, new) == {}
    rests = [bool(finder.find(layout, about, old, near)) for _ in range(3)]
    assert rests == [False, True, True]
    for _ in range(3 * RESTS):
        finder.find(layout, about, old, new)
    assert any(finder.find(layout, about, old, near) for _ in range(RESTS + 1))
    assert Finder("off").find(layout, about, old, near) == {}


def test_bits_are_deflated_where_that_is_asked_for() -> None:
    torch.manual_seed(0)
    before = {"w": torch.randn(SIZE).bfloat16()}
    after = {"w": (before["w"].float() * (1 + 0.01 * torch.randn(SIZE))).bfloat16()}
    layout, about, old = described(before)
    _, _, new = described(after)
    assert Finder("fast").find(layout, about, old, new) == {}
    small = Finder("small").find(layout, about, old, new)
    assert len(small) == about.pieces
    assert sum(map(len, small.values())) < 0.5 * about.size


def test_the_last_versions_are_kept() -> None:
    changes, delta = Changes(), torch.zeros(10, dtype=torch.uint8)
    for number in range(2, 9):
        for piece in range(2):
            changes.keep(number, piece, delta, 100)
    assert [len(changes.between(base, 8, 1, 1000)) for base in range(8)] == [0, 0, 0, 5, 4, 3, 2, 1]
    assert changes.between(3, 8, 1, 50) == []  # as many bytes as the piece has
    assert changes.between(7, 8, 2, 1000) == []
    assert changes.between(7, 9, 1, 1000) == []


# Between workers


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What leaves for other hosts."""
    seen: Sent = []
    send = desk.Desk.send

    def watched(self: Any, box: Any, to: Any, word: Any, tensors: Any = ()) -> None:
        if isinstance(word, Piece):
            seen.append((word.base, sum(map(len, tensors))))
        send(self, box, to, word, tensors)

    monkeypatch.setattr(desk.Desk, "send", watched)
    return seen


def begin(workers: list[Worker], state: Any, **options: Any) -> tuple[Publisher, list[Subscriber]]:
    policy = on(workers[0], Publisher, "policy", state, **options)
    policy.publish()
    readers = [on(worker, Subscriber, "w0", "policy") for worker in workers[1:]]
    for reader in readers:
        assert reader.newest().number == 1
    return policy, readers


def check(version: Any, state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        assert torch.equal(version.state[name], value), name


def test_other_hosts_get_what_has_changed(monkeypatch: pytest.MonkeyPatch, sent: Sent) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B", "C") as workers:
        monkeypatch.setattr(publisher, "PIECE", PIECE)
        policy, readers = begin(workers, state)
        whole = sum(size for _, size in sent)
        for number in (2, 3):
            sent.clear()
            state |= nudged(state)
            policy.publish()
            for reader in readers:
                check(reader.at_least(number), state)
            assert {base for base, _ in sent} == {number - 1}
            assert sum(size for _, size in sent) * 10 < whole


def test_who_is_several_versions_behind_gets_the_changes_of_all(monkeypatch: pytest.MonkeyPatch, sent: Sent) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B") as workers:
        monkeypatch.setattr(publisher, "PIECE", PIECE)
        policy, (reader,) = begin(workers, state)
        box = reader._box
        hears, box.take = box.take, lambda *_: None  # it is deaf for a while
        for _ in range(3):
            state |= nudged(state)
            policy.publish()
        box.take = hears
        sent.clear()
        box.join()
        check(reader.at_least(4), state)
        assert {base for base, _ in sent} == {1}


def test_who_has_no_base_gets_all(monkeypatch: pytest.MonkeyPatch, sent: Sent) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B", "C") as workers:
        monkeypatch.setattr(publisher, "PIECE", PIECE)
        policy, _ = begin(workers[:2], state)
        state |= nudged(state)
        policy.publish()
        late = on(workers[2], Subscriber, "w0", "policy")
        check(late.at_least(2), state)


def test_what_does_not_fit_is_fetched_whole(monkeypatch: pytest.MonkeyPatch, sent: Sent) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B") as workers:
        monkeypatch.setattr(publisher, "PIECE", PIECE)
        policy, (reader,) = begin(workers, state)
        reader._box.stock[1][8] ^= 1  # a bit has flipped here
        sent.clear()
        state |= nudged(state)
        policy.publish()
        check(reader.at_least(2), state)
        assert 1 in {base for base, _ in sent}
        assert 0 in {base for base, _ in sent}


def test_a_new_layout_is_sent_whole(monkeypatch: pytest.MonkeyPatch, sent: Sent) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B") as workers:
        policy, (reader,) = begin(workers, state)
        sent.clear()
        state["bias"] = torch.ones(3)
        policy.publish()
        check(reader.at_least(2), state)
        assert {base for base, _ in sent} == {0}


def test_without_other_hosts_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_hosts(monkeypatch, "A", "A") as workers:
        monkeypatch.setattr(Finder, "find", lambda *_: pytest.fail("looked for changes"))
        policy, (reader,) = begin(workers, {"weight": torch.ones(SIZE)})
        policy.publish()
        assert reader.at_least(2).number == 2


@pytest.mark.parametrize("off", [False, True])
def test_deltas_can_be_off(monkeypatch: pytest.MonkeyPatch, sent: Sent, off: bool) -> None:
    state = {"weight": torch.randn(SIZE)}
    with on_hosts(monkeypatch, "A", "B") as workers:
        policy, (reader,) = begin(workers, state, deltas="off" if off else "small")
        state |= nudged(state)
        policy.publish()
        check(reader.at_least(2), state)
        eventually(lambda: bool(sent))
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
        named = on(
            workers[0], Publisher, "named", model, dtype=lambda name, _: torch.float16 if name == "bias" else None
        )
        named.publish()
        found = on(workers[2], Subscriber, "w0", "named").newest()
        assert [value.dtype for value in found.state.values()] == [torch.float32, torch.float16]
        found.load_into(model)
