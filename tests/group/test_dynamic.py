"""One worker's part in a dynamic group, without any other process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from telegrad.errors import StoreLost, UnknownWorker
from telegrad.group.directory import Directory
from telegrad.group.dynamic import DynamicGroup
from telegrad.group.members import Member
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
