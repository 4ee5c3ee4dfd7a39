"""One worker's part in a dynamic group, without any other process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from telegrad.errors import StoreLost, UnknownWorker
from telegrad.group import dynamic
from telegrad.group.directory import Directory
from telegrad.group.dynamic import DynamicGroup
from telegrad.group.members import Member
from telegrad.group.stores import Place
from telegrad.group.succession import Seat
from tests.cluster import sealed


def member(name: str, rank: int) -> Member:
    return Member(name, rank, f"life of {name}", "", "host", "", ("127.0.0.1", 1))


def test_an_end_that_was_told_in_the_next_store_is_heard_by_who_comes_over_later() -> None:
    store = sealed(dist.HashStore())
    group = DynamicGroup(store)
    group.join(member("server", 1))
    following = Directory(sealed(dist.HashStore()))
    following.board.claim_terms(group.terms)
    following.end()
    group.move(following, Seat(2, 0, "life of boss", "127.0.0.1", 2), False)
    assert group.ended()
    assert not group.ended()


def test_who_comes_back_to_the_same_store_hears_of_an_end_once() -> None:
    store = sealed(dist.HashStore())
    group = DynamicGroup(store)
    group.join(member("server", 1))
    group.directory.end()
    assert group.ended()
    group.lose()
    again = Directory(store)
    assert again.board.terms() == group.terms
    group.move(again, group.store, False)
    assert not group.ended()
    group.directory.end()
    assert group.ended()


def test_an_end_from_before_it_came_is_no_workers_own() -> None:
    store = sealed(dist.HashStore())
    DynamicGroup(store).join(member("earlier", 2))
    directory = Directory(store)
    assert directory.board.terms()
    directory.end()
    group = DynamicGroup(store)
    group.join(member("server", 1))
    assert not group.ended()


FILE, TCP, LAUNCHED = (None, None), ("127.0.0.1", 1), ("127.0.0.1", 2)


@pytest.mark.parametrize("place", [FILE, TCP, LAUNCHED], ids=["file", "tcp", "launched"])
@pytest.mark.parametrize(
    ("first", "ranks", "leaver", "in_order", "ends"),
    [
        (1, (0, 2), 0, True, "file tcp launched"),
        (0, (1, 2), 0, True, "file tcp launched"),
        (0, (1, 2), 0, False, "file tcp"),  # a launcher starts it anew
        (1, (2, 3), 1, True, "file tcp"),  # else a launcher has begun the group
        (1, (2, 3), 2, True, ""),
        (0, (1, 2), 1, True, ""),
    ],
)
def test_with_whom_those_end_who_only_serve(
    monkeypatch: pytest.MonkeyPatch,
    place: Place,
    first: int,
    ranks: tuple[int, ...],
    leaver: int,
    in_order: bool,
    ends: str,
) -> None:
    monkeypatch.setattr(dynamic, "LINGER", 0.0)  # nobody looks meanwhile
    store = sealed(dist.HashStore())
    groups = {first: DynamicGroup(store, serves=place is TCP, place=place)}
    groups |= {rank: DynamicGroup(store, place=place) for rank in ranks}
    for rank, group in groups.items():
        group.join(member(f"w{rank}", rank))
    groups.pop(leaver).leave(in_order)
    expected = {FILE: "file", TCP: "tcp", LAUNCHED: "launched"}[place] in ends.split()
    assert {group.ended() for group in groups.values()} == {expected}


def test_who_comes_first_again_to_a_file_where_all_have_died_has_begun_the_group() -> None:
    store = sealed(dist.HashStore())
    for rank in (1, 2):
        DynamicGroup(store).join(member(f"dead{rank}", rank))
    dead = {"life of dead1", "life of dead2"}

    def is_alive(other: Member) -> bool:
        return other.incarnation not in dead

    first, second = DynamicGroup(store), DynamicGroup(store)
    first.join(member("first", -1), is_alive)
    second.join(member("second", -1), is_alive)
    second.leave()
    assert not first.ended()
    again = DynamicGroup(store)
    again.join(member("again", -1), is_alive)
    first.leave()
    assert again.ended()


def test_a_store_that_is_lost_as_the_names_are_read_is_no_error_of_the_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    group = DynamicGroup(sealed(dist.HashStore()))
    group.join(member("server", 1))
    lost = group.directory
    following = Directory(sealed(dist.HashStore()))
    following.board.claim_terms(group.terms)

    def lose() -> list[Member]:
        monkeypatch.undo()
        group.move(following, Seat(2, 0, "life of boss", "127.0.0.1", 2), False)
        raise StoreLost("just now")

    monkeypatch.setattr(lost, "members", lose)
    with pytest.raises(UnknownWorker, match="'nobody'"):
        group.find("nobody")
