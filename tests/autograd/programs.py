"""Random programs over several workers, which can also run in a single place, without workers.

A program is a list of instructions, made from a seed alone. A transfer is a remote call on workers, and a copy in the
single place. Everything else is the same: gradients, the arguments of hooks, the number of runs of each node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import telegrad.autograd as autograd
from telegrad._core.worker import current
from telegrad.autograd.send_recv import RecvNode
from telegrad.errors import ContextEnded, UnusedSends
from telegrad.rpc import RRef, remote, rpc_async, rpc_sync
from tests.autograd import orders
from tests.autograd.functions import Told, recomputed
from tests.autograd.making import make

SIZE = 3
BOUND = 0.3

device = "cpu"  # the device of the leaves, and so of all tensors
step: Any = None  # rides with the last pass, if no other pass runs then
stages: dict[tuple[int, str], Stage] = {}  # the stages of the running programs


class Stage:
    """The part of a program on one worker or in the single place: its values and their records."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        self.hooked: dict[int, list[Any]] = defaultdict(list)  # by hook, the arguments of its calls
        self.ran: Counter[int] = Counter()  # by node, the number of runs
        self.took: dict[int, list[list[torch.Tensor | None]]] = defaultdict(list)  # by node, its gradients
        self.keep: list[Any] = []
        self.numbered: set[Any] = set()  # the nodes that have a number


class Counted(torch.autograd.Function):
    """A Python function that records the runs of its node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: Stage, number: int) -> torch.Tensor:
        ctx.stage, ctx.number = stage, number
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (_,) = ctx.saved_tensors
        orders.ran(ctx.number)
        ctx.stage.ran[ctx.number] += 1
        return gradient * 2, None, None


class Box:
    """A class of the user with tensors inside."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors


# Instructions on one worker


def _inplace(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = a * 1.5
    made[0] += b[1]
    return made.mul_(0.5)


OPERATIONS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: (a * b).tanh(),
    "addmm": lambda a, b: torch.addmm(a, a, b).sin(),
    "broadcast": lambda a, b: a[0] + b,
    "cat": lambda a, b: torch.cat([a[:1], b[1:]]),
    "unbind": lambda a, b: a.unbind(0)[1] * b,
    "split": lambda a, b: sum(part.sum() for part in (a * b).split(1)) + a,
    "view": lambda a, b: a.t().reshape(SIZE, SIZE) + b[:, :2].t().mean(),
    "in place": _inplace,
    "checkpoint": lambda a, b: checkpoint(lambda x, y: (x * y).sin(), a, b, use_reentrant=False),
    "reentrant checkpoint": lambda a, b: checkpoint(lambda x, y: (x * y).sin() + x, a, b, use_reentrant=True),
    "constant": lambda a, b: a.detach() * b,
    "no grad": lambda a, b: torch.no_grad()(torch.mul)(a, b),
}


def perform(key: int, worker: str, instruction: tuple[Any, ...]) -> None:
    stage = stages[key, worker]
    before = len(stage.values)
    _perform(stage, instruction)
    orders.renumber(stage.values[before:], stage.numbered)


def _perform(stage: Stage, instruction: tuple[Any, ...]) -> None:
    kind, *what = instruction
    values = stage.values
    if kind == "leaf":
        (seed,) = what
        made = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        made = made.mul_(0.5).to(device).requires_grad_()
        stage.leaves.append(made)
        values.append(made)
    elif kind == "operation":
        name, a, b = what
        values.append(OPERATIONS[name](values[a], values[b]))
    elif kind == "counted":
        number, a = what
        values.append(Counted.apply(values[a], stage, number))
    elif kind == "told":
        number, way, numbers = what
        values += Told.apply(stage, number, way, *(values[each] for each in numbers))
    elif kind == "recompute":
        numbers, a, b = what
        constant = values[b].detach()
        values.append(recomputed(lambda x: (x * constant).sin(), values[a], numbers))
    elif kind == "module":
        number, seed, a = what
        _add_module(stage, number, seed, values[a])
    elif kind == "embedding":
        seed, a = what
        table = torch.randn(5, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(device)
        stage.leaves.append(table.requires_grad_())
        values.append(torch.nn.functional.embedding(torch.tensor([0, 2, 2]).to(device), table, sparse=True) * values[a])
    else:
        _hang_hook(stage, kind, *what)


def _hang_hook(stage: Stage, kind: str, number: int, a: int) -> None:
    if kind == "leaf hook":
        stage.leaves[a].register_post_accumulate_grad_hook(lambda leaf: _called_after(stage, number, leaf.grad))
        return
    value = stage.values[a]
    if kind == "hook":
        if value.requires_grad:
            value.register_hook(lambda gradient: _called(stage, number, gradient))
    elif kind == "node hook":
        node = type(value.grad_fn)
        if node is not RecvNode and node.__name__ not in ("NoneType", "CloneBackward0"):
            value.grad_fn.register_hook(lambda given, _: stage.ran.update([number]))
    else:
        raise AssertionError(kind)


def _called(stage: Stage, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or not gradient.to_dense().any():  # a node that runs by hand gets zeros for a missing gradient
        return None
    stage.hooked[number].append(gradient.detach().to_dense().clone())
    return gradient.clamp(-BOUND, BOUND) if not gradient.is_sparse else None


def _called_after(stage: Stage, number: int, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        stage.hooked[number].append(gradient.to_dense().clone())


def _add_module(stage: Stage, number: int, seed: int, value: torch.Tensor) -> None:
    module = torch.nn.Linear(SIZE, SIZE, dtype=torch.float64).to(device)
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(drawn * 0.3)
        stage.leaves.append(parameter)
    module.register_full_backward_hook(lambda _, given, taken: _seen(stage, number, [*given, *taken]))
    stage.keep.append(module)
    stage.values.append(module(value))


def _seen(stage: Stage, number: int, gradients: list[torch.Tensor | None]) -> None:
    stage.hooked[number] += [each.detach().clone() for each in gradients if each is not None]


# Transfers


def give(key: int, worker: str, numbers: list[int], wrap: str) -> Any:
    return WRAPS[wrap]([stages[key, worker].values[number] for number in numbers])


def take(key: int, worker: str, wrapped: Any) -> None:
    stages[key, worker].values += UNWRAPS[type(wrapped)](wrapped)


def fetch(key: int, worker: str, source: str, numbers: list[int], wrap: str, way: str) -> None:
    """Get values from another worker; runs on the worker that gets them."""
    if way == "call":
        take(key, worker, rpc_sync(source, give, (key, source, numbers, wrap)))
    elif way == "future":
        take(key, worker, rpc_async(source, give, (key, source, numbers, wrap)).wait())
    else:
        take(key, worker, remote(source, give, (key, source, numbers, wrap)).to_here())


def push(key: int, worker: str, target: str, numbers: list[int], wrap: str, way: str) -> None:
    """Send values to another worker; runs on the worker that has them."""
    wrapped = give(key, worker, numbers, wrap)
    if way == "argument":
        rpc_sync(target, take, (key, target, wrapped))
    elif way == "shared":
        rpc_sync(target, take_from, (key, target, RRef(wrapped)))
    else:
        remote(target, take, (key, target), {"wrapped": wrapped}).to_here()


def take_from(key: int, worker: str, reference: RRef[Any]) -> None:
    take(key, worker, reference.to_here())


WRAPS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda ts: dict(enumerate(ts)),
    "box": Box,
}
UNWRAPS: dict[type, Callable[[Any], list[torch.Tensor]]] = {
    list: list,
    tuple: list,
    dict: lambda wrapped: list(wrapped.values()),
    Box: lambda box: box.tensors,
}


# Programs


class Outcome:
    """The results that must be the same in both places."""

    def __init__(self, places: list[Stage], gradients: list[dict[torch.Tensor, torch.Tensor]]) -> None:
        self.hooked = {key: calls for place in places for key, calls in place.hooked.items()}
        self.ran = sum((place.ran for place in places), Counter())
        self.took = {number: runs for place in places for number, runs in place.took.items()}
        self.gradients = [
            [gradient.get(leaf) for leaf in place.leaves] for place, gradient in zip(places, gradients, strict=True)
        ]


def root(key: int, worker: str, number: int) -> torch.Tensor:
    stage = stages[key, worker]
    made = stage.values[number].sum()
    orders.renumber([made], stage.numbered)
    return made


def run_in_one_place(seed: int) -> Outcome | None:
    """Return the outcome in a single place, or None if there is nothing to differentiate."""
    count, program, roots, variant = make(seed)
    places = [Stage() for _ in range(count)]
    for worker, place in enumerate(places):
        stages[seed, f"w{worker}"] = place
    for worker, (kind, *what) in program:
        if kind == "fetch":
            source, numbers, _, way = what
            given = [places[source].values[number] for number in numbers]
            places[worker].values += given if source == worker and way == "reference" else _copies(given)
        elif kind == "push":
            target, numbers, _, way = what
            given = [places[worker].values[number] for number in numbers]
            places[target].values += given if target == worker and way == "shared" else _copies(given)
        else:
            perform(seed, f"w{worker}", (kind, *what))
    found = [root(seed, f"w{worker}", number) for worker, number in roots]
    found = [each for each in found if each.requires_grad]
    if not found:
        return None
    torch.autograd.backward(found, retain_graph=variant != "once", create_graph=variant == "second order")
    if variant in TWICE:
        torch.autograd.backward(found)
    if variant == "second order":
        squares = [penalty(leaf.grad for leaf in place.leaves) for place in places]
        penalties = [each for each in squares if each is not None and each.requires_grad]
        if penalties:
            torch.autograd.backward(penalties)
    return Outcome(places, [{leaf: leaf.grad for leaf in place.leaves if leaf.grad is not None} for place in places])


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors; a tensor that occurs twice is copied once, as in a message."""
    made = {id(tensor): tensor.clone() for tensor in tensors}
    return [made[id(tensor)] for tensor in tensors]


TWICE = ("twice", "at once")


def penalty(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sum of the squares of gradients that have a graph."""
    squares = [gradient.pow(2).sum() for gradient in gradients if gradient is not None]
    return sum(squares[1:], squares[0]) if squares else None


def run_on_workers(seed: int) -> Outcome:
    """Run the program on workers, from the thread of the first worker."""
    count, program, roots, variant = make(seed)
    names = [f"w{worker}" for worker in range(count)]
    places = [Stage() for _ in names]
    for name, place in zip(names, places, strict=True):
        stages[seed, name] = place
    with autograd.context() as context:
        for worker, (kind, *what) in program:
            name = names[worker]
            if kind in ("fetch", "push"):
                function: Callable[..., None] = fetch if kind == "fetch" else push
                args = (seed, name, names[what[0]], *what[1:])
            else:
                function, args = perform, (seed, name, (kind, *what))
            if worker == 0:
                function(*args)
            else:
                rpc_sync(name, function, args)
        found: list[Any] = []
        for worker, number in roots:
            if places[worker].values[number].requires_grad:
                found.append(
                    root(seed, "w0", number)
                    if worker == 0
                    else remote(names[worker], root, (seed, names[worker], number))
                )
        _backward(context, found, variant)
        if variant == "second order":
            penalties = [remote(name, _penalty, (seed, name, context)) for name in names]
            penalties = [each for each in penalties if rpc_sync(each.owner(), _has_graph, (each,))]
            if penalties:
                autograd.backward(context, penalties)
        gradients: list[Any] = [
            autograd.get_gradients(context) if name == "w0" else rpc_sync(name, _gradients, (seed, name, context))
            for name in names
        ]
        gradients = [
            gradient if name == "w0" else dict(zip(place.leaves, gradient, strict=True))
            for name, place, gradient in zip(names, places, gradients, strict=True)
        ]
    assert all(leaf.grad is None for place in places for leaf in place.leaves), "something is in .grad"
    return Outcome(
        places, [{leaf: each for leaf, each in gradient.items() if each is not None} for gradient in gradients]
    )


def _backward(context: int, roots: list[Any], variant: str) -> None:
    if variant == "at once":
        for future in [autograd.backward_async(context, roots, retain_graph=True) for _ in range(2)]:
            future.wait()
        return
    if variant == "fast":
        try:
            autograd.backward(context, roots, mode="fast", step=step)
        except UnusedSends as error:
            raise Unused from error
        return
    twice = variant in TWICE
    first = None if twice else step
    autograd.backward(context, roots, retain_graph=twice, create_graph=variant == "second order", step=first)
    if twice:
        autograd.backward(context, roots, step=step)


class Unused(Exception):
    """A program that a fast pass cannot run."""


def _penalty(key: int, worker: str, context: int) -> torch.Tensor | None:
    return penalty(_gradients(key, worker, context))


def _has_graph(reference: RRef[Any]) -> bool:
    value = reference.local_value()
    return value is not None and value.requires_grad


def _gradients(key: int, worker: str, context: int) -> list[torch.Tensor | None]:
    try:
        found = autograd.get_gradients(context)
    except ContextEnded:
        found = {}
    return [found.get(leaf) for leaf in stages[key, worker].leaves]


def compare(seed: int, expected: Outcome, found: Outcome) -> None:
    for worker, (wanted, given) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        for number, (one, other) in enumerate(zip(wanted, given, strict=True)):
            what = f"gradient of leaf {number} of w{worker}"
            assert (one is None) == (other is None), f"{what}: {one} and {other}"
            if one is not None:
                assert one.is_sparse == other.is_sparse, f"{what}: sparse {one.is_sparse}, {other.is_sparse}"
                assert torch.allclose(one.to_dense(), other.to_dense()), f"{what}: {one} and {other}"
    assert expected.ran == found.ran, f"nodes ran {expected.ran} and {found.ran}"
    for number in expected.took.keys() | found.took.keys():
        runs, others = expected.took.get(number, []), found.took.get(number, [])
        assert len(runs) == len(others), f"node {number} ran {len(runs)} and {len(others)} times"
        for a, b in zip(chain(*runs), chain(*others), strict=True):
            same = a is b is None or (a is not None and b is not None and torch.allclose(a, b))
            assert same, f"node {number} took {a} and {b}"
    for number in expected.hooked.keys() | found.hooked.keys():
        calls, made = expected.hooked.get(number, []), found.hooked.get(number, [])
        assert len(calls) == len(made), f"hook {number} was called {len(calls)} and {len(made)} times"
        for x, y in zip(calls, made, strict=True):
            assert torch.allclose(x, y), f"hook {number} saw {x} and {y}"


def check(seed: int) -> bool:
    """Compare both outcomes; return True if there was something to compare."""
    try:
        expected = run_in_one_place(seed)
        if expected is None:
            return False
        with orders.watching() as passes:
            found = run_on_workers(seed)
        compare(seed, expected, found)
        if device == "cpu":  # on other devices, nodes run on threads of the engine, which are not watched
            orders.check(passes)
    except Unused:
        return False
    finally:
        for key in [key for key in stages if key[0] == seed]:
            del stages[key]
    return True


def left_over() -> dict[str, int]:
    return {"contexts": len(current.conductor().contexts), **current.references().counts()}
