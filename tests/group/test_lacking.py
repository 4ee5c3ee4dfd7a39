"""Who is not there, of those that are waited for."""

from __future__ import annotations

from telegrad.group.lacking import lack, missing


def test_so_many_are_wanted() -> None:
    assert lack({"a", "b"}, 2) == ""
    assert lack({"b", "a"}, 3) == "there are 2 workers, not 3: a, b"
    assert lack(set(), 1, "actor") == "there are 0 workers of role 'actor', not 1: none"
    assert missing({"a"}, 3) == []


def test_some_are_wanted_by_name() -> None:
    assert lack({"a", "b"}, ["a"]) == ""
    assert lack({"a", "b"}, ["c", "a", "d"]) == "'c', 'd' not there; there are a, b"
    assert missing({"a"}, ["a", "c"]) == ["c"]
