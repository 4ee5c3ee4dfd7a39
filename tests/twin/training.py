"""Autograd contexts, modules and optimizers in the one process."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.twin.calls import RRef, remote_in
from tests.twin.world import Stays, World


class Context:
    def __init__(self, number: int) -> None:
        self.number = number
        self.gradients: dict[int, tuple[Tensor, Tensor]] = {}


@contextlib.contextmanager
def context_in(world: World) -> Iterator[int]:
    made = world.context = Context(len(world.contexts))
    world.contexts[made.number] = made
    try:
        yield made.number
    finally:
        world.context = None


def backward_in(world: World) -> Callable[..., None]:
    def backward(
        number: int,
        roots: Any,
        retain_graph: bool = False,
        *,
        mode: str = "",
        create_graph: bool = False,
        step: Any = None,
    ) -> None:
        context = world.contexts[number]
        found = [
            root._found() if isinstance(root, RRef) else root
            for root in (roots if isinstance(roots, list) else [roots])
        ]
        leaves = leaves_of(found)
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = context.gradients.get(id(leaf), (leaf, None))[1]
        try:
            torch.autograd.backward(found, retain_graph=retain_graph or create_graph, create_graph=create_graph)
            for leaf in leaves:
                if leaf.grad is not None:
                    context.gradients[id(leaf)] = leaf, leaf.grad
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient
        if step is not None:
            step.step(number)

    return backward


def leaves_of(roots: Iterable[Tensor]) -> list[Tensor]:
    stack, seen, found = [root.grad_fn for root in roots], set(), []
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        stack += [following for following, _ in node.next_functions]
    return found


def gradients_in(world: World) -> Callable[[int], Any]:
    return lambda number: dict(world.contexts[number].gradients.values())


# Modules and optimizers


class RemoteModule(nn.Module, Stays):
    """A module that belongs to one worker."""

    reference: RRef

    def __init__(self, place: str, module_cls: Any, args: Any = (), kwargs: Any = None) -> None:
        super().__init__()
        worker = place.partition("/")[0]
        self.__dict__["reference"] = remote_in(self.world)(worker, module_cls, args, kwargs)
        self.reference._found()

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.reference.rpc_sync(), name)(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("__call__", *args, **kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference.rpc_async().__getattr__("__call__")(*args, **kwargs)

    def get_module_rref(self) -> Any:
        return self.reference

    def remote_parameters(self, recurse: bool = True) -> list[Any]:
        owner = self.reference.owner_number
        return [self.world.kind(RRef)(each, owner) for each in self.reference.value.parameters(recurse)]

    def train(self, mode: bool = True) -> Any:
        self.reference.value.train(mode)
        return super().train(mode)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        own = {prefix + name: copy.deepcopy(each) for name, each in self.reference.value.state_dict().items()}
        if destination is None:
            return own
        destination.update(own)
        return destination

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.reference.value.load_state_dict(state, strict)

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        own = {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}
        self.load_state_dict(own)


def parameters_of(model: Any) -> list[Tensor]:
    if isinstance(model, RRef):
        model = model._found()
    if isinstance(model, Tensor):
        return [model]
    found: list[Tensor] = []
    for module in model.modules():
        found += parameters_of(module.reference) if isinstance(module, RemoteModule) else module.parameters(False)
    return list(dict.fromkeys(found))


def optimizer_in(world: World) -> Any:
    """Return the constructor of distributed optimizers: of torch's, over the parameters of all workers."""

    def make(kind: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        kept: dict[int, Tensor] = {}

        def accumulate(self: Any, number: int) -> None:
            gradients = world.contexts[number].gradients
            kept.update({id(each): _sum(kept, gradients, each) for each in all_of(self) if id(each) in gradients})

        def step(self: Any, number: int) -> None:
            gradients = world.contexts[number].gradients
            with _gradients_set(all_of(self), lambda each: _sum(kept, gradients, each)):
                kind.step(self)
            kept.clear()

        methods = {
            "step": step,
            "accumulate": accumulate,
            "clipped": lambda self, *given: Clipped(world, self, given),
            "state_dict": lambda self: copy.deepcopy(kind.state_dict(self)),  # see docs/training.md
        }
        own = type(kind.__name__, (kind,), methods)
        groups = [
            {**group, "params": [each for one in group["params"] for each in parameters_of(one)]}
            for group in (each if isinstance(each, dict) else {"params": [each]} for each in params)
        ]
        if not isinstance(params[0], dict):
            groups = [{"params": [each for group in groups for each in group["params"]]}]
        return own(groups, *args, **kwargs)

    make.for_module = lambda kind, model, *args, **kwargs: make(kind, [{"params": [model]}], *args, **kwargs)  # type: ignore[attr-defined]
    return make


def _sum(kept: dict[int, Tensor], gradients: dict[int, tuple[Tensor, Tensor]], leaf: Tensor) -> Any:
    found = [each for each in (kept.get(id(leaf)), gradients.get(id(leaf), (leaf, None))[1]) if each is not None]
    return sum(found[1:], found[0]) if found else None


class Clipped:
    def __init__(self, world: World, optimizer: Any, given: Any) -> None:
        self.world, self.optimizer, self.given = world, optimizer, given

    def step(self, number: int) -> None:
        self.norm = clip_in(self.world)(number, self.optimizer, *self.given)
        self.optimizer.step(number)


def all_of(optimizer: Any) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


@contextlib.contextmanager
def _gradients_set(leaves: list[Tensor], gradient_of: Callable[[Tensor], Any]) -> Iterator[None]:
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = gradient_of(leaf)
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def clip_in(world: World) -> Callable[..., Any]:
    def clip_grad_norm_(number: int, params: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        gradients = world.contexts[number].gradients
        leaves = all_of(params) if isinstance(params, torch.optim.Optimizer) else [r._found() for r in params]
        with _gradients_set(leaves, lambda each: gradients.get(id(each), (each, None))[1]):
            return nn.utils.clip_grad_norm_(leaves, max_norm, norm_type)

    return clip_grad_norm_
