"""A batch on its way through a pipeline: the messages and arguments between its driver and its stations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from telegrad.pipeline.microbatches import Loss
from telegrad.pipeline.pipeline_schedule import FORWARD, InputKey, TiedWeight
from telegrad.pipeline.stage import PackedValue

BatchId = tuple[str, int]  # the pipeline; and the number of the batch, in order


class BatchSpec(NamedTuple):
    """A batch, for all stations."""

    id: BatchId
    oldest: int  # of the batches of that pipeline that have not ended
    driver: tuple[str, str]  # its name and incarnation
    schedule: str
    stations: tuple[int, ...]  # of each stage
    workers: tuple[tuple[str, str], ...]  # of each station, its name and incarnation
    tied: tuple[TiedWeight, ...]  # across workers
    batches: int
    trains: bool
    rider: int = 0  # the number of a rider that takes the gradients of each worker; 0: none
    request: bytes = b""  # for the rider


class BatchInputs(NamedTuple):
    """The driver's inputs for the first station, and all others for the last one, for each micro-batch."""

    inputs: Sequence[PackedValue] = ()
    targets: Sequence[PackedValue] = ()
    loss: Loss | None = None
    weights: Sequence[float] = ()


class BatchResult(NamedTuple):
    """The results of one station."""

    losses: list[Tensor]
    outputs: list[Any]
    gradients: dict[int, Sequence[Tensor | None]]  # of inputs, by micro-batches
    of_targets: dict[int, Sequence[Tensor | None]]
    rode: list[tuple[bool, Any]]  # once the rider had its turn: whether it did it, and its value or failure


class StageMessage(NamedTuple):
    """The input of an action: the value that a stage takes; or tensors, of which some may be missing."""

    batch: BatchId
    key: InputKey
    body: bytes
    positions: list[
        int
    ]  # of a value: of the tensors that require gradients; else, for each tensor, whether it is there
    tensors: Sequence[Tensor] = ()

    def opened(self) -> Any:
        """Return the value, packed, or the tensors, with None for each that is missing."""
        if self.key[0] == FORWARD:
            return PackedValue(self.body, self.tensors, self.positions)
        given = iter(self.tensors)
        return [next(given) if is_there else None for is_there in self.positions]
