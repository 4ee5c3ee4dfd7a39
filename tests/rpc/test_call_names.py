"""Each function that the package itself sends to other workers has a name that users know."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import telegrad

# Functions that send one of their arguments, with its position; and the number of arguments if one gives a name.
SENDERS = {"rpc_async": 1, "rpc_sync": 1, "remote": 1, "call": 1, "call_async": 1, "PreparedCall": 0}
NAMED = {"call": 6, "PreparedCall": 5}
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(node: ast.AST) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def sent_by(tree: ast.AST, senders: dict[str, int]) -> Iterator[ast.expr]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or any(each.arg == "asked" for each in call.keywords):
            continue
        name = name_of(call.func)
        if senders.get(name, 99) < len(call.args) < NAMED.get(name, 99):
            sent = call.args[senders[name]]
            yield from (sent.body, sent.orelse) if isinstance(sent, ast.IfExp) else (sent,)


def wrappers_in(tree: ast.AST) -> dict[str, int]:
    """Return the functions of a module that send one of their arguments, with its position."""
    found: dict[str, int] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            for sent in map(name_of, sent_by(function, SENDERS)):
                if sent in parameters:
                    found[function.name] = parameters.index(sent)
    return found


def test_functions_that_the_package_sends_have_a_users_name() -> None:
    texts = {path: path.read_text() for path in pathlib.Path(telegrad.__file__).parent.rglob("*.py")}
    words = tuple(f"{name}(" for name in ("known_as", *SENDERS))
    trees = {path: ast.parse(text) for path, text in texts.items() if any(word in text for word in words)}
    defined = [each for tree in trees.values() for each in tree.body if isinstance(each, DEFINITIONS)]
    known = {each.name for each in defined if any("known_as(" in ast.unparse(mark) for mark in each.decorator_list)}
    unnamed, named = [], set()
    for path, tree in trees.items():
        there = {each.name for each in tree.body if isinstance(each, DEFINITIONS)}
        there |= {each.name for line in tree.body if isinstance(line, ast.ImportFrom) for each in line.names}
        for sent in sent_by(tree, SENDERS | wrappers_in(tree)):
            name = name_of(sent)
            named |= {name} & known
            if name not in known and not name.isupper() and name_of(getattr(sent, "value", sent)) in there:
                unnamed.append(f"{path}:{sent.lineno}: {name}")
    assert len(named) > 20
    assert not unnamed, "\n".join(unnamed)
