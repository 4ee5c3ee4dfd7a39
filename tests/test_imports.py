"""Layers import downward only, no files in a circle, and pure files stay pure.

Read from the source: imports inside of functions, or for types only, count like all others.
"""

from __future__ import annotations

import ast
import importlib
import pathlib

import pytest

import telegrad

ROOT = pathlib.Path(telegrad.__file__).parent
FLOORS = [
    {"atfork"},
    {"errors", "version", "instruments", "importing", "safe_text", "interrupts", "addresses"},
    {"forks"},
    {
        "hints",
        "threads",
        "contracts",
        "processes",
        "progress",
        "private_files",
        "descriptors",
        "out_of_memory",
        "host_memory",
        "checks",
        "instances",
    },
    {"secret_files"},
    {"keyring"},
    {"wire"},
    {"devices"},
    {"transport"},
    {"directory"},
    {"group"},
    {"agent"},
    {"rref", "autograd"},
    {"witness"},
    {"rpc"},
    {"nn"},
    {"optim"},
    {"checkpoint", "weights"},
    {"insight", "recovery"},
    {"compat"},
    {"supervision"},
]
PURE = [
    "wire/messages.py",
    "wire/frames.py",
    "wire/strides.py",
    "devices/maps.py",
    "transport/handshake.py",
    "transport/noise.py",
    "transport/records.py",
    "transport/reading.py",
    "transport/silence.py",
    "transport/refusals.py",
    "directory/protocol.py",
    "directory/messages.py",
    "directory/channel.py",
    "directory/redis_settings.py",
    "directory/etcd_messages.py",
    "group/members.py",
    "group/surroundings.py",
    "group/attendance.py",
    "group/farewell.py",
    "group/supervised.py",
    "group/quorum.py",
    "group/steps.py",
    "agent/call_table.py",
    "agent/deadlines.py",
    "agent/scheduler.py",
    "rpc/flow.py",
    "rpc/retry_queue.py",
    "rref/letters.py",
    "rref/records.py",
    "rref/protocol.py",
    "rref/courier.py",
    "autograd/schedule.py",
    "autograd/passes.py",
    "rpc/selection.py",
    "nn/schedule.py",
    "weights/messages.py",
    "weights/version_store.py",
    "weights/chain.py",
    "weights/feed.py",
    "weights/fetcher.py",
    "weights/shards.py",
    "insight/finding.py",
    "insight/wait_graph.py",
    "insight/phrases.py",
    "insight/causes.py",
    "insight/joins.py",
    "insight/report.py",
    "insight/history.py",
    "insight/snapshot.py",
    "insight/clock_offsets.py",
    "insight/chrome_trace.py",
    "supervision/lines.py",
    "supervision/roles.py",
    "supervision/policy.py",
]
IMPURE = {"socket", "threading", "time", "torch", "asyncio", "select", "selectors", "ssl"}
FILES = sorted(ROOT.rglob("*.py"))


def dotted(path: pathlib.Path) -> str:
    return ".".join(("telegrad", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {dotted(path): path for path in FILES}


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


def hands_on(source: str) -> bool:
    """Whether a file does nothing but give the names of others."""
    return all(isinstance(node, ast.ImportFrom | ast.With | ast.Assign | ast.Expr) for node in ast.parse(source).body)


def leads_to(name: str) -> set[str]:
    """The modules of this package where what is imported under a dotted name stands."""
    module = name
    while module and module not in MODULES:
        module = module.rpartition(".")[0]
    if not module:
        return set()
    path = MODULES[module]
    if path.name != "__init__.py" or not hands_on(path.read_text()):
        return {module}
    others = imported(path.read_text())
    handed = {other for other in others if other.rpartition(".")[2] == name.removeprefix(f"{module}.")}
    return {each for other in handed or others for each in leads_to(other)}


def in_circles(imports: dict[str, set[str]]) -> set[str]:
    """Those that come back to themselves along their imports."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            fresh = imports.get(ahead.pop(), set()) - seen
            seen |= fresh
            ahead += fresh
        return seen

    return {name for name in imports if name in reached(name)}


def floor(layer: str) -> int:
    return next(index for index, layers in enumerate(FLOORS) if layer in layers)


def wrong_directions(layer: str, source: str) -> list[str]:
    """Imports of `source`, a file in `layer`, that go up or sideways."""
    own = [name.split(".")[1] for name in imported(source) if name.startswith("telegrad.")]
    return [other for other in own if other != layer and floor(other) >= floor(layer)]


def impurities(source: str) -> set[str]:
    return {name.split(".")[0] for name in imported(source)} & IMPURE


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != ROOT or p.stem in set.union(*FLOORS[:4])], ids=str)
def test_rooms_import_downward(path: pathlib.Path) -> None:
    assert wrong_directions(room_of(path), path.read_text()) == []


def test_no_files_import_one_another_in_a_circle() -> None:
    imports = {
        module: {each for name in imported(path.read_text()) for each in leads_to(name)}
        for module, path in MODULES.items()
    }
    assert in_circles(imports) == set()


@pytest.mark.parametrize("name", PURE)
def test_pure_files(name: str) -> None:
    assert impurities((ROOT / name).read_text()) == set()


def test_the_checks_find_what_is_wrong() -> None:
    assert wrong_directions("wire", "def f():\n    from telegrad.agent import peer") == ["agent"]
    assert wrong_directions("rref", "import telegrad.autograd.engine") == ["autograd"]
    assert wrong_directions("rpc", "from telegrad.wire import frames\nfrom telegrad.rpc import api") == []
    assert impurities("def f():\n    import torch.nn") == {"torch"}
    assert in_circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"a"}}) == {"a", "b", "c"}
    assert leads_to("telegrad.rpc.RRef") == {"telegrad.rpc.references"}
    assert leads_to("telegrad.rpc.current.agent") == leads_to("telegrad.rpc.current") == {"telegrad.rpc.current"}
    assert {"telegrad.nn.pipeline", "telegrad.nn.remote_module"} == leads_to("telegrad.nn")
    assert leads_to("torch.nn") == set()


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name != "boot"], ids=str)  # which is run, not imported
def test_public_names_exist(path: pathlib.Path) -> None:
    try:
        module = importlib.import_module(dotted(path))
    except ImportError as error:
        if "pip install 'telegrad[torchrl]'" not in str(error):  # the only extra that is not among those for developers
            raise
        pytest.skip(str(error))
    assert all(hasattr(module, name) for name in getattr(module, "__all__", []))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_fits_in_a_head(path: pathlib.Path) -> None:
    assert len(path.read_text().splitlines()) <= 450
