"""The main program of a process: the names that it defines, and its import by workers started for it.

A worker without a program of its own imports the driver's file under the name `__mp_main__`, as multiprocessing does in
a spawned child. Code under `if __name__ == "__main__"` does not run there. This module imports no torch, because
`telegrad.local` starts its workers before it imports torch.
"""

import ast
import builtins
import copyreg
import hashlib
import importlib.util
import json
import os
import sys
from collections import deque
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from telegrad._core.private_files import open_regular
from telegrad.errors import UsageError

MAIN = "__main__"
SPAWNED_MAIN = "__mp_main__"  # the name multiprocessing gives to the main module of a spawned child
GUARD = 'if __name__ == "__main__":'

ATOMS = frozenset({int, float, bool, complex, str, bytes, type(None)})
MOST = 10_000  # objects examined per global
NO_DATA = (type, FunctionType, ModuleType)
_NAMESPACES = {("argparse", "Namespace"), ("types", "SimpleNamespace")}
_MOST_DIGESTS = 1000  # globals whose data the workers of `telegrad.local` compare with their own

importing: list[str] = []  # the file being imported as main program
own_data: dict[str, str] = {}  # digests of the imported main program's globals, after the import
differing: set[str] = set()  # globals whose data was other at the driver when it started this worker
serves_torch = False  # True in the compatibility mode, which sets it
hosts = False  # True if this process started workers that import its program; read without a lock


class Program(NamedTuple):
    """Data by which another process finds a program."""

    key: str
    path: str = ""  # path of its file
    module: str = ""  # its module name if `python -m` ran it
    guarded: bool = False  # it has a guard: importing it does not run it again
    serves_torch: bool = False  # there, `torch.distributed.rpc` is Telegrad's
    argv: tuple[str, ...] = ()  # its arguments, which its import may read


class ProgramSource(NamedTuple):
    """The names of a program, by the place where its source binds them."""

    guarded: bool
    top: frozenset[str]  # at the top level, outside of the guard
    main: frozenset[str]  # under the guard
    declared: frozenset[str]  # by `global` in a function
    stars: bool  # `import *` binds further, unknown names
    lines: frozenset[int]  # of the guard


def fingerprint_of(path: Any) -> str:
    """Return a fingerprint of the file of a program; "" if there is none, as for a notebook or a prompt."""
    try:
        with open_regular(path) as file:
            return hashlib.sha256(os.path.basename(path).encode() + b"\0" + file.read()).hexdigest()[:32]
    except (OSError, TypeError):
        return ""


def find(key: str) -> Program:
    """Return the data by which other processes find the main program of this process."""
    module = sys.modules.get(MAIN)
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not os.path.isfile(path):
        return Program(key, serves_torch=serves_torch)
    spec = getattr(module, "__spec__", None)
    path = os.path.abspath(path)
    return Program(key, path, getattr(spec, "name", ""), source_of(path).guarded, serves_torch, tuple(sys.argv))


@lru_cache(8)
def source_of(path: str) -> ProgramSource:
    """Return the names of a program; none if its file is not Python source."""
    try:
        with open_regular(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return ProgramSource(False, frozenset(), frozenset(), frozenset(), False, frozenset())
    guards = [node for node in tree.body if isinstance(node, ast.If) and _is_guard(node.test)]
    main = {name for guard in guards for node in guard.body for name in _bound(node)}
    rest = [node for node in tree.body if node not in guards]
    rest += [node for guard in guards for node in guard.orelse]
    top = {name for node in rest for name in _bound(node)}
    declared = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    lines = {line for guard in guards for node in guard.body for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return ProgramSource(
        bool(guards), frozenset(top), frozenset(main), frozenset(declared), "*" in top, frozenset(lines)
    )


def _is_guard(test: ast.expr) -> bool:
    """Return True for a comparison of `__name__` with "__main__", possibly as part of a conjunction."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_guard, test.values))
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = (test.left, test.comparators[0])
    return any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides) and any(
        isinstance(side, ast.Constant) and side.value == MAIN for side in sides
    )


def _bound(node: ast.AST) -> set[str]:
    """Return the names that a statement binds or deletes, except those local to functions and classes in it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return set()
    names = set()
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        names.add(node.id)
    elif isinstance(node, ast.alias):
        names.add(node.asname or node.name.partition(".")[0])
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        names.add(node.name)
    return names.union(*map(_bound, ast.iter_child_nodes(node)))


# Data of the program's globals


def data_of(program: Program, names: dict[str, Any]) -> dict[str, str]:
    """Return the digests of the globals that the top level of a program has bound, except numbers and texts."""
    top = source_of(program.path).top
    found = [each for each in sorted(top & names.keys()) if type(names[each]) not in ATOMS and each[0] != "_"]
    return {each: digest_of(names[each]) for each in found[:_MOST_DIGESTS]}


def digest_of(value: Any) -> str:
    """Return a digest of the numbers and texts in a value: in containers, and in public attributes of data classes.

    All other objects, such as tensors, count by their class alone: each process may have its own, like a model that it
    trains.
    """
    found: list[str] = []
    seen: set[int] = set()
    todo = [value]
    while todo and len(found) < MOST:
        each = todo.pop()
        kind: Any = type(each)
        found.append(_text(each) if kind in ATOMS else kind.__qualname__)
        if kind in ATOMS or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            # Sorted by text, because keys of different types cannot be compared.
            known = {_text(key): key for key in each if type(key) in ATOMS}
            found += [str(len(each)), *sorted(known)]
            todo += [each[known[key]] for key in sorted(known)]
        elif kind in (list, tuple, deque):
            found.append(str(len(each)))
            todo += each
        elif kind in (set, frozenset):
            found += [str(len(each)), *sorted(_text(member) for member in each if type(member) in ATOMS)]
        elif (held := attributes_of(each)) is not None:
            todo.append(held)
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]


def _text(atom: Any) -> str:
    return hex(atom) if type(atom) is int else repr(atom)  # Python refuses the decimal digits of a very large integer


def attributes_of(thing: Any) -> dict[str, Any] | None:
    """Return the public data attributes of a class of a main program, or of an object that is meant to hold data."""
    kind = thing if isinstance(thing, type) else type(thing)
    holds_data = (kind.__module__, kind.__qualname__) in _NAMESPACES or hasattr(kind, "__dataclass_fields__")
    is_known = kind.__module__ in (MAIN, SPAWNED_MAIN) or (kind is not thing and holds_data)
    own: Any = getattr(thing, "__dict__", None) if is_known and (kind is thing or is_plain(kind)) else None
    return own and {key: each for key, each in own.items() if key[:1] != "_" and not hasattr(type(each), "__get__")}


def is_plain(kind: Any) -> bool:
    """Return True if pickle saves the objects of a class by their attributes."""
    ways = kind.__reduce_ex__, kind.__reduce__
    return kind not in copyreg.dispatch_table and ways == (object.__reduce_ex__, object.__reduce__)


# Importing the program


def to_text(program: Program) -> str:
    """Return a program as a command-line argument of a worker that will import it, with its data here."""
    return json.dumps([program.path, program.module, program.argv, data_of(program, vars(sys.modules[MAIN]))])


def adopt(text: str, name: str) -> None:
    """Import the program of a command-line argument as the main module of this process; raise the import's errors."""
    path, module, argv, data = json.loads(text)
    program = Program("", path, module, argv=tuple(argv))
    try:
        names = vars(load(program, as_main=True))
        own_data.update({each: digest_of(names[each]) for each in data if each in names})
        differing.update(each for each, digest in own_data.items() if data[each] != digest)
    except BaseException:
        print(
            f"telegrad: worker {name!r} could not import {path}, which has the functions that it runs: put the code "
            f"for the driver alone under `{GUARD}`",
            file=sys.stderr,
        )
        raise


def load(program: Program, as_main: bool) -> ModuleType:
    """Import a program, with its arguments, under the name `__mp_main__`; if `as_main`, also as `__main__`."""
    module = ModuleType(SPAWNED_MAIN)
    code = _code_of(program, module)
    if as_main:
        sys.modules[MAIN] = sys.modules[SPAWNED_MAIN] = module
    # `multiprocessing`, which torch imports, also registers the main module of the process as `__mp_main__`. That entry
    # may be replaced. A program that was imported earlier keeps the name.
    elif sys.modules.get(SPAWNED_MAIN) in (None, sys.modules[MAIN]):
        sys.modules[SPAWNED_MAIN] = module  # dataclasses and pickle look up a class's module by its name
    # The import sees the arguments of the program, as in its own process: its top level may parse them. A worker that
    # adopts the program keeps them.
    own, sys.argv = sys.argv, list(program.argv)
    importing.append(program.path)
    try:
        exec(code, vars(module))
    finally:
        importing.remove(program.path)
        if not as_main:
            sys.argv = own
    return module


def _code_of(program: Program, module: ModuleType) -> CodeType:
    spec = importlib.util.find_spec(program.module) if program.module else None
    about: dict[str, Any] = {"__file__": program.path, "__builtins__": builtins, "__cached__": None}
    loader: Any = SourceFileLoader(SPAWNED_MAIN, program.path)
    if spec is not None and spec.loader is not None and spec.origin == program.path:
        about |= {"__spec__": spec, "__package__": spec.parent, "__loader__": spec.loader}
    else:
        about |= {"__loader__": loader, "__package__": ""}
    vars(module).update(about)
    code: CodeType = loader.source_to_code(loader.get_data(program.path), program.path)
    return code


def matches(program: Program) -> bool:
    """Return True if this host has the same program file as the sender, and may import it."""
    return program.guarded and fingerprint_of(program.path) == program.key


def check_not_imported(call: str) -> None:
    """Refuse to start or join a group while a worker imports the program, which would repeat that without end; raise
    UsageError if this process is importing the program."""
    if importing:
        raise UsageError(
            f"{call} was called at the top level of {importing[-1]}, which a worker imports to find its functions: put "
            f"it under `{GUARD}`, or into a function that is called there"
        )
