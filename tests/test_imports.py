"""Folders import in one direction, extensions by `telegrad.ext`; there are no import cycles; pure files stay pure.

Imports are read from the source; those inside of functions, or for types only, count like all others.
"""

import ast
import functools
import importlib
import pathlib
import subprocess
import sys
from collections.abc import Callable

import torch.utils._device

import telegrad

ROOT = pathlib.Path(telegrad.__file__).parent
# Each folder imports itself and those before it. A front re-exports names of extensions, so it comes after them.
ORDER = [
    "errors",
    "_core",
    "_core/wire",
    "_core/pickling",
    "_core/security",
    "_core/memory",
    "_core/transport",
    "_core/stores",
    "_core/membership",
    "_core/calls",
    "_core/reactor",
    "_core/agent",
    "_core/references",
    "autograd",
    "_core/worker",
    "_core/streams",
    "_core/rpc",
    "_core/modules",
    "optim",
    "ext",
    "groups",
    "publishing",
    "reporting",
    "rpc",
    "pipeline",
    "nn",
    "weights",
    "checkpoint",
    "directories",
    "insight",
    "compat",
    "launch",
]
EXTENSIONS = {"groups", "publishing", "reporting", "pipeline", "weights", "checkpoint", "directories", "insight"}
EXTENSIONS |= {"launch"}
MOST_FILES = 15  # the limit for a folder
PURE = [
    "_core/wire/messages.py",
    "_core/security/handshake.py",
    "_core/security/noise.py",
    "_core/transport/reading.py",
    "_core/transport/silence.py",
    "_core/stores/directory.py",
    "_core/stores/directory_requests.py",
    "directories/redis_messages.py",
    "directories/etcd_messages.py",
    "_core/membership/members.py",
    "_core/stores/launchers.py",
    "_core/membership/shutdown_barrier.py",
    "_core/membership/generations.py",
    "_core/reactor/scheduler.py",
    "_core/streams/__init__.py",
    "_core/rpc/retry_queue.py",
    "_core/references/__init__.py",
    "_core/references/reference_protocol.py",
    "autograd/schedule.py",
    "autograd/passes.py",
    "pipeline/pipeline_schedule.py",
    "weights/transfer.py",
    "weights/protocols.py",
    "weights/shards.py",
    "insight/wait_graph.py",
    "insight/phrases.py",
    "insight/causes.py",
    "insight/report.py",
    "insight/history.py",
    "insight/chrome_trace.py",
    "launch/policy.py",
]
IMPURE = {"socket", "threading", "time", "torch", "asyncio", "select", "selectors", "ssl"}
FILES = sorted(ROOT.rglob("*.py"))


def dotted(path: pathlib.Path) -> str:
    return ".".join(("telegrad", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {dotted(path): path for path in FILES}


parsed = functools.cache(ast.parse)  # by the source of a file


@functools.cache
def imported(source: str) -> set[str]:
    """Return the dotted names that a file imports anywhere."""
    names = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def hands_on(source: str) -> bool:
    """Return True if a file only re-exports names."""
    return all(isinstance(node, ast.ImportFrom | ast.With | ast.Assign | ast.Expr) for node in parsed(source).body)


def leads_to(name: str) -> set[str]:
    """Return the modules of this package that an import of a dotted name needs."""
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
    """Return the modules that import themselves indirectly."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            fresh = imports.get(ahead.pop(), set()) - seen
            seen |= fresh
            ahead += fresh
        return seen

    return {name for name in imports if name in reached(name)}


def folder_of(module: str) -> str:
    """Return the name in `ORDER` of a module's folder."""
    parts = module.split(".")[1:]
    if parts in (["errors"], ["version"]):
        return "errors"
    if parts[0] != "compat" and module in MODULES and MODULES[module].name == "__init__.py":
        return "/".join(parts)
    return "compat" if parts[0] == "compat" else "/".join(parts[:-1])


def modules_in(source: str) -> set[str]:
    """Return the modules of this package that a file imports."""
    found = set()
    for name in imported(source):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found |= {name} - {"", "telegrad"}
    return found


def wrong_directions(folder: str, source: str) -> list[str]:
    """Return imports of `source`, a file in `folder`, from folders that come after it."""
    rank = ORDER.index(folder)
    return sorted(name for name in modules_in(source) if ORDER.index(folder_of(name)) > rank)


def past_the_interface(folder: str, source: str) -> list[str]:
    """Return imports of `source`, a file of an extension, from the core other than by its public modules."""
    own = folder.split("/")[0]
    if own not in EXTENSIONS:
        return []
    allowed = EXTENSIONS | {"ext", "errors", "version", "compat"}
    public = {"telegrad.rpc", "telegrad.autograd", "telegrad.nn", "telegrad.optim", "telegrad.rpc.functions"}
    return sorted(name for name in modules_in(source) if name.split(".")[1] not in allowed and name not in public)


def impurities(source: str) -> set[str]:
    return {name.split(".")[0] for name in imported(source)} & IMPURE


FILES_IN_FOLDERS = [path for path in FILES if path.parent != ROOT and "boot" not in path.parts]


def faults(find: Callable[[str, str], list[str]]) -> dict[str, list[str]]:
    """Return what `find` finds in each file, given its folder and source."""
    found = {dotted(path): find(folder_of(dotted(path)), path.read_text()) for path in FILES_IN_FOLDERS}
    return {name: faults for name, faults in found.items() if faults}


def test_folders_import_in_one_direction() -> None:
    assert faults(wrong_directions) == {}


def test_extensions_import_the_interface() -> None:
    assert faults(past_the_interface) == {}


def test_folders_are_small_and_have_a_docstring() -> None:
    for folder in {path.parent for path in FILES_IN_FOLDERS}:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder
        assert ast.get_docstring(parsed((folder / "__init__.py").read_text())), folder


def test_there_are_no_import_cycles() -> None:
    imports = {
        module: {each for name in imported(path.read_text()) for each in leads_to(name)}
        for module, path in MODULES.items()
    }
    assert in_circles(imports) == set()


def test_pure_files() -> None:
    assert {name: found for name in PURE if (found := impurities((ROOT / name).read_text()))} == {}


def test_the_checks_find_wrong_imports() -> None:
    inside = "def f():\n    from telegrad._core.agent import peer"
    assert wrong_directions("_core/wire", inside) == ["telegrad._core.agent.peer"]
    assert wrong_directions("_core/agent", "from telegrad._core.wire import frames") == []
    assert wrong_directions("optim", "from telegrad.rpc import Future") == ["telegrad.rpc"]
    assert past_the_interface("weights", inside) == ["telegrad._core.agent.peer"]
    assert past_the_interface("weights", "from telegrad import rpc, weights\nimport telegrad.ext.calls") == []
    assert past_the_interface("rpc", inside) == []
    assert impurities("def f():\n    import torch.nn") == {"torch"}
    assert in_circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"a"}}) == {"a", "b", "c"}
    assert leads_to("telegrad.rpc.RRef") == {"telegrad._core.rpc.rref"}
    assert (
        leads_to("telegrad._core.worker.current.agent")
        == leads_to("telegrad._core.worker.current")
        == {"telegrad._core.worker.current"}
    )
    assert {"telegrad.pipeline", "telegrad._core.modules.remote_module"} == leads_to("telegrad.nn")
    assert leads_to("torch.nn") == set()


def test_public_names_exist() -> None:
    for path in FILES:
        if path.parent.name == "boot":  # it is run
            continue
        try:
            module = importlib.import_module(dotted(path))
        except ImportError as error:
            if "pip install 'telegrad[torchrl]'" not in str(error):  # the only extra that developers need not install
                raise
            continue
        assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == [], path


def test_files_have_at_most_450_lines() -> None:
    lines = {path: [line for line in path.read_text().splitlines() if line.lstrip()[:1] != "#"] for path in FILES}
    assert {path: len(own) for path, own in lines.items() if len(own) > 450} == {}


def test_launchers_and_outside_commands_do_not_import_torch() -> None:
    modules = ("launch.local", "launch.worker_command", "launch.supervisor", "insight.command", "insight.seen_groups")
    program = f"import sys; {'; '.join(f'import telegrad.{each}' for each in modules)}; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout == "False\n"


def test_finalizers_use_no_global_while_the_interpreter_ends() -> None:
    """The globals of a module are None when the objects of a main program are finalized."""
    for source in (path.read_text() for path in FILES):
        if "def __del__" not in source:
            continue
        tree = parsed(source)
        named = [each for each in ast.walk(tree) if isinstance(each, ast.alias)]
        at_top = {each.asname or each.name for each in named}
        at_top |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        at_top |= {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                own = {each.arg for each in node.args.args}
                used = {each.id for line in node.body for each in ast.walk(line) if isinstance(each, ast.Name)}
                assert "is_finalizing" in own or not (used - own) & at_top


def test_new_tensors_name_their_device() -> None:
    """Callers may use `torch.device("cuda")` as a context, in which other tensors would be made there."""
    made = {each.__name__ for each in torch.utils._device._device_constructors()}
    for path in FILES:
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in made:
                is_torchs = ast.unparse(node.func.value) == "torch"
                given = {each.arg or ast.unparse(each.value) for each in node.keywords}
                assert not is_torchs or given & {"device", "options"}, (path, node.lineno)
