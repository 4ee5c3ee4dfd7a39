"""The content of a checkpoint, and its distribution over workers."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from telegrad.errors import CannotEncode, UsageError
from telegrad.ext.feedback import is_path, short_repr
from telegrad.ext.modules import RemotePart, branches
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef

_CONTAINERS = (Mapping, list, tuple, set, frozenset)
NO_LIMIT = 0  # seconds: writing is limited only by the time without progress of an owner


class OwnerState(NamedTuple):
    """A part of the state on one worker: a module, a parameter, or a part of an optimizer."""

    key: str  # in the state
    branch: RemotePart


def folder_of(function: str, state: Any, checkpoint_id: Any) -> str:
    """Return the folder's path for all owners, whatever their current folders; raise UsageError for other types."""
    is_mapping = isinstance(state, Mapping)
    others = [key for key in state if not isinstance(key, str)] if is_mapping else []
    if others or not is_mapping:
        fault = f"and its key {short_repr(others[0])} is not a string" if others else f"not {short_repr(state)}"
        raise UsageError(
            f"the state of a checkpoint must be a dictionary by names, {fault}: "
            f'write checkpoint.{function}({{"model": model}}, folder)'
        )
    if not is_path(checkpoint_id):
        raise UsageError(
            f"a checkpoint is saved in a folder: give its path (checkpoint_id), not {short_repr(checkpoint_id)}"
        )
    return os.path.abspath(os.fsdecode(checkpoint_id))


def shares_of(state: Mapping[str, Any]) -> tuple[dict[str, list[OwnerState]], dict[str, Any]]:
    """Return the parts of the state by worker, and this worker's own values as they are saved."""
    shares: list[OwnerState] = []
    own: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, (nn.Module, RRef)):
            shares += [OwnerState(key, branch) for branch in branches(value)]
        elif isinstance(value, DistributedOptimizer):
            shares += [OwnerState(key, RemotePart("", local)) for local in value.locals.values()]
        elif has_method(value, "state_dict"):
            own[key] = value.state_dict()
        else:
            own[key] = value
            with suppress(RecursionError):  # a value that contains itself is refused later
                _check_inside(key, value if isinstance(value, _CONTAINERS) else ())
    by_worker: dict[str, list[OwnerState]] = {}
    for share in shares:
        by_worker.setdefault(share.branch.root.owner_name(), []).append(share)
    return by_worker, own


def has_method(value: Any, name: str) -> bool:
    """Return True if an object has the method. A class, whose objects may have it, is a plain value."""
    return hasattr(value, name) and not isinstance(value, type)


def _check_inside(name: str, value: Any) -> None:
    """Raise UsageError if a container has a model, or a similar object, which would be pickled and not loaded into."""
    for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(part, RRef) or has_method(part, "load_state_dict"):
            raise UsageError(
                f"{name}.{key} in the state is a {type(part).__name__} in a {type(value).__name__}, where it would not "
                f"be loaded: give it a name of its own in the state, such as {f'{name}.{key}'!r}"
            )
        if isinstance(part, _CONTAINERS):
            _check_inside(f"{name}.{key}", part)


def kind_of(tensor: Tensor) -> str:
    """Return the kind of a tensor that torch cannot write to a checkpoint, or ""."""
    kinds = {
        "meta": tensor.is_meta,
        "nested": tensor.is_nested,
        "quantized": tensor.is_quantized,
        "lazy": nn.parameter.is_lazy(tensor),
        str(tensor.layout): tensor.layout is not torch.strided,
        # torch writes subclasses but its own distributed ones by pickle, and then refuses to load them.
        type(tensor).__qualname__: type(tensor) not in (Tensor, nn.Parameter)
        and not type(tensor).__module__.startswith("torch.distributed"),
    }
    return next((f"a {kind} tensor" for kind, is_it in kinds.items() if is_it), "")


def check_tensors(name: str, value: Any) -> None:
    """Raise UsageError if torch cannot write a tensor in a value of the form that `packed` returns."""
    if type(value) in (dict, list):
        for key, part in value.items() if type(value) is dict else enumerate(value):
            check_tensors(f"{name}.{key}", part)
    elif isinstance(value, Tensor) and (kind := kind_of(value)):
        raise UsageError(
            f"a checkpoint cannot contain {name}, {kind}: save a dense tensor with its values instead, or leave it out"
        )


def cannot_save(name: str, reason: BaseException) -> CannotEncode:
    """Return the error for an entry that cannot be pickled."""
    return CannotEncode(
        f"the entry {name!r} of the state cannot be saved: {reason}. A checkpoint can have models, optimizers, objects "
        "with a state_dict, and values that pickle can write, such as numbers, strings, tensors, and lists and "
        "dictionaries of them"
    )


def check_names(ways: Iterable[Mapping[str, Sequence[str | int]]]) -> None:
    """Raise UsageError if values in different places of the state have the same name; `ways` are places by names."""
    found: dict[str, Sequence[str | int]] = {}
    for each in ways:
        for name, way in each.items():
            other = found.setdefault(name, way)
            if other != way:
                raise UsageError(
                    f"the keys {other[0]!r} and {way[0]!r} of the state both have a value {name!r} in the checkpoint: "
                    "rename one of them"
                )


class Pickled:
    """A value that is written as a unit; files name this class and module. torch's planner would take each mapping
    apart, and name its parts by text: it loses empty mappings, the types of keys and the type of the mapping."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def pickled(value: Any) -> Any:
    """Wrap a mapping or list, which torch's planner would take apart."""
    return Pickled(value) if isinstance(value, (Mapping, list)) else value


def packed(value: Any) -> Any:
    """Wrap the parts of a value that torch's planner would change as `Pickled`."""
    if type(value) is list:
        return [packed(part) for part in value]
    if type(value) in (dict, OrderedDict) and value and all(type(key) is str for key in value):
        names = {key for key, part in value.items() if isinstance(part, (Mapping, list))}
        prefixes = {key[:place] for key in value for place, character in enumerate(key) if character == "."}
        if not prefixes & names:  # else two parts could have the same name
            return {key: packed(part) for key, part in value.items()}
    return pickled(value)


def unpacked(value: Any) -> Any:
    """Return the value that `packed` or `pickled` was given."""
    if type(value) is dict:
        return {key: unpacked(part) for key, part in value.items()}
    if type(value) is list:
        return [unpacked(part) for part in value]
    return value.value if type(value) is Pickled else value
