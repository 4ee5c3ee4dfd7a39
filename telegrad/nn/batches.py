"""A batch on its way through a pipeline: what stations are told of it, and what they send each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from telegrad.nn.agenda import Need
from telegrad.nn.losses import Loss
from telegrad.nn.schedule import FORWARD, TiedWeight
from telegrad.nn.stage import Bundle

_NOTHING = -1  # among `places`
BatchId = tuple[str, int]  # of which pipeline; and which, in order


class Job(NamedTuple):
    """What all stations must know of a batch."""

    id: BatchId
    oldest: int  # of the batches of that pipeline that have not ended
    driver: tuple[str, str]  # its name, and which incarnation
    schedule: str
    stations: tuple[int, ...]  # of each stage
    workers: tuple[tuple[str, str], ...]  # of each station, likewise
    ties: tuple[TiedWeight, ...]
    batches: int
    trains: bool
    rider: int = 0  # under this number, what wants the gradients of each worker; 0: nothing
    request: bytes = b""  # what it shall do


class Ends(NamedTuple):
    """What the driver gives to the first station and to the last one, for each micro-batch."""

    inputs: Sequence[Bundle] = ()
    targets: Sequence[Bundle] = ()
    loss: Loss | None = None
    weights: Sequence[float] = ()


class Product(NamedTuple):
    """What a station gives back to the driver."""

    losses: list[Tensor]
    outputs: list[Any]
    gradients: dict[int, Sequence[Tensor | None]]  # of inputs, by micro-batches
    of_targets: dict[int, Sequence[Tensor | None]]
    rode: list[tuple[bool, Any]]  # once the rider had its turn: whether it did it, and its value or failure


class Delivery(NamedTuple):
    """What a station needs for an action: the value that a stage takes, or tensors, or that there are none."""

    batch: BatchId
    need: Need
    body: bytes
    places: list[int]  # of a value: those of the tensors that require gradients; else, for each, which of `tensors`
    tensors: Sequence[Tensor] = ()

    def opened(self) -> Any:
        """A bundle, or tensors with None where there is none."""
        if self.need[0] == FORWARD:
            return Bundle(self.body, self.tensors, self.places)
        return [None if place == _NOTHING else self.tensors[place] for place in self.places]


def with_value(batch: BatchId, need: Need, bundle: Bundle) -> Delivery:
    """A delivery of what a stage takes."""
    body, tensors, places = bundle.detached()
    return Delivery(batch, need, body, places, tensors)


def with_tensors(batch: BatchId, need: Need, given: Sequence[Tensor | None]) -> Delivery:
    """A delivery of gradients, or of a weight."""
    tensors = [each for each in given if each is not None]
    numbers = iter(range(len(tensors)))
    places = [_NOTHING if each is None else next(numbers) for each in given]
    return Delivery(batch, need, b"", places, tensors)


class Numbers:
    """Those of the batches of one pipeline."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._last = 0
        self._under_way: list[int] = []

    @contextlib.contextmanager
    def begun(self) -> Iterator[tuple[int, int]]:
        """Inside, a batch is under way; its number, and that of the oldest one."""
        with self._lock:
            self._last += 1
            number = self._last
            self._under_way.append(number)
            oldest = self._under_way[0]
        try:
            yield number, oldest
        finally:
            with self._lock:
                self._under_way.remove(number)
