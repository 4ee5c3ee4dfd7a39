"""What was lost of a model with its workers, and is made anew as they come back."""

from __future__ import annotations

from torch import nn

from telegrad.agent.naming import known_as
from telegrad.nn.pipeline import Pipeline
from telegrad.nn.remote_module import RemoteModule
from telegrad.nn.tree import Model, references_of
from telegrad.rpc import RRef, rpc_async
from telegrad.rpc.lasting import revive
from telegrad.rpc.together import together
from telegrad.rref.letters import Id

Wave = list[RRef[nn.Module]]


def revive_model(model: Model, timeout: float) -> None:
    """See to it that all parts of a model are there, from worker to worker: those of a part that is new are new, too.

    Raises:
        CannotRestore: a part was made without `restore`.
        OwnerLost: its worker did not come back in time.
    """
    seen: set[Id] = set()
    if isinstance(model, nn.Module):
        wave = _revive_in(model, timeout)
    else:
        wave = [model]
        revive(model, timeout)
    while wave:
        fresh = {each._handle.id: each for each in wave if each._handle.id not in seen}
        seen |= fresh.keys()
        named = {
            f"{each.owner_name()}, {number} of {len(fresh)}": each for number, each in enumerate(fresh.values(), 1)
        }
        found = together(
            named, lambda _, each: rpc_async(each.owner(), _revive_further, (each, timeout), timeout=timeout)
        )
        wave = [each for further in found.values() for each in further]


def _revive_in(module: nn.Module, timeout: float) -> Wave:
    """The same for what a module of this worker refers to, which it gives."""
    for part in module.modules():
        if isinstance(part, Pipeline | RemoteModule):
            part.recover(timeout)
    found = [branch.root for branch in references_of(module)]
    for each in found:
        revive(each, timeout)
    return found


@known_as("telegrad.recover")
def _revive_further(root: RRef[nn.Module], timeout: float) -> Wave:
    """At the owner of a part."""
    value = root.local_value()
    if isinstance(value, RRef):
        revive(value, timeout)
        return [value]
    return _revive_in(value, timeout) if isinstance(value, nn.Module) else []
