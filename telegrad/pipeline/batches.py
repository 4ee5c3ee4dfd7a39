"""The messages and arguments between the driver of a pipeline and its stations, for one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from telegrad.pipeline.microbatches import Loss
from telegrad.pipeline.pipeline_schedule import FORWARD, InputKey, TiedWeight
from telegrad.pipeline.stage import PackedValue

BatchId = tuple[str, int]  # the pipeline; and the number of the batch, ascending


class BatchSpec(NamedTuple):
    """The description of a batch, sent to all stations."""

    id: BatchId
    oldest: int  # oldest pending batch of that pipeline
    driver: tuple[str, str]  # name and incarnation
    schedule: str
    stations: tuple[int, ...]  # the station of each stage
    workers: tuple[tuple[str, str], ...]  # name and incarnation for each station
    tied: tuple[TiedWeight, ...]  # weights that stages on different workers share
    batches: int
    trains: bool
    rider: int = 0  # the number of the object that gets the gradients of each worker; 0: none
    request: bytes = b""  # for the rider


class BatchInputs(NamedTuple):
    """Inputs for the first station, and targets, loss and weights for the last one, per micro-batch."""

    inputs: Sequence[PackedValue] = ()
    targets: Sequence[PackedValue] = ()
    loss: Loss | None = None
    weights: Sequence[float] = ()
    is_unsure: bool = False  # the losses of the micro-batches may not sum up to that of the batch


class BatchResult(NamedTuple):
    losses: list[Tensor]
    outputs: list[Any]
    gradients: dict[int, Sequence[Tensor | None]]  # of inputs, by micro-batch
    of_targets: dict[int, Sequence[Tensor | None]]
    rode: list[tuple[bool, Any]]  # empty, or the result of the rider: True and its value, or False and its failure


class StageMessage(NamedTuple):
    """The input of an action: a value for a stage, or tensors, some of which may be missing."""

    batch: BatchId
    key: InputKey
    body: bytes
    # For a value: indices of the tensors that require gradients; else for each tensor, True if it is present.
    positions: list[int]
    tensors: Sequence[Tensor] = ()

    def opened(self) -> Any:
        """Return the value, packed, or the tensors, with None for each missing one."""
        if self.key[0] == FORWARD:
            return PackedValue(self.body, self.tensors, self.positions)
        given = iter(self.tensors)
        return [next(given) if is_there else None for is_there in self.positions]
