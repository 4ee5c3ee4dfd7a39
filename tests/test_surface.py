"""What users may import changes only on purpose, and docs/api.md lists it."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from tests import surface

PAGE = (surface.PACKAGE / "docs" / "api.md").read_text()


def test_the_surface_is_the_one_that_is_written_down() -> None:
    assert surface.text() == surface.FILE.read_text(), "if that is meant: python -m tests.surface, and the changelog"


def test_the_page_lists_the_modules() -> None:
    assert re.findall(r"^\| `([\w.]+)` \|", PAGE, re.MULTILINE) == list(surface.MODULES)


@pytest.mark.parametrize("module", surface.MODULES)
def test_the_page_lists_what_a_module_exports(module: str) -> None:
    names = re.search(rf"^\| `{module}` \| ([^|]*) \|", PAGE, re.MULTILINE).group(1)
    if module != "telegrad.errors":  # whose table is in docs/rpc.md
        assert sorted(re.findall(r"`(\w+)`", names)) == sorted(surface.exported(module))


@pytest.mark.parametrize("module", surface.MODULES)
def test_the_source_exports_what_the_module_has(module: str) -> None:
    imported = importlib.import_module(module)
    assert sorted(surface.exported(module)) == sorted(imported.__all__)
    assert all(hasattr(imported, name) for name in imported.__all__)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def stop_serving() -> None", "def stop_serving(name: str) -> None"),
        ("def rpc_sync(\n    to: str | int", "def rpc_sync(\n    to: int"),
        ("graceful: bool = True", "graceful: bool = False"),
    ],
)
def test_changes_are_seen(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "telegrad.rpc.api"
    source = surface.path_of(module).read_text()
    assert before in source
    monkeypatch.setitem(surface.trees, module, ast.parse(source.replace(before, after, 1)))
    assert surface.text() != surface.FILE.read_text()
