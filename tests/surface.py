"""The public names with their signatures and stability: `python -m tests.surface` writes them to surface.txt.

They are read from the source, so that this needs no torch and gives the same on every Python. The stability of names is
read from docs/stability.md. If something stable would break, nothing is written, unless `--breaking` confirms it.
"""

from __future__ import annotations

import ast
import copy
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

FILE = pathlib.Path(__file__).with_suffix(".txt")
PACKAGE = pathlib.Path(__file__).parents[1]
PROMISES = PACKAGE / "docs" / "stability.md"
STABLE, PROVISIONAL, INTERNAL = "stable", "provisional", "internal"
MODULES = (
    *("telegrad", "telegrad.rpc", "telegrad.rpc.functions", "telegrad.autograd", "telegrad.nn", "telegrad.optim"),
    *("telegrad.checkpoint", "telegrad.weights", "telegrad.insight", "telegrad.errors", "telegrad.compat"),
)
EXTENSIONS = "telegrad.ext"  # only names are listed for its modules, as the core has their signatures
HANDED_OUT = (("telegrad.launch.local", "LocalGroup"), ("telegrad._core.rpc.rref", "Proxy"))  # not importable

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """The module and the statement that define a name of the package; the statement of a module is None."""

    module: str
    node: ast.stmt | None


class Levels(NamedTuple):
    """The names that are not stable, by module: `name`, or `Class.member`. "all" stands for each name of a module."""

    provisional: dict[str, set[str]]
    internal: dict[str, set[str]]

    @classmethod
    def read(cls, page: str) -> Levels:
        rows = re.findall(r"^\| `(telegrad[\w.]*)` \|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
        columns = ({row[0]: set(re.findall(r"\ball\b|[\w.]+(?=`)", row[at])) for row in rows} for at in (1, 2))
        return cls(*columns)

    def of(self, module: str, name: str) -> str:
        """Return the level of a name of a module, or of a member of a class in it."""
        if name in self.internal.get(module, ()):
            return INTERNAL
        return PROVISIONAL if {name, "all"} & self.provisional.get(module, set()) else STABLE


def text() -> str:
    """Return the whole surface."""
    public = {definition(module, name) for module in MODULES for name in exported(module)}
    blocks = [_block(module, [(module, name) for name in exported(module)], public) for module in MODULES]
    blocks += [_names(module) for module in extension_modules()]
    return "\n".join([*blocks, _block("given by these, and not imported", HANDED_OUT, public)])


def broken(before: str, now: str) -> list[str]:
    """Return the stable lines of a surface that do not hold any more."""
    kept = _lines(now)
    return [
        " ".join([*place, line])
        for place, lines in _lines(before).items()
        for line in lines
        if line not in kept.get(place, ()) and not any(_serves(other, line) for other in kept.get(place, ()))
    ]


def _lines(surface: str) -> dict[tuple[str, ...], list[str]]:
    """Return the stable lines of a surface, by module and class."""
    found: dict[tuple[str, ...], list[str]] = {}
    module = name = ""
    for line in surface.splitlines():
        level, _, rest = line.strip().partition(" ")
        if line[:1].strip():
            module = line
        elif line[4:5].strip():
            name = rest if level == STABLE else ""
            if name:
                found.setdefault((module,), []).append(name)
        elif line and level != INTERNAL and name:
            found.setdefault((module, name), []).append(line.strip())
    return found


def _serves(now: str, before: str) -> bool:
    """Return True if a function takes every call that it took before: new parameters have defaults."""
    new, old = _parsed(now), _parsed(before)
    if new is None or old is None or ast.dump(_bare(new)) != ast.dump(_bare(old)):
        return False
    had, has = ([ast.unparse(arg) for arg in each.args.args] for each in (old, new))
    still = {argument.arg for argument in old.args.kwonlyargs}
    named = dict(zip([argument.arg for argument in new.args.kwonlyargs], new.args.kw_defaults, strict=True))
    return (
        has[: len(had)] == had
        and len(has) - len(new.args.defaults) <= len(had) - len(old.args.defaults)
        and still <= named.keys()
        and all(default for name, default in named.items() if name not in still)
    )


def _parsed(line: str) -> Function | None:
    """Return the parsed function, or None for other lines."""
    try:
        node = ast.parse(f"{line.removeprefix('classmethod ').removeprefix('staticmethod ')}: ...").body[0]
    except SyntaxError:
        return None
    return node if isinstance(node, Function) else None


def _bare(function: Function) -> Function:
    """Return the parts of a function that must stay: its name, its result, and variadic parameters."""
    bare = copy.deepcopy(function)
    bare.args.args, bare.args.defaults, bare.args.kwonlyargs, bare.args.kw_defaults = [], [], [], []
    return bare


def extension_modules() -> list[str]:
    """Return the names of the modules of `telegrad.ext`."""
    paths = sorted(path_of(EXTENSIONS).parent.glob("*.py"))
    return [f"{EXTENSIONS}.{path.stem}" for path in paths if path.stem != "__init__"]


def exported(module: str) -> list[str]:
    """Return the `__all__` of a module, or its classes if `__all__` is computed."""
    try:
        names: list[str] = ast.literal_eval(_assigned(module, "__all__"))
    except ValueError:
        names = sorted(node.name for node in _statements(_tree(module)) if isinstance(node, ast.ClassDef))
    return names


def definition(module: str, name: str) -> Definition | None:
    """Return the definition of a name of a module, or None if it is not in this package."""
    for node in _statements(_tree(module)):
        if isinstance(node, Function | ast.ClassDef) and node.name == name and not is_overload(node):
            return Definition(module, node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _imported(node.module or "", alias.name)
        if name in _targets(node):
            value = getattr(node, "value", None)
            further = definition(module, value.id) if isinstance(value, ast.Name) else None
            return further or Definition(module, node)
    return None


def is_overload(node: ast.stmt) -> bool:
    """Return True for an overload, which only type checkers read."""
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in getattr(node, "decorator_list", ()))


def _imported(module: str, name: str) -> Definition | None:
    if module.partition(".")[0] != "telegrad":
        return None
    return Definition(f"{module}.{name}", None) if path_of(f"{module}.{name}").exists() else definition(module, name)


def _names(module: str) -> str:
    level = Levels.read(PROMISES.read_text()).of(EXTENSIONS, "")
    return "\n".join([module, *(f"    {level} {name}" for name in sorted(exported(module))), ""])


def _block(title: str, names: Iterable[tuple[str, str]], public: set[Definition | None]) -> str:
    levels = Levels.read(PROMISES.read_text())
    lines = [line for module, name in sorted(names) for line in _marked(levels, module, name, public)]
    return "\n".join([title, *(f"    {line}" for line in lines), ""])


def _marked(levels: Levels, module: str, name: str, public: set[Definition | None]) -> Iterator[str]:
    """Yield the lines of a name, the first with its level, and internal members marked."""
    first, *members = _rendered(name, definition(module, name), public)
    yield f"{levels.of(module, name)} {first}"
    for line in members:
        member = re.sub(
            r"\W.*", "", re.sub(r"^ *(async |classmethod |staticmethod )?(def |property |constant )?", "", line)
        )
        hidden = levels.of(module, f"{name}.{member}") == INTERNAL
        yield line.replace("    ", f"    {INTERNAL} ", 1) if hidden else line


def _rendered(name: str, found: Definition | None, public: set[Definition | None]) -> Iterator[str]:
    if found is None:
        raise LookupError(f"{name} is exported, but not defined in the package")
    if found.node is None:
        yield f"module {name}"
    elif isinstance(found.node, Function | ast.ClassDef) and found.node.name != name:
        yield f"{name} = {found.node.name}"
    elif isinstance(found.node, ast.ClassDef):
        lines = _members(found, public)
        bases = ", ".join(_bases(found, public))
        yield f"class {name}({bases})" if bases else f"class {name}"
        yield from (f"    {lines[member]}" for member in sorted(lines))
    elif isinstance(found.node, Function):
        yield _signature(found.module, found.node)
    else:
        yield f"constant {name}"


def _members(of: Definition, public: set[Definition | None]) -> dict[str, str]:
    """Return a class's own members, and those of its bases that are not public."""
    assert isinstance(of.node, ast.ClassDef)
    found: dict[str, str] = {}
    for base in reversed(of.node.bases):
        hidden = _hidden(of.module, base, public)
        if hidden is not None:
            found |= _members(hidden, public)
    for node in of.node.body:
        if isinstance(node, Function) and _is_public(node.name):
            found[node.name] = _method(of.module, node)
        elif isinstance(node, ast.AnnAssign) and all(map(_is_public, _targets(node))):
            found[ast.unparse(node.target)] = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
        else:
            found |= {name: f"constant {name}" for name in _targets(node) if _is_public(name) and name not in found}
    found.pop("__slots__", None)
    return found


def _bases(of: Definition, public: set[Definition | None]) -> Iterator[str]:
    """Yield the bases that are public, or of other packages."""
    assert isinstance(of.node, ast.ClassDef)
    for base in of.node.bases:
        hidden = _hidden(of.module, base, public)
        if hidden is None:
            yield ast.unparse(base)
        else:
            yield from _bases(hidden, public)


def _hidden(module: str, base: ast.expr, public: set[Definition | None]) -> Definition | None:
    found = definition(module, base.id) if isinstance(base, ast.Name) else None
    return None if found in public or found is None or not isinstance(found.node, ast.ClassDef) else found


def _method(module: str, node: Function) -> str:
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    if "property" in marks:
        return f"property {node.name} -> {ast.unparse(node.returns) if node.returns else '?'}"
    kind = next((f"{mark} " for mark in ("classmethod", "staticmethod") if mark in marks), "")
    return kind + _signature(module, node)


def _signature(module: str, node: Function) -> str:
    """Return the signature, with the values of constants in place of their names."""
    args = copy.copy(node.args)
    args.defaults = [_value(module, default) for default in args.defaults]
    args.kw_defaults = [default and _value(module, default) for default in args.kw_defaults]
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{word} {node.name}({ast.unparse(args)}) -> {ast.unparse(node.returns) if node.returns else '?'}"


def _value(module: str, default: ast.expr) -> ast.expr:
    found = definition(module, default.id) if isinstance(default, ast.Name) else None
    value = getattr(found.node, "value", None) if found is not None else None
    return value if isinstance(value, ast.expr) else default


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name.endswith("__")


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those under an `if`."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If | ast.With) else [node]


def _targets(node: ast.stmt) -> list[str]:
    """Return the names that a statement assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _assigned(module: str, name: str) -> ast.expr:
    found = definition(module, name)
    assert found is not None
    assert isinstance(found.node, ast.Assign)
    return found.node.value


trees: dict[str, ast.Module] = {}


def _tree(module: str) -> ast.Module:
    if module not in trees:
        trees[module] = ast.parse(path_of(module).read_text())
    return trees[module]


def path_of(module: str) -> pathlib.Path:
    place = PACKAGE.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


if __name__ == "__main__":
    lost = broken(FILE.read_text(), text())
    if lost and sys.argv[1:] != ["--breaking"]:
        sys.exit("\n    ".join(["stable, and so to be deprecated first (docs/stability.md), or --breaking:", *lost]))
    FILE.write_text(text())
