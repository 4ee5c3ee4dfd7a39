"""What belongs to a checkpoint, and which worker has what of it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from telegrad.errors import UsageError
from telegrad.ext.arguments import is_path, shown
from telegrad.ext.modules import Branch, branches
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef

NO_LIMIT = 0  # seconds: a checkpoint takes as long as the disks need, as long as its owners get on


class Share(NamedTuple):
    """Something of the state that lives on one worker: a module, a parameter, or a share of an optimizer."""

    key: str  # in the state
    branch: Branch


def folder_of(function: str, state: Any, checkpoint_id: Any) -> str:
    """The folder's path; UsageError where the arguments are of other kinds."""
    is_mapping = isinstance(state, Mapping)
    others = [key for key in state if not isinstance(key, str)] if is_mapping else []
    if others or not is_mapping:
        fault = f"and its key {shown(others[0])} is no text" if others else f"not {shown(state)}"
        raise UsageError(
            f"the state of a checkpoint is a dictionary by names, {fault}: "
            f'write checkpoint.{function}({{"model": model}}, folder)'
        )
    if not is_path(checkpoint_id):
        raise UsageError(f"a checkpoint is in a folder: give its path (checkpoint_id), not {shown(checkpoint_id)}")
    return str(os.fspath(checkpoint_id))


def shares_of(state: Mapping[str, Any]) -> tuple[dict[str, list[Share]], dict[str, Any]]:
    """What each worker has of the state; and what is this worker's own, as it is saved."""
    shares: list[Share] = []
    own: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, (nn.Module, RRef)):
            shares += [Share(key, branch) for branch in branches(value)]
        elif isinstance(value, DistributedOptimizer):
            shares += [Share(key, Branch("", local)) for local in value.locals.values()]
        else:
            own[key] = value.state_dict() if hasattr(value, "state_dict") else value
    by_worker: dict[str, list[Share]] = {}
    for share in shares:
        by_worker.setdefault(share.branch.root.owner_name(), []).append(share)
    return by_worker, own


class Pickled:
    """A value that is written as one, since torch's planner would change it.

    The planner takes each mapping apart and names its parts by text. So it loses empty mappings, the types of keys and
    that of the mapping itself.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def pickled(value: Any) -> Any:
    """Return the value so that torch's planner does not take it apart."""
    return Pickled(value) if isinstance(value, (Mapping, list)) else value


def packed(value: Any) -> Any:
    """Return the value with all that torch's planner would change as `Pickled`."""
    if type(value) is list:
        return [packed(part) for part in value]
    if type(value) in (dict, OrderedDict) and value and all(type(key) is str for key in value):
        names = {key for key, part in value.items() if isinstance(part, (Mapping, list))}
        if not any(_prefixes(key) & names for key in value):  # else two parts could have one name
            return {key: packed(part) for key, part in value.items()}
    return pickled(value)


def unpacked(value: Any) -> Any:
    """Return what `packed` or `pickled` was given."""
    if type(value) is dict:
        return {key: unpacked(part) for key, part in value.items()}
    if type(value) is list:
        return [unpacked(part) for part in value]
    return value.value if type(value) is Pickled else value


def _prefixes(key: str) -> set[str]:
    """Return all that stands before a dot."""
    return {key[:place] for place, character in enumerate(key) if character == "."}
