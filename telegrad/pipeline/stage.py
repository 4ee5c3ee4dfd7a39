"""A stage of a pipeline on its worker; and the values that pass between stages, packed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from telegrad.errors import UsageError
from telegrad.ext.calls import Turns
from telegrad.ext.modules import device_of, moved
from telegrad.ext.processes import in_child, renewed
from telegrad.ext.references import RRef
from telegrad.ext.values import decode, encode

# Of the process: a module is one, in however many pipelines.
_turns: WeakKeyDictionary[nn.Module, Turns] = WeakKeyDictionary()
_lock = renewed(threading.Lock())  # guards _turns
in_child(_turns.clear)  # turns of the parent's threads never end here


class Stage:
    """A module of this worker, which takes micro-batches one by one, as it may keep state."""

    def __init__(self, module: RRef[nn.Module], position: str) -> None:
        self._module = module.local_value()
        self.name = f"{position} of a Pipeline ({type(self._module).__name__})"
        with _lock:
            self._turns = _turns.setdefault(self._module, Turns())

    def run(self, value: Any) -> Any:
        with self._turns.taken():
            return self._module(self.to_own_device(value))

    # Weights that stages share

    def weight(self, name: str) -> Tensor:
        """Return a parameter, or the buffer in the place of one of another worker."""
        path, _, last = name.rpartition(".")
        try:
            found = getattr(self._module.get_submodule(path), last)
        except AttributeError:
            found = None
        if not isinstance(found, Tensor):
            names = ", ".join(name for name, _ in self._module.named_parameters())
            raise UsageError(f"{self.name} has no parameter {name!r} that could be tied; it has {names}")
        return found

    def tie(self, name: str, weight: Tensor | None = None) -> None:
        """Put another stage's parameter in the place of one, under all names that it has here.

        Without `weight`, that is a parameter of another worker: here is a buffer then, which gets its value before each
        batch, and gradients.
        """
        own = self.weight(name)
        if weight is not None:
            self._check_shape(name, weight)
        replica = own.detach().requires_grad_(own.requires_grad)
        names = {name, *(each for each, other in self._module.named_parameters(remove_duplicate=False) if other is own)}
        for path, _, last in (each.rpartition(".") for each in names):
            holder = self._module.get_submodule(path)
            if weight is not None:
                setattr(holder, last, weight)
            elif last in holder._parameters:
                del holder._parameters[last]
                holder.register_buffer(last, replica)

    def set_weight(self, name: str, value: Tensor) -> None:
        """Give a replica its owner's value."""
        self._check_shape(name, value)
        weight = self.weight(name)
        if not torch.equal(weight, value):  # else another batch may be under way that has saved it
            with torch.no_grad():
                weight.copy_(value)

    def _check_shape(self, name: str, value: Tensor) -> None:
        own = self.weight(name)
        if own.shape != value.shape:
            raise UsageError(
                f"{self.name}: its parameter {name!r} has the shape {tuple(own.shape)}, and cannot be tied to one of "
                f"{tuple(value.shape)}"
            )

    def to_own_device(self, value: Any) -> Any:
        """Move a value to the module's accelerator, if it has one: device maps need not lead from stage to stage."""
        device = device_of(self._module)
        return value if device is None or device.type in ("cpu", "meta") else moved(device, value)


class PackedValue(NamedTuple):
    """A value with its tensors apart."""

    body: bytes
    tensors: Sequence[Tensor]
    positions: list[int]  # of the tensors that require gradients

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that require gradients."""
        return [self.tensors[position] for position in self.positions]

    def detached(self) -> PackedValue:
        """Return the value as it is sent: gradients come back by number."""
        return self._replace(tensors=[tensor.detach() for tensor in self.tensors])

    def value(self, differentiable: Sequence[Tensor]) -> Any:
        """Unpack, with these tensors in the places of those that require gradients."""
        tensors = list(self.tensors)
        for position, tensor in zip(self.positions, differentiable, strict=True):
            tensors[position] = tensor
        return decode(self.body, tensors)


def pack_value(value: Any, same_program: bool) -> PackedValue:
    """Pack a value, for a process that runs the same main program or another one.

    Raises:
        UsageError: it holds references, which do not pass between stages.
    """
    body, tensors, references, _ = encode(value, same_program)
    if references:
        raise UsageError(
            f"what passes between the stages of a Pipeline cannot hold references, as {references[0]!r}: "
            "let the stage fetch what it refers to, with to_here()"
        )
    return PackedValue(body, tensors, [position for position, tensor in enumerate(tensors) if tensor.requires_grad])
