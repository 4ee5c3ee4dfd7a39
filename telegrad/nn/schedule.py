"""In which order micro-batches go through a pipeline; knows no worker and no tensor."""

from __future__ import annotations

from typing import NamedTuple


class Forward(NamedTuple):
    """Send a micro-batch through the stages."""

    batch: int


class Backward(NamedTuple):
    """Run backward from the losses of micro-batches."""

    batches: tuple[int, ...]


Step = Forward | Backward


class Schedule:
    """What may begin, given what has ended.

    "gpipe": all forward, then all backward, in one pass. "1f1b": backward for each micro-batch as soon as its loss is
    there, and never more of them on their way than there are stages, so that no stage keeps the activations of more.
    """

    def __init__(self, kind: str, batches: int, stages: int) -> None:
        self._batches = batches
        self._at_once = kind == "1f1b"
        self._room = stages if self._at_once else batches  # for how many more micro-batches
        self._begun = 0
        self._forward: list[int] = []  # ended, backward not begun
        self._left = batches

    @property
    def done(self) -> bool:
        return not self._left

    def begin(self) -> list[Step]:
        steps: list[Step] = []
        while self._room and self._begun < self._batches:
            steps.append(Forward(self._begun))
            self._begun += 1
            self._room -= 1
        return steps

    def ended(self, step: Step) -> list[Step]:
        """What begins now that `step` has ended."""
        if isinstance(step, Backward):
            self._left -= len(step.batches)
            self._room += len(step.batches)
            return self.begin()
        self._forward.append(step.batch)
        if not self._at_once and len(self._forward) < self._batches:
            return []
        batches, self._forward = tuple(sorted(self._forward)), []
        return [Backward(batches)]
