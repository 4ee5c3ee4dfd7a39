"""Pipelines in the one process."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.twin.training import backward_in
from tests.twin.world import World


class Pipeline(nn.Module):
    """Passes micro-batches through the stages one after the other. A model that is split stays whole."""

    world: World

    def __init__(self, stages: Sequence[nn.Module], chunks: int = 8, schedule: str = "") -> None:
        super().__init__()
        self.chunks = chunks
        self.stages = nn.ModuleList(stages)
        self.is_split = False

    @classmethod
    def split(cls, model: nn.Module, workers: Sequence[str], chunks: int = 8, **_: Any) -> "Pipeline":
        made = cls([copy.deepcopy(model)], chunks)
        made.is_split = True
        made.training = model.training
        return made

    def _parts(self, batch: Tensor) -> tuple[Tensor, ...]:
        return batch.tensor_split(min(self.chunks, len(batch)))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self._through(part) for part in self._parts(inputs)])

    def _through(self, part: Tensor) -> Any:
        for stage in self.stages:
            part = stage(part)
        return part

    def forward_backward(
        self, number: int, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor], *, step: Any = None
    ) -> Tensor:
        total: Any = sum(
            loss(self._through(part), target) * (len(part) / len(inputs))
            for part, target in zip(self._parts(inputs), self._parts(targets), strict=True)
        )
        backward_in(self.world)(number, [total], step=step)
        return total.detach()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.stages[0].state_dict() if self.is_split else super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return (self.stages[0] if self.is_split else super()).load_state_dict(state_dict)
