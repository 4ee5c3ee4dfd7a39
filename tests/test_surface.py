"""The public names change only on purpose; docs/api.md lists them, docs/stability.md their stability."""

import ast
import importlib
import re

import pytest

from tests import surface

PAGE = (surface.PACKAGE / "docs" / "api.md").read_text()


def test_the_surface_equals_the_recorded_one() -> None:
    assert surface.text() == surface.FILE.read_text(), "if that is meant: python -m tests.surface, and the changelog"


def test_the_page_lists_the_modules() -> None:
    assert re.findall(r"^\| `([\w.]+)` \|", PAGE, re.MULTILINE) == list(surface.MODULES)


def test_the_page_of_extensions_lists_their_modules() -> None:
    page = (surface.PACKAGE / "docs" / "extensions.md").read_text()
    modules = surface.extension_modules()
    assert sorted(re.findall(r"^\| `(telegrad\.ext\.\w+)` \|", page, re.MULTILINE)) == modules
    text = ast.get_docstring(ast.parse(surface.path_of("telegrad.ext").read_text())) or ""
    assert sorted(f"telegrad.ext.{name}" for name in re.findall(r"^`(\w+)`:", text, re.M)) == modules


@pytest.mark.parametrize("module", surface.MODULES)
def test_the_page_lists_the_exports_of_a_module(module: str) -> None:
    names = re.search(rf"^\| `{module}` \| ([^|]*) \|", PAGE, re.MULTILINE).group(1)
    if module != "telegrad.errors":  # the table of errors is in docs/rpc.md
        assert sorted(re.findall(r"`(\w+)`", names)) == sorted(surface.exported(module))


@pytest.mark.parametrize("module", surface.MODULES)
def test_the_exports_in_the_source_are_those_of_the_module(module: str) -> None:
    imported = importlib.import_module(module)
    assert sorted(surface.exported(module)) == sorted(imported.__all__)
    assert all(hasattr(imported, name) for name in imported.__all__)


@pytest.mark.parametrize(
    ("module", "before", "after"),
    [
        ("telegrad._core.rpc.life", "def stop_serving() -> None", "def stop_serving(name: str) -> None"),
        ("telegrad._core.rpc.remote_calls", "def rpc_sync(\n    to: str | int", "def rpc_sync(\n    to: int"),
        ("telegrad._core.rpc.life", "graceful: bool = True", "graceful: bool = False"),
    ],
)
def test_changes_are_detected(module: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = surface.path_of(module).read_text()
    assert before in source
    monkeypatch.setitem(surface.trees, module, ast.parse(source.replace(before, after, 1)))
    assert surface.text() != surface.FILE.read_text()


def test_levels_belong_to_existing_names() -> None:
    levels = surface.Levels.read(surface.PROMISES.read_text())
    text = surface.text()
    for of_module in levels.provisional.values():
        for name in of_module - {"all"}:
            assert re.search(rf"^    provisional (\w+ )*{name}\b", text, re.MULTILINE), name
    for of_module in levels.internal.values():
        for name in of_module:
            owner, _, member = name.partition(".")
            found = re.search(
                rf"^    \w+ class {owner}\b.*\n(        .*\n)*        internal (\w+ )*{member}\b", text, re.MULTILINE
            )
            assert found, name


SURFACE = """\
telegrad.rpc
    stable class Future(Base)
        internal about: str
        number: int
        def wait(self, timeout: float=60.0) -> T
    provisional class Group
        def __len__(self) -> int
    stable def call(to: str, *, again: bool) -> None
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        internal about: str\n", ""),
        ("    provisional class Group\n        def __len__(self) -> int\n", ""),
        ("def __len__(self) -> int", "def __len__(self, of: str) -> int"),
        ("timeout: float=60.0)", "timeout: float=30.0)"),
        ("timeout: float=60.0)", "timeout: float=60.0, more: int=1, *, last: bool=True)"),
        ("*, again: bool)", "*, again: bool=False)"),
        ("provisional class Group", "stable class Group"),
        ("telegrad.rpc\n", "telegrad.more\n    stable def more() -> None\ntelegrad.rpc\n"),
    ],
)
def test_a_stable_name_may_grow(before: str, after: str) -> None:
    assert before in SURFACE
    assert not surface.broken(SURFACE, SURFACE.replace(before, after, 1))


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("    stable def call(to: str, *, again: bool) -> None\n", "", "call"),
        ("stable def call", "provisional def call", "call"),
        ("to: str", "to: str, func: str", "call"),
        ("to: str", "whom: str", "call"),
        ("again: bool", "again: bool, more: int", "call"),
        ("again: bool", "more: bool", "call"),
        (") -> None", ") -> int", "call"),
        ("=60.0", "", "Future"),
        ("number: int", "number: str", "Future"),
        ("(Base)", "", "Future"),
    ],
)
def test_a_stable_name_may_not_break(before: str, after: str, named: str) -> None:
    assert before in SURFACE
    lost = surface.broken(SURFACE, SURFACE.replace(before, after, 1))
    assert lost
    assert all(named in line for line in lost)
