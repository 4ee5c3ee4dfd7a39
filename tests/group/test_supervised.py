"""Who a worker is, by its environment."""

from __future__ import annotations

import pytest

from telegrad._core.stores.supervised import is_supervised, own_name, variables

ACTOR = variables("actor3", "actor", 2, "h", 1234)


@pytest.mark.parametrize(
    ("name", "role", "found"),
    [
        (None, "", ("actor3", "actor")),
        (None, "actor", ("actor3", "actor")),
        ("actor3", "", ("actor3", "actor")),
        (None, "critic", (None, "critic")),
        ("other", "", ("other", "")),
        ("other", "actor", ("other", "actor")),
    ],
)
def test_the_environment_names_who_has_no_other_name(
    name: str | None, role: str, found: tuple[str | None, str]
) -> None:
    assert own_name(name, role, ACTOR) == found
    assert own_name(name, role, {}) == (name, role)


def test_only_the_place_of_the_store_has_it() -> None:
    assert is_supervised("h", 1234, ACTOR)
    assert not is_supervised("h", 1235, ACTOR)
    assert not is_supervised("h", 1234, {})
    assert ACTOR["TELEGRAD_RESTARTS"] == "2"
