"""The small parts of an agent: deadlines, members, addresses."""

from __future__ import annotations

from math import inf

import pytest

from telegrad import errors
from telegrad.agent.address import ADDRESS_VARIABLE, host_identity, own_address
from telegrad.agent.deadlines import Deadlines
from telegrad.agent.members import Member, Members, check_name, unknown


def member(id_, name):
    return Member(name, id_, f"inc{id_}", "", "host", "", ("127.0.0.1", 1000 + id_))


def test_deadlines_expire_in_time_and_once():
    table = Deadlines()
    assert table.add("slow", 60, when=60)
    assert table.add("quick", 1, when=1)
    assert not table.add("later", 1, when=1.5)
    assert table.next() == 1
    assert table.due(0.9) == []
    assert table.due(1.2) == ["quick"]
    table.remove("later", 1)
    assert table.next() == 60
    assert table.due(100) == ["slow"]
    assert table.next() == inf
    table.remove("slow", 60)  # already gone


def test_members_by_name_and_rank():
    group = Members([member(1, "b"), member(0, "a")])
    assert [m.name for m in group] == ["a", "b"]
    assert group.find("b").id == group.find(1).id == 1
    with pytest.raises(errors.UnknownWorker, match="The group has: a, b"):
        group.find("zzz")
    with pytest.raises(errors.UnknownWorker, match="rank 5"):
        group.find(5)
    assert "did you mean 'trainer1'?" in str(unknown("trainer_1", ["trainer1", "ps"]))


def test_members_travel_as_text():
    assert Member.from_json(member(3, "c").to_json()) == member(3, "c")


@pytest.mark.parametrize("name", ["a", "Trainer3", "ps:0", "a_b-c", "x" * 127])
def test_good_names(name):
    check_name(name)


@pytest.mark.parametrize("name", ["", "a b", "a.b", "x" * 128, None, 3])
def test_bad_names(name):
    with pytest.raises(errors.InvalidName):
        check_name(name)


def test_the_address_is_the_one_that_reaches_the_store(monkeypatch):
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    assert own_address(None, "localhost") == "127.0.0.1"
    assert own_address(None, "127.0.0.1") == "127.0.0.1"
    assert own_address(None, "::1") == "::1"


def test_a_wanted_address_wins_and_is_checked(monkeypatch):
    assert own_address("127.0.0.2", "localhost") == "127.0.0.2"
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.3")
    assert own_address(None, "localhost") == "127.0.0.3"
    with pytest.raises(errors.UsageError, match=r"192\.0\.2\.1"):
        own_address("192.0.2.1", None)


def test_one_host():
    assert host_identity() == host_identity() != ""
