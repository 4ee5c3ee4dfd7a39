"""The state of a pipeline that was cut from a model, under the names of the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

STAGES = "stages"  # the attribute of a pipeline


def keep_names(pipeline: nn.Module, parts: Sequence[Sequence[str]]) -> None:
    """Have the state of a pipeline bear the names of the model whose parts its stages are."""
    pipeline.register_state_dict_post_hook(_name_as_whole)  # type: ignore[no-untyped-call]
    by_stages = partial(_name_by_stages, parts)
    pipeline.register_load_state_dict_pre_hook(by_stages)  # type: ignore[no-untyped-call]


def _name_as_whole(_: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    """stages.1.layers.4.weight becomes layers.4.weight."""
    start = f"{prefix}{STAGES}."
    for names in (state, state._metadata):
        found = {name: names.pop(name) for name in list(names) if name.startswith(start)}
        own = {name.removeprefix(start).partition(".")[2]: value for name, value in found.items()}
        names.update({prefix + name: value for name, value in own.items() if name})


def _name_by_stages(parts: Sequence[Sequence[str]], _: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    """The other way; a value that several stages use goes to each of them."""
    found = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    for name, value in found.items():
        holders = [
            number for number, part in enumerate(parts) if any(f"{name}.".startswith(f"{each}.") for each in part)
        ]
        starts = [f"{STAGES}.{number}." for number in holders] or [""]
        state.update({f"{prefix}{start}{name}": value for start in starts})
