"""Rooms import downward only, and pure files stay pure: read from the source, function-level imports included."""

from __future__ import annotations

import ast
import importlib
import pathlib

import pytest

import telegrad

ROOT = pathlib.Path(telegrad.__file__).parent
FLOORS = [
    {"errors", "version"},
    {"hints", "contracts"},
    {"wire"},
    {"devices"},
    {"transport"},
    {"agent"},
    {"rref", "autograd"},
    {"rpc"},
    {"nn"},
    {"optim"},
    {"checkpoint"},
    {"compat"},
]
PURE = [
    "wire/messages.py",
    "wire/frames.py",
    "devices/maps.py",
    "transport/handshake.py",
    "transport/reading.py",
    "agent/calls.py",
    "agent/deadlines.py",
    "agent/slots.py",
    "agent/members.py",
    "agent/farewell.py",
    "rref/letters.py",
    "rref/records.py",
    "rref/protocol.py",
    "rref/courier.py",
    "autograd/schedule.py",
    "autograd/passes.py",
    "nn/schedule.py",
]
IMPURE = {"socket", "threading", "time", "torch", "asyncio", "select", "selectors", "ssl"}
FILES = sorted(ROOT.rglob("*.py"))


def imported(source: str) -> set[str]:
    """The dotted names that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def floor(room: str) -> int:
    return next(index for index, rooms in enumerate(FLOORS) if room in rooms)


def wrong_directions(room: str, source: str) -> list[str]:
    """Imports of `source`, a file in `room`, that go up or sideways."""
    own = [name.split(".")[1] for name in imported(source) if name.startswith("telegrad.")]
    return [other for other in own if other != room and floor(other) >= floor(room)]


def impurities(source: str) -> set[str]:
    return {name.split(".")[0] for name in imported(source)} & IMPURE


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != ROOT or p.stem in FLOORS[0] | FLOORS[1]], ids=str)
def test_rooms_import_downward(path):
    assert wrong_directions(room_of(path), path.read_text()) == []


@pytest.mark.parametrize("name", PURE)
def test_pure_files(name):
    assert impurities((ROOT / name).read_text()) == set()


def test_the_checks_find_what_is_wrong():
    assert wrong_directions("wire", "def f():\n    from telegrad.agent import peer") == ["agent"]
    assert wrong_directions("rref", "import telegrad.autograd.engine") == ["autograd"]
    assert wrong_directions("rpc", "from telegrad.wire import frames\nfrom telegrad.rpc import api") == []
    assert impurities("def f():\n    import torch.nn") == {"torch"}


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name != "boot"], ids=str)  # which is run, not imported
def test_public_names_exist(path):
    dotted = ".".join(("telegrad", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    module = importlib.import_module(dotted)
    assert all(hasattr(module, name) for name in getattr(module, "__all__", []))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_fits_in_a_head(path):
    assert len(path.read_text().splitlines()) <= 450
