"""Tests of the table of members, of the names of workers, and of the list of arrivals while a group forms."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad import errors
from telegrad._core.membership.members import (
    LONGEST_NAME,
    LONGEST_ROLE,
    Devices,
    Member,
    Members,
    WorkerInfo,
    check_name,
    check_role,
    describe_missing,
    info,
    missing_names,
    named,
    unknown,
)
from telegrad._core.membership.rendezvous import MOST_ASKED, ArrivalTable


def member(name: str, id_: int, address: str = "127.0.0.1") -> Member:
    return Member(name, id_, f"incarnation{id_}", "program", "host", "", (address, 1000 + id_))


def test_iteration_goes_by_rank() -> None:
    table = Members([member("c", 2), member("a", 1), member("b", 0)])
    assert [each.name for each in table] == ["b", "a", "c"]
    assert len(table) == 3
    assert [table.find(to).id for to in ("c", "a", 0)] == [2, 1, 0]


def test_the_error_of_an_unknown_worker_lists_the_group() -> None:
    table = Members([member("trainer0", 0), member("ps", 1)])
    with pytest.raises(errors.UnknownWorker, match=r"did you mean 'trainer0'\? The group has: trainer0, ps\."):
        table.find("trainer_0")
    with pytest.raises(errors.UnknownWorker, match=r"no worker has rank 7\. The group has: trainer0, ps\."):
        table.find(7)
    assert "nobody" in str(unknown("a", []))
    assert "and 84 more" in str(unknown(100, [str(i) for i in range(100)]))


def test_an_address_of_ip_version_6_is_shown_in_brackets() -> None:
    assert str(member("a", 3, "::1")) == "'a' (rank 3, at [::1]:1003)"


@given(st.text(), st.integers(0), st.text(), st.integers(0, 65535))
def test_a_member_survives_conversion_to_json(name: str, id_: int, unix: str, port: int) -> None:
    devices = Devices(2, {"b": {"cuda:0": "cuda:1"}}, ("cuda:0",))
    sent = Member(name, id_, "i", "p", "h", unix, ("::1", port), devices, "trainer")
    assert Member.from_json(sent.to_json()) == sent


@given(st.text(max_size=2 * LONGEST_NAME))
def test_names_follow_the_documented_pattern(name: str) -> None:
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:-")
    if name and len(name) < 128 and set(name) <= allowed:
        check_name(name)
    else:
        with pytest.raises(errors.InvalidName):
            check_name(name)


@pytest.mark.parametrize("name", ["a\n", "ä", "a.b", "x" * 128, "", None])
def test_invalid_names_are_refused(name: Any) -> None:
    with pytest.raises(errors.InvalidName, match="Worker name must match"):
        check_name(name)


def test_missing_workers_are_described_by_number() -> None:
    assert describe_missing({"a", "b"}, 2) == ""
    assert describe_missing({"b", "a"}, 3) == "the group has 2 workers, not 3: a, b"
    assert describe_missing({"a"}, 2) == "the group has 1 worker, not 2: a"
    assert describe_missing(set(), 1, "actor") == "the group has 0 workers of role 'actor', not 1"
    assert missing_names({"a"}, 3) == []


def test_missing_workers_are_described_by_name() -> None:
    assert describe_missing({"a", "b"}, ["a"]) == ""
    assert describe_missing({"a", "b"}, ["c", "a", "d"]) == "'c', 'd' missing; the group has a, b"
    assert missing_names({"a"}, ["a", "c"]) == ["c"]


# Arrivals


def test_missing_workers_are_listed_by_rank() -> None:
    attendance = ArrivalTable(4, 1)
    assert attendance.missing() == ["rank 0", "rank 2", "rank 3"]
    assert attendance.said() == ["ranks 0, 2, 3 did not join"]
    attendance.look(lambda rank: "" if rank == 2 else member(f"w{rank}", rank).to_json())
    assert attendance.missing() == ["rank 2"]
    assert attendance.said() == ["rank 2 did not join"]


def test_missing_workers_are_listed_by_name_if_names_are_known() -> None:
    attendance = ArrivalTable(3, 0, ("driver", "ps", "trainer"))
    assert attendance.missing() == ["ps", "trainer"]
    assert attendance.said() == ["'ps', 'trainer' did not join"]


def test_a_worker_that_joined_and_died_is_missing() -> None:
    attendance = ArrivalTable(3, 0)
    attendance.look(lambda rank: member(f"w{rank}", rank).to_json())
    assert (attendance.missing(), attendance.said()) == ([], [])
    attendance.check_alive(lambda who: who.id != 2)
    assert attendance.missing() == ["w2"]
    assert attendance.said() == ["'w2' (rank 2, at 127.0.0.1:1002) joined, then stopped answering"]


def test_no_rank_is_missing_after_all_have_joined() -> None:
    attendance = ArrivalTable(3, 0)
    attendance.complete([member(f"w{rank}", rank) for rank in range(3)])
    assert (attendance.missing(), attendance.said()) == ([], [])
    attendance.check_alive(lambda who: who.id != 1)
    assert attendance.missing() == ["w1"]


def test_a_large_group_is_looked_up_in_parts() -> None:
    size, me = 3 * MOST_ASKED, 5
    attendance = ArrivalTable(size, me)
    asked: list[list[int]] = []

    def entry_of(rank: int) -> str:
        asked[-1].append(rank)
        return "" if rank % 2 else member(f"w{rank}", rank).to_json()

    while not attendance.is_complete:
        asked.append([])
        attendance.look(entry_of)
        if not attendance.is_complete:
            assert "not known to have joined yet" in attendance.said()[0]
    assert asked[0][0] == me + 1, "the workers do not all begin with the same rank"
    assert [len(ranks) for ranks in asked] == [MOST_ASKED] * 3
    assert {rank for ranks in asked for rank in ranks} == set(range(size)) - {me}
    assert attendance.missing() == [f"rank {rank}" for rank in range(1, size, 2) if rank != me]
    assert attendance.said()[0].endswith("did not join")


def test_each_worker_probes_only_some_of_a_large_group() -> None:
    attendance = ArrivalTable(3 * MOST_ASKED, 0)
    while not attendance.is_complete:
        attendance.look(lambda rank: member(f"w{rank}", rank).to_json())
    checked: list[int] = []
    attendance.check_alive(lambda who: checked.append(who.id) or True)  # type: ignore[func-returns-value]
    assert len(checked) == MOST_ASKED


def test_the_longest_names_and_roles_are_accepted() -> None:
    check_name("x" * LONGEST_NAME)
    check_role("x" * LONGEST_ROLE)
    check_role("")
    with pytest.raises(errors.InvalidName):
        check_role("x" * (LONGEST_ROLE + 1))


def test_users_see_a_name_a_rank_and_a_role() -> None:
    plain, actor = info(member("a", 1)), info(member("b", 2)._replace(role="actor"))
    assert (plain, plain.role) == (("a", 1), "")
    assert (actor, actor.role) == (("b", 2), "actor")
    assert actor == WorkerInfo("b", 2)
    assert pickle.loads(pickle.dumps(actor)).role == "actor"
    assert [repr(each) for each in (plain, actor)] == [
        "WorkerInfo(name='a', id=1)",
        "WorkerInfo(name='b', id=2, role='actor')",
    ]
    with pytest.raises(errors.UsageError):
        WorkerInfo("", 0)


def test_members_without_names_get_free_ones_by_role_and_rank() -> None:
    roles = {3: "actor", 1: "actor", 2: "learner"}
    members = [member("actor1", 0), *(member("", id_)._replace(role=role) for id_, role in roles.items())]
    assert [each.name for each in named(members)] == ["actor1", "actor0", "learner0", "actor2"]


def test_a_worker_that_was_there_is_reported_as_gone() -> None:
    assert "any more" in str(unknown("b", ["a"], gone=["b"]))
    assert "any more" not in str(unknown("b", ["a"], gone=["c"]))
