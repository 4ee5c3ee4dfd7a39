"""A version as its reader has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from telegrad import checks
from telegrad.errors import InvalidArgument
from telegrad.weights.layout import Layout, pour

_MODULE = "a module, or its state dict"
SHOWN = 5  # names in a message


class Version:
    """One whole version, which lives as long as this or one of its tensors does; from a subscriber.

    Its tensors lie in memory that others of this host read, too: they are to be read, not written to. `number` counts
    from 1 on.

    Example:
        >>> publisher = telegrad.weights.Publisher("scale", {"scale": torch.ones(1)})
        >>> number = publisher.publish()
        >>> version = telegrad.weights.Subscriber("driver", "scale").newest()
        >>> version.number, version.state
        (1, {'scale': tensor([1.])})
        >>> publisher.close()
    """

    def __init__(self, number: int, layout: Layout, memory: Tensor) -> None:
        self.number = number
        self._layout = layout
        self._memory = memory
        self._state: Any = None

    @property
    def state(self) -> Any:
        """What was published, with tensors in the places of the publisher's."""
        if self._state is None:
            self._state = self._layout.tree(self._memory)
        return self._state

    def load_into(self, module: nn.Module | Mapping[str, Tensor]) -> None:
        """Copy the tensors into those of a module, or of a state dict.

        Args:
            module: a module, or its state dict.

        Raises:
            InvalidArgument: names or shapes do not fit; it says which, and nothing was copied.
        """
        check_module(module)
        own = module.state_dict() if isinstance(module, nn.Module) else module
        self._pour(self._paired(own))

    def swap_into(self, module: nn.Module) -> None:
        """Have the parameters and buffers of a module lie in this version's memory, without a copy.

        They are to be read, then. Who writes to them all the same changes them for this process alone.

        Args:
            module: a module that only reads them.

        Raises:
            InvalidArgument: names, shapes or types do not fit; it says which, and nothing was changed.
        """
        if not isinstance(module, nn.Module):
            checks.wrong("module", "a module", module)
        own = module.state_dict(keep_vars=True)
        pairs = self._paired(own)
        others = [name for name, value in _tensors_of(own).items() if value.dtype != self.state[name].dtype]
        if others:
            raise InvalidArgument(
                f"version {self.number} cannot be swapped into a module whose tensors are of other types: "
                f"{_listed(others)}. load_into converts them"
            )
        for name, (_, tensor) in zip(_tensors_of(own), pairs, strict=True):
            tensor.data = self.state[name]

    def _named(self) -> Mapping[str, Any] | None:
        """Where its tensors are, by name; None where it is no state dict."""
        return self._layout.named

    def _pour(self, pairs: list[tuple[Any, Tensor]]) -> None:
        pour(self._memory, pairs)

    def _paired(self, own: Mapping[str, Any]) -> list[tuple[Any, Tensor]]:
        """Each tensor here, with where its like is in this version."""
        theirs = self._named()
        if theirs is None:
            raise InvalidArgument(f"version {self.number} is no state dict, but of type {type(self.state).__name__}")
        mine = _tensors_of(own)
        faults = [
            ("not in it", [*(mine.keys() - theirs.keys())]),
            ("only in it", [*(theirs.keys() - mine.keys())]),
            (
                "of another shape in it",
                [
                    f"{name} ({tuple(value.shape)} here, {tuple(theirs[name].shape)} there)"
                    for name, value in mine.items()
                    if name in theirs and value.shape != theirs[name].shape
                ],
            ),
        ]
        said = [f"{what}: {_listed(sorted(names))}" for what, names in faults if names]
        if said:
            raise InvalidArgument(f"version {self.number} does not fit: {'; '.join(said)}")
        return [(theirs[name], value) for name, value in mine.items()]

    def __repr__(self) -> str:
        return f"<Version {self.number}: {self._memory.numel()} bytes>"


def check_module(module: Any) -> None:
    """Raise InvalidArgument for what has no tensors to load into."""
    if not isinstance(module, nn.Module):
        checks.mapping("module", module, _MODULE)


def _tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
