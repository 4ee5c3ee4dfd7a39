"""What can be published: where a state comes from, and what it is now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from telegrad.agent.naming import known_as
from telegrad.checks import shown
from telegrad.errors import InvalidArgument
from telegrad.rpc import RRef, rpc_sync


def read_from(source: Any) -> Callable[[], Any]:
    """What gives the state of a source, as it is when it is called.

    Raises:
        InvalidArgument: nothing can be published from it.
    """
    if isinstance(source, nn.Module):  # also one that is elsewhere, or in stages: its parts are asked for theirs
        return source.state_dict
    if isinstance(source, RRef):
        return partial(rpc_sync, source.owner(), _state_of, (source,))
    if isinstance(source, Mapping | list | tuple | torch.Tensor):
        return lambda: source
    if callable(source):
        return source  # type: ignore[no-any-return]
    raise InvalidArgument(
        f"source must be a module, a state dict, another tree of tensors, or a function that gives one, "
        f"not {shown(source)}"
    )


@known_as("Publisher.publish")
def _state_of(reference: RRef[Any]) -> Any:
    value = reference.local_value()
    return value.state_dict() if isinstance(value, nn.Module) else value
