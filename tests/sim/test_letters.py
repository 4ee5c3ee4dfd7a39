"""What letters about references name."""

from __future__ import annotations

from telegrad._core.membership.members import Identity
from telegrad._core.references import key_of, number


def test_a_worker_that_comes_later_under_the_same_name_is_another() -> None:
    first, second = Identity("ps", 0, "one"), Identity("ps", 0, "two")
    assert key_of(first) != key_of(second)
    assert key_of(first) == key_of(Identity("ps", 0, "one"))


def test_people_read_the_name_and_the_number() -> None:
    assert number((key_of(Identity("ps", 0, "one")), 12)) == "ps/12"
    assert number((key_of(Identity("a#b", 0, "one")), 3)) == "a#b/3"  # whatever the name looks like
