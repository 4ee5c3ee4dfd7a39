"""Every exception is exported, in the tree of the reference, and in the table of the docs."""

from __future__ import annotations

import pathlib

import pytest

import telegrad
from telegrad import errors

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
DOCS = pathlib.Path(telegrad.__file__).parents[1] / "docs"
TABLE = DOCS.joinpath("rpc.md").read_text().partition("## Errors")[2]


def parents(tree: str) -> dict[str, str | None]:
    """The line above each name of the tree that stands further to the left."""
    above: list[tuple[int, str]] = []
    found: dict[str, str | None] = {}
    for line in tree.splitlines():
        name = line.lstrip(" │├└─").partition(" ")[0]
        if not name or not hasattr(errors, name):
            continue
        depth = line.index(name)
        above = [entry for entry in above if entry[0] < depth]
        found[name] = above[-1][1] if above else None
        above.append((depth, name))
    return found


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_exception_is_exported_and_documented(kind: type[Exception]) -> None:
    assert kind.__doc__
    assert f"`{kind.__name__}`" in TABLE


def test_the_tree_is_that_of_the_classes() -> None:
    tree = parents(DOCS.joinpath("reference", "errors.rst").read_text().partition("none\n")[2])
    assert set(tree) == {kind.__name__ for kind in CLASSES}
    for name, parent in tree.items():
        assert parent is None or parent in {base.__name__ for base in getattr(errors, name).__bases__}


def test_all_is_complete() -> None:
    assert errors.__all__ == sorted(kind.__name__ for kind in CLASSES)
