"""Meetings of the workers of a group, as the one that keeps them sees them."""

from __future__ import annotations

from telegrad.rpc.gatherings import Gatherings, Key

KEY = Key("barrier", "everybody", "")
OTHER = Key("barrier", "everybody", "x")


def test_a_meeting_is_over_when_all_have_come() -> None:
    gatherings = Gatherings()
    meeting = gatherings.arrive(KEY, "b", 2, ["a", "b", "c"])
    assert meeting.missing == ["a", "c"]
    assert repr(meeting) == "<Meeting of 3, missing: a, c>"
    assert gatherings.arrive(KEY, "a", 1, ["another view"]) is meeting
    assert gatherings.arrive(KEY, "c", 3, []) is meeting
    assert meeting.brought() == [1, 2, 3]
    assert "nobody" in repr(meeting)
    assert not gatherings._meetings


def test_who_comes_again_waits_for_the_next() -> None:
    gatherings = Gatherings()
    first = gatherings.arrive(KEY, "a", 1, ["a", "b"])
    second = gatherings.arrive(KEY, "a", 2, ["a", "b"])
    assert first is not second
    assert gatherings.arrive(KEY, "b", 3, ["a", "b"]) is first
    assert second.missing == ["b"]
    assert gatherings.arrive(KEY, "b", 4, ["a", "b"]) is second
    assert (first.brought(), second.brought()) == ([1, 3], [2, 4])


def test_meetings_of_other_names_are_others() -> None:
    gatherings = Gatherings()
    assert gatherings.arrive(KEY, "a", 1, ["a", "b"]) is not gatherings.arrive(OTHER, "b", 1, ["a", "b"])


def test_who_gives_up_counts_as_missing_but_is_not_named_before_the_others() -> None:
    gatherings = Gatherings()
    meeting = gatherings.arrive(KEY, "a", 1, ["a", "b", "c"])
    gatherings.arrive(KEY, "b", 1, [])
    gatherings.withdraw("a", meeting)
    assert (meeting.missing, meeting.late) == (["a", "c"], ["c"])
    gatherings.arrive(KEY, "c", 1, [])
    assert meeting.late == ["a"]
    gatherings.arrive(KEY, "a", 1, [])
    assert not meeting.missing


def test_a_meeting_that_all_leave_is_forgotten() -> None:
    gatherings = Gatherings()
    meeting = gatherings.arrive(KEY, "a", 1, ["a", "b"])
    gatherings.withdraw("a", meeting)
    assert gatherings.arrive(KEY, "b", 1, ["a", "b"]) is not meeting


def test_who_is_gone_ends_the_meetings_that_wait_for_it() -> None:
    gatherings = Gatherings()
    waits = gatherings.arrive(KEY, "a", 1, ["a", "b", "c"])
    other = gatherings.arrive(OTHER, "b", 1, ["a", "b"])
    assert gatherings.gone("b") == [waits]
    assert gatherings.gone("b") == []
    assert gatherings._meetings == {OTHER: [other]}
