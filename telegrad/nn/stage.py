"""A stage of a pipeline on its worker, and what comes into it and leaves it: values as bundles."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from telegrad.atfork import in_child, renewed
from telegrad.errors import UsageError
from telegrad.nn.hosted import device_of, moved
from telegrad.rpc import RRef
from telegrad.rpc.turns import Turns
from telegrad.wire.pickling import decode, encode

# Of the process: a module is one, in however many pipelines.
_turns: WeakKeyDictionary[nn.Module, Turns] = WeakKeyDictionary()
_lock = renewed(threading.Lock())  # guards _turns
in_child(_turns.clear)  # those that threads of the parent have never end


class Stage:
    """Micro-batches go through it one by one, as its module may keep state."""

    def __init__(self, module: RRef[nn.Module], position: str) -> None:
        self._module = module.local_value()
        self.name = f"{position} of a Pipeline ({type(self._module).__name__})"
        with _lock:
            self._turns = _turns.setdefault(self._module, Turns())

    def run(self, value: Any) -> Any:
        with self._turns.taken():
            return self._module(self.near(value))

    # Weights that stages share

    def weight(self, name: str) -> Tensor:
        """A parameter, or what stands in the place of one that is borrowed."""
        path, _, last = name.rpartition(".")
        try:
            found = getattr(self._module.get_submodule(path), last)
        except AttributeError:
            found = None
        if not isinstance(found, Tensor):
            names = ", ".join(name for name, _ in self._module.named_parameters())
            raise UsageError(f"{self.name} has no parameter {name!r} that could be tied; it has {names}")
        return found

    def share_weight(self, name: str, weight: Tensor) -> None:
        """Another stage of this worker has the same parameter."""
        self._check_shape(name, weight)
        for holder, last in self._names_of(name):
            setattr(holder, last, weight)

    def borrow_weight(self, name: str) -> None:
        """From now on a parameter is another worker's: it is no parameter here, and gets gradients all the same."""
        weight = self.weight(name)
        borrowed = weight.detach().requires_grad_(weight.requires_grad)
        for holder, last in self._names_of(name):
            if last in holder._parameters:
                del holder._parameters[last]
                holder.register_buffer(last, borrowed)

    def _names_of(self, name: str) -> list[tuple[nn.Module, str]]:
        """All modules that have a parameter, which may be tied in the stage, too, and its name in each."""
        weight = self.weight(name)
        names = {name, *(each for each, own in self._module.named_parameters(remove_duplicate=False) if own is weight)}
        return [(self._module.get_submodule(path), last) for path, _, last in (each.rpartition(".") for each in names)]

    def set_weight(self, name: str, value: Tensor) -> None:
        """What the owner has lent."""
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

    def near(self, value: Any) -> Any:
        """On the module's accelerator, if it has one: devices of workers need not lead to one another as stages do."""
        device = device_of(self._module)
        return value if device is None or device.type in ("cpu", "meta") else moved(device, value)


class Bundle(NamedTuple):
    """A value with its tensors apart."""

    body: bytes
    tensors: Sequence[Tensor]
    places: list[int]  # of those that require gradients

    @property
    def trained(self) -> list[Tensor]:
        """The tensors that require gradients."""
        return [self.tensors[place] for place in self.places]

    def detached(self) -> Bundle:
        """As it is sent: its gradients come back by number."""
        return self._replace(tensors=[tensor.detach() for tensor in self.tensors])

    def value(self, trained: Sequence[Tensor]) -> Any:
        """With these in the places of those that require gradients."""
        tensors = list(self.tensors)
        for place, tensor in zip(self.places, trained, strict=True):
            tensors[place] = tensor
        return decode(self.body, tensors)


def bundled(value: Any, same_program: bool) -> Bundle:
    """`same_program`: it will be opened in a process that runs the same main program.

    Raises:
        UsageError: it holds references, which do not pass between stages.
    """
    body, tensors, references, _ = encode(value, same_program)
    if references:
        raise UsageError(
            f"what passes between the stages of a Pipeline cannot hold references, as {references[0]!r}: "
            "let the stage fetch what it refers to, with to_here()"
        )
    return Bundle(body, tensors, [place for place, tensor in enumerate(tensors) if tensor.requires_grad])
