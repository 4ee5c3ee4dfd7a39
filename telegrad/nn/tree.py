"""The parts of a model that is spread over workers: modules, and where each is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from telegrad.errors import UsageError
from telegrad.nn.remote_module import RemoteModule, apart
from telegrad.rpc import RRef, rpc_async
from telegrad.rpc.together import together

Model = nn.Module | RRef[Any]

OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Branch(NamedTuple):
    """A module, or a parameter that stands alone, that lives on one worker as a whole."""

    name: str  # in the model; empty where it is the whole
    root: RRef[Any]


def branches(model: Model) -> list[Branch]:
    """All branches of a model: its own modules, and those of others to which its modules hold references.

    References are followed where they are attributes of a module, or in lists, tuples and dictionaries that are, from
    worker to worker. Those to anything but modules and parameters are left alone.
    """
    if isinstance(model, RemoteModule):
        model = model.module_rref
    elif isinstance(model, nn.Module):
        model = RRef(model)
    elif not isinstance(model, RRef):
        raise UsageError(f"a model is an nn.Module, a RemoteModule or an RRef to a module, not {type(model).__name__}")
    found: list[Branch] = []
    seen = {model._handle.id}
    wave = [Branch("", model)]
    while wave:
        named = {
            f"{branch.name or 'the model'} on {branch.root.owner_name()}, {number} of {len(wave)}": branch
            for number, branch in enumerate(wave, 1)
        }
        looked = together(named, lambda _, branch: rpc_async(branch.root.owner(), _look, (branch.root, branch.name)))
        wave = []
        for branch, (trained, further) in zip(named.values(), looked.values(), strict=True):
            if trained:
                found.append(branch)
            fresh = [each for each in further if each.root._handle.id not in seen]
            seen |= {each.root._handle.id for each in fresh}
            wave += fresh
    if not found:
        raise UsageError(f"the model {model!r} is neither a module nor does it refer to one")
    return found


def _look(root: RRef[Any], name: str) -> tuple[bool, list[Branch]]:
    """Whether the value is part of a model, and where it leads to."""
    value = root.local_value()
    if isinstance(value, RRef):
        return False, [Branch(name, value)]
    if isinstance(value, nn.Module):
        return True, list(references_of(value, name))
    return isinstance(value, nn.Parameter), []


def references_of(module: nn.Module, prefix: str = "") -> Iterator[Branch]:
    """Where a module of this worker leads to, itself or by one of its parts."""
    for name, part in module.named_modules():
        path = joined(prefix, name)
        if isinstance(part, RemoteModule):
            yield Branch(path.removesuffix(part._surplus).removesuffix("."), part.module_rref)
        else:
            for attribute, value in vars(part).items():
                if attribute not in OF_EVERY_MODULE:
                    yield from _references_in(value, joined(path, attribute))


def _references_in(value: Any, path: str) -> Iterator[Branch]:
    if isinstance(value, RRef):
        yield Branch(path, value)
    elif isinstance(value, RemoteModule):
        yield Branch(path, value.module_rref)
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _references_in(each, joined(path, str(index)))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _references_in(each, joined(path, str(key)))


def joined(prefix: str, name: str) -> str:
    """The name of a part of a part."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def parameters_of(branch: Branch) -> list[tuple[str, Tensor]]:
    """The parameters of a branch of this worker, by their names in the model."""
    value = branch.root.local_value()
    if isinstance(value, nn.Module):
        return [(joined(branch.name, name), parameter) for name, parameter in value.named_parameters()]
    if isinstance(value, Tensor):
        return [(branch.name, value)]
    raise UsageError(f"{branch.root!r} refers to neither a parameter nor a module, but to {type(value).__name__}")


def state_of(branch: Branch) -> dict[str, Any]:
    """The state of a branch of this worker, by the names in the model; without what lives on other workers."""
    value = branch.root.local_value()
    if isinstance(value, Tensor):
        return {branch.name: value.detach()}
    with apart():
        return {joined(branch.name, name): part for name, part in value.state_dict().items()}
