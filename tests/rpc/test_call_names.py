"""Each function that the package itself sends to other workers, and each value, has a name that users know."""

import ast
import operator
import pathlib
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import telegrad
from telegrad import autograd, rpc
from telegrad._core.worker.current import Worker
from telegrad.errors import CannotEncode
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer

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


LOCK = threading.Lock()


class Typed:
    def method(self, first: int, second: int) -> None:
        pass


@rpc.actor
class Actor(Typed):
    pass


def stepping(module: RemoteModule, loss: Any) -> None:
    with autograd.context() as context_id:
        Pipeline([module]).forward_backward(context_id, torch.ones(2, 2), torch.ones(2, 2), loss)


@pytest.mark.filterwarnings("ignore::telegrad.errors.TelegradWarning")
def test_a_value_that_cannot_be_sent_has_the_place_that_the_user_gave_it(team: list[Worker]) -> None:
    bad: Any = LOCK

    def uses(*_: Any) -> Any:
        return bad

    group, module = rpc.group(["w1", "w0"]), RemoteModule("w1", nn.Linear, (2, 2))
    refs = group.remote(Typed)
    for ref in (rpc.remote("w1", Typed), rpc.remote("w1", Actor)):
        for proxy in (ref.rpc_sync(), ref.rpc_async(), ref.remote(), ref.rpc_stream()):
            check("argument 1", proxy.method, 1, bad)
            check("argument 'second'", partial(proxy.method, second=bad), 1)
    for way in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.rpc_stream):
        check("argument 1", way, "w1", pow, (2, bad))
        check("the variable `bad` that the function `uses` uses", way, "w1", uses)
    for idempotent in (partial(rpc.rpc_sync, "w1", idempotent=True), partial(group.rpc_sync, idempotent=True)):
        check("argument 1", idempotent, pow, (2, bad))
        check("argument 'exp'", idempotent, pow, (2,), {"exp": bad})
    for together in (group.rpc_sync, group.rpc_async, group.remote, group.gather):
        check("argument 1", together, pow, (2, bad))
    check("argument 1", partial(group.rpc_sync, reduce=operator.add), pow, (2, bad))
    check("the variable `bad` that argument 'reduce'", partial(group.rpc_sync, reduce=uses), pow, (2, 2))
    check("argument 'value'", group.broadcast, bad)
    check("argument 'value'", group.all_reduce, bad)
    check("the variable `bad` that argument 'op'", group.all_reduce, 1, uses)
    for proxies in (refs.rpc_sync(), refs.rpc_async(), refs.remote()):
        check("argument 1", proxies.method, 1, bad)
    check("argument 0", rpc.remote("w1", torch.ones, (2,)).mm, bad)
    check("argument 1", RemoteModule, "w1", nn.Linear, (2, bad))
    check("argument 'bias'", RemoteModule, "w1", nn.Linear, (2, 2), {"bias": bad})
    for forward in (module, module.forward, module.forward_async):
        check("argument 1", forward, torch.ones(2, 2), bad)
    check("the variable `bad` that argument 0", module.apply, uses)
    check("argument 'state_dict'['weight']", module.load_state_dict, {"weight": bad})
    optimizer = partial(DistributedOptimizer, torch.optim.SGD, module.remote_parameters())
    check("argument 0", optimizer, bad)
    check("argument 'lr'", partial(optimizer, lr=bad))
    optimizer = partial(DistributedOptimizer, torch.optim.SGD, [{"params": module.remote_parameters(), "lr": bad}])
    check("argument 'param_group'['lr']", optimizer)
    check("the variable `bad` that argument 'loss'", stepping, module, uses)


def check(place: str, act: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(CannotEncode, match=rf"^{re.escape(place)}\W.*cannot be sent: cannot pickle '_thread.lock'"):
        act(*args)
