"""One stage of a pipeline on its worker, and the packed form of values between stages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from telegrad.errors import UsageError
from telegrad.ext.calls import FifoLock
from telegrad.ext.modules import device_of, moved
from telegrad.ext.processes import in_child, renewed
from telegrad.ext.references import RRef
from telegrad.ext.values import decode, encode

# Per process, because several pipelines may contain the same module.
_turns: WeakKeyDictionary[nn.Module, FifoLock] = WeakKeyDictionary()
_lock = renewed(threading.Lock())  # guards _turns
in_child(_turns.clear)  # the parent's threads, which hold turns, do not exist here


class Stage:
    """A module of this worker. It processes one micro-batch at a time, since it may have state."""

    def __init__(self, module: RRef[nn.Module], position: str) -> None:
        self._module = module.local_value()
        self.name = f"{position} of a Pipeline ({type(self._module).__name__})"
        with _lock:
            self._turns = _turns.setdefault(self._module, FifoLock())

    def run(self, value: Any) -> Any:
        with self._turns.taken():
            return self._module(self.to_own_device(value))

    # Weights that stages share

    def weight(self, name: str) -> Tensor:
        """Return a parameter, or the buffer that replaces one of another worker."""
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
        """Replace a parameter by that of another stage, under all names that it has here.

        Without `weight`, the other parameter is on another worker. Then a buffer replaces it, which gets the value of
        the other parameter before each batch, and gradients.
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
        """Copy the owner's value to a replica."""
        self._check_shape(name, value)
        weight = self.weight(name)
        if not torch.equal(weight, value):  # avoid a write: another pending batch may have saved the tensor
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
        """Move a value to the module's accelerator, if it has one: device maps need not cover all pairs of stages."""
        device = device_of(self._module)
        return value if device is None or device.type in ("cpu", "meta") else moved(device, value)


class PackedValue(NamedTuple):
    """A value with its tensors separate."""

    body: bytes
    tensors: Sequence[Tensor]
    positions: list[int]  # indices of the tensors that require gradients

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that require gradients."""
        return [self.tensors[position] for position in self.positions]

    def detached(self) -> PackedValue:
        """Return the value with detached tensors, as it is sent: gradients come back by index."""
        return self._replace(tensors=[tensor.detach() for tensor in self.tensors])

    def value(self, differentiable: Sequence[Tensor]) -> Any:
        """Unpack the value, with these tensors instead of those that require gradients."""
        tensors = list(self.tensors)
        for position, tensor in zip(self.positions, differentiable, strict=True):
            tensors[position] = tensor
        return decode(self.body, tensors)


def pack_value(value: Any, same_program: bool) -> PackedValue:
    """Pack a value for another process. `same_program`: it runs the same main program as this one.

    Raises:
        UsageError: the value contains references, which cannot be passed between stages.
    """
    body, tensors, references, _ = encode(value, same_program)
    if references:
        raise UsageError(
            f"values between the stages of a Pipeline cannot contain references such as {references[0]!r}: "
            "let the stage fetch the value with to_here()"
        )
    return PackedValue(body, tensors, [position for position, tensor in enumerate(tensors) if tensor.requires_grad])
