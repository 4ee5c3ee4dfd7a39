"""Who has come to where a group forms."""

from __future__ import annotations

from telegrad._core.joining.rendezvous import MOST_ASKED, ArrivalTable
from telegrad._core.membership.members import Member


def member(rank: int) -> Member:
    return Member(f"w{rank}", rank, f"incarnation {rank}", "program", "host", "", ("127.0.0.1", 1000 + rank))


def test_who_did_not_come_is_told_by_rank() -> None:
    attendance = ArrivalTable(4, 1)
    assert attendance.missing() == ["rank 0", "rank 2", "rank 3"]
    assert attendance.said() == ["ranks 0, 2, 3 did not join"]
    attendance.look(lambda rank: "" if rank == 2 else member(rank).to_json())
    assert attendance.missing() == ["rank 2"]
    assert attendance.said() == ["rank 2 did not join"]
    assert repr(attendance) == "<ArrivalTable: 2 have come; rank 2 did not join>"


def test_who_has_come_is_not_looked_for_again() -> None:
    attendance = ArrivalTable(3, 0)
    attendance.look(lambda rank: member(1).to_json() if rank == 1 else "")
    asked: list[int] = []
    attendance.look(lambda rank: asked.append(rank) or "")  # type: ignore[func-returns-value]
    assert asked == [2]


def test_who_did_not_come_is_told_by_name_where_names_are_known() -> None:
    attendance = ArrivalTable(3, 0, ("driver", "ps", "trainer"))
    assert attendance.missing() == ["ps", "trainer"]
    assert attendance.said() == ["'ps', 'trainer' did not join"]


def test_who_came_and_died_is_missing() -> None:
    attendance = ArrivalTable(3, 0)
    attendance.look(lambda rank: member(rank).to_json())
    assert (attendance.missing(), attendance.said()) == ([], [])
    attendance.knock(lambda who: who.id != 2)
    assert attendance.missing() == ["w2"]
    assert attendance.said() == ["'w2' (rank 2, at 127.0.0.1:1002) joined, then stopped answering"]


def test_all_have_come() -> None:
    attendance = ArrivalTable(3, 0)
    attendance.complete([member(rank) for rank in range(3)])
    assert (attendance.missing(), attendance.said()) == ([], [])
    attendance.knock(lambda who: who.id != 1)
    assert attendance.missing() == ["w1"]
    assert repr(ArrivalTable(1, 0)) == "<ArrivalTable: 0 have come; nobody is missing>"


def test_in_a_large_group_each_look_is_for_some_ranks_and_all_are_looked_for_in_turn() -> None:
    size, me = 3 * MOST_ASKED, 5
    attendance = ArrivalTable(size, me)
    asked: list[list[int]] = []

    def entry_of(rank: int) -> str:
        asked[-1].append(rank)
        return "" if rank % 2 else member(rank).to_json()

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


def test_few_are_knocked_at_by_each() -> None:
    attendance = ArrivalTable(3 * MOST_ASKED, 0)
    while not attendance.is_complete:
        attendance.look(lambda rank: member(rank).to_json())
    knocked: list[int] = []
    attendance.knock(lambda who: knocked.append(who.id) or True)  # type: ignore[func-returns-value]
    assert len(knocked) == MOST_ASKED
