"""`help` of every public name shows its parameters, its result, and an example that runs."""

import ast
import doctest
import importlib
import inspect
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import telegrad
from tests import surface
from tests.cluster import free_port, processes

SECTIONS = ("Args", "Returns", "Raises", "Example")
# Objects that users only receive, and a name for a type, have nothing to try.
WITHOUT_EXAMPLE = {"BackendType", "Generation", "RpcBackendOptions", "_rref_context_get_debug_info"}
# These are in modules that need other libraries.
OPTIONAL = (
    ("telegrad.insight.prometheus", "register"),
    ("telegrad.insight.prometheus", "serve_metrics"),
    ("telegrad.insight.opentelemetry", "instrument"),
    ("telegrad.insight.opentelemetry", "uninstrument"),
    ("telegrad.weights.torchrl", "TelegradWeightSyncScheme"),
)
# Examples that begin or end a group run in a process of their own, which is no worker.
ALONE = {"local", "init_rpc", "shutdown", "serve", "TelegradOptions", "TensorPipeRpcBackendOptions", "TlsFiles"}
ALONE |= {"rendezvous_again", "generation", "stop_serving", "install", "uninstall", "installed"}


class Public(NamedTuple):
    """A public function or class, or a member of a public class."""

    module: str
    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    owner: str = ""

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def parameters(self) -> list[str]:
        if isinstance(self.node, ast.ClassDef):
            return []
        arguments = self.node.args
        plain = [each.arg for each in arguments.posonlyargs + arguments.args]
        plain = plain[1:] if self.owner and plain[:1] in (["self"], ["cls"]) else plain
        stars = [f"*{arguments.vararg.arg}"] if arguments.vararg else []
        double = [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
        named = [each.arg for each in arguments.kwonlyargs]
        return [each for each in plain + stars + named + double if each.strip("*_")]


def names() -> Iterator[Public]:
    """Yield all public names that the package defines, each once."""
    seen = set()
    levels = surface.Levels.read(surface.PROMISES.read_text())
    places = [(module, name) for module in surface.MODULES for name in surface.exported(module)]
    for module, name in [*places, *surface.HANDED_OUT, *OPTIONAL]:
        found = surface.definition(module, name)
        if found is None or not isinstance(found.node, surface.Function | ast.ClassDef) or found in seen:
            continue
        seen.add(found)
        yield Public(module, name, found.node)
        for member in (
            found.node.body if isinstance(found.node, ast.ClassDef) and (module, name) not in OPTIONAL else ()
        ):
            if not isinstance(member, surface.Function) or member.name.startswith("_") or surface.is_overload(member):
                continue
            if levels.of(module, f"{name}.{member.name}") != surface.INTERNAL:
                yield Public(module, member.name, member, name)


NAMES = list(names())
TOLD = [each for each in NAMES if each.module != "telegrad.errors"]
EXAMPLES = [each for each in NAMES if ">>> " in each.doc]


def label(public: Public) -> str:
    return ".".join(part for part in (public.module, public.owner, public.name) if part)


def sections(doc: str) -> dict[str, str]:
    """Return the text of each section; the summary before the first one has the name ""."""
    parts = re.split(r"^(\w+):\n(?=    )", f"{doc}\n", flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def listed(section: str) -> list[str]:
    return re.findall(r"^    ([*\w.]+):", section, re.MULTILINE)


def referred(public: Public) -> list[str]:
    """Return the parameters of docstrings that this one refers to by "As `name`", of the same class or of `rpc`."""
    names = re.findall(r"\b[Aa]s (?:for )?`(?:rpc\.)?(\w+)`", public.doc)
    found = [each for each in NAMES if each.name in names and each.owner in ("", public.owner) and each != public]
    return [parameter for each in found for parameter in listed(sections(each.doc).get("Args", ""))]


def foreign(public: Public) -> bool:
    """Return True if a method overrides one of another package, whose documentation has the rest."""
    kind = getattr(importlib.import_module(public.module), public.owner, None)
    bases = [] if kind is None else [base for base in kind.__mro__ if not base.__module__.startswith("telegrad")]
    return any(public.name in vars(base) for base in bases)


def test_a_public_name_has_a_docstring_of_known_sections() -> None:
    for public in NAMES:
        assert public.doc, label(public)
        found = list(sections(public.doc))[1:]
        assert found == [each for each in SECTIONS if each in found], label(public)
        first = public.doc.partition("\n\n")[0]
        assert first.rstrip().endswith((".", ":")), f"{label(public)}: a summary is a sentence"


def test_a_docstring_describes_its_parameters() -> None:
    for public in TOLD:
        check_parameters(public)


def check_parameters(public: Public) -> None:
    parameters, node = public.parameters, public.node
    told = sections(public.doc)
    if isinstance(node, ast.ClassDef):
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        begin = next((each for each in functions if each.name == "__init__"), None)
        levels = surface.Levels.read(surface.PROMISES.read_text())
        if begin is None or levels.of(public.module, f"{public.name}.__init__") == surface.INTERNAL:
            return
        parameters = Public(public.module, "__init__", begin, public.name).parameters
        told = told if "Args" in told else sections(ast.get_docstring(begin) or "")
    elif foreign(public) and "Args" not in told:
        return
    own, others = listed(told.get("Args", "")), referred(public)
    assert own == [each for each in parameters if each in own or each not in others]
    gives = isinstance(node, surface.Function) and node.returns and ast.unparse(node.returns)
    assert not parameters or gives in (False, "None", "NoReturn") or "Returns" in told


def test_a_docstring_has_an_example() -> None:
    for public in TOLD:
        exempt = public.owner or any(public[:2] == each for each in (*surface.HANDED_OUT, *OPTIONAL))
        assert exempt or public.name in WITHOUT_EXAMPLE or "Example" in sections(public.doc), label(public)


def test_help_has_all_sections() -> None:
    text = inspect.getdoc(telegrad.rpc.rpc_sync) or ""
    assert list(sections(text)) == ["", *SECTIONS]


# Examples


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start two workers and a driver, in a folder of their own."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("examples"))
    try:
        with telegrad.local(2):
            yield
    finally:
        os.chdir(before)


def run(doc: str, name: str) -> str:
    """Run the examples of a docstring; return their failures."""
    from telegrad import rpc

    scope: dict[str, Any] = {"telegrad": telegrad, "rpc": rpc, "torch": torch, "nn": torch.nn, "__name__": "__main__"}
    scope["functions"] = rpc.functions
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(doc, scope, name, None, 0)
    wrong: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=flags).run(test, out=wrong.append, clear_globs=False)
    return "".join(wrong)


def run_alone(doc: str, name: str, folder: str) -> str:
    os.chdir(folder)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    return run(doc, name)


@pytest.mark.parametrize("public", [each for each in EXAMPLES if each.name not in ALONE], ids=label)
@pytest.mark.usefixtures("group")
def test_an_example_runs(public: Public) -> None:
    assert run(public.doc, label(public)) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("public", [each for each in EXAMPLES if each.name in ALONE], ids=label)
def test_an_example_runs_in_a_process_of_its_own(public: Public, tmp_path: pathlib.Path) -> None:
    with processes(1) as [process]:
        assert process.run(run_alone, public.doc, label(public), str(tmp_path)) == ""
