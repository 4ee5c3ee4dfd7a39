"""A version as a reader sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from telegrad.errors import InvalidArgument
from telegrad.ext.arguments import checks
from telegrad.weights.load_version import load, load_by_load_state_dict, own_state, swap, tensors_of
from telegrad.weights.transfer.tree_layout import Layout

_MODULE = "a module, or its state dict"


class Version:
    """One whole version, from a subscriber. Its memory is kept while the version or one of its tensors exists.

    Other processes on this host read the same memory, so the tensors must not be written to. `number` counts from 1.

    Example:
        >>> publisher = telegrad.weights.Publisher("scale", {"scale": torch.ones(1)})
        >>> number = publisher.publish()
        >>> version = telegrad.weights.Subscriber("driver", "scale").newest()
        >>> version.number, version.state
        (1, {'scale': tensor([1.])})
        >>> publisher.close()
    """

    _layout: Layout | None

    def __init__(self, number: int, layout: Layout, memory: Tensor) -> None:
        self.number = number
        self._layout = layout
        self._memory = memory
        self._found: list[Tensor] = []
        self._state: Any = None

    @property
    def state(self) -> Any:
        """The published tree, with tensors in place of the publisher's."""
        if self._state is None:
            assert self._layout is not None
            self._state = self._layout.tree(self._tensors())
        return self._state

    def load_into(self, module: nn.Module | Mapping[str, Any]) -> None:
        """Copy the tensors into those of a module, or of a state dict.

        Args:
            module: a module, or its state dict.

        If a module's state is more than its parameters and buffers (hooks, an extra state, or its own way to load), the
        whole state is loaded by `load_state_dict`.

        Raises:
            InvalidArgument: names, shapes or types do not match, or tensors of the module share memory that cannot hold
                the published values; the message names them, and nothing was copied.
        """
        check_module(module)
        tensors, names = self._sources()
        own = own_state(module) if isinstance(module, nn.Module) else tensors_of(module)
        if own is None:
            assert isinstance(module, nn.Module)
            theirs = {name: tensors[number] for name, number in names.items()}
            load_by_load_state_dict(self.number, self.state, theirs, module)
        else:
            load(self.number, self._layout, tensors, names, own)

    def swap_into(self, module: nn.Module) -> None:
        """Make the parameters and buffers of a module use this version's memory, without a copy.

        The module must not write to them. A write would change them for this process only.

        Args:
            module: a module that only reads its tensors.

        Raises:
            InvalidArgument: names, shapes or types do not match, or the module's tensors share memory in a different
                way than those of the version; the message names them, and nothing was changed.
        """
        if not isinstance(module, nn.Module):
            checks.raise_invalid("module", "a module", module)
        own = own_state(module)
        if own is None:
            raise InvalidArgument(
                f"version {self.number} cannot be swapped into {type(module).__name__}, whose state is more than its "
                "parameters and buffers: load_into has it load the state"
            )
        tensors, names = self._sources()
        swap(self.number, {name: tensors[number] for name, number in names.items()}, own, module)

    def _tensors(self) -> list[Tensor]:
        if not self._found:
            assert self._layout is not None
            self._found = self._layout.tensors(self._memory)
        return self._found

    def _sources(self) -> tuple[list[Tensor], Mapping[str, int]]:
        """Return the tensors, and their indices by name.

        Raises:
            InvalidArgument: the version is no state dict, or has tensors without a name.
        """
        layout = self._layout
        if layout is not None and layout.names is not None:
            return self._tensors(), layout.names
        if not isinstance(self.state, Mapping):
            raise InvalidArgument(f"version {self.number} is no state dict, but of type {type(self.state).__name__}")
        found = tensors_of(self.state)
        if layout is not None and len({*map(id, found.values())}) < len(layout.views):
            raise InvalidArgument(
                f"version {self.number} has tensors inside of other things than dictionaries, lists and tuples, and so "
                "without a name: take them from its state"
            )
        return [*found.values()], {name: number for number, name in enumerate(found)}

    def __repr__(self) -> str:
        return f"<Version {self.number}: {self._memory.numel()} bytes>"


def check_module(module: Any) -> None:
    """Raise InvalidArgument for a value that tensors cannot be loaded into."""
    if not isinstance(module, nn.Module):
        checks.mapping("module", module, _MODULE)
