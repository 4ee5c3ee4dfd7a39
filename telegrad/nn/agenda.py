"""What one station has still to do for a batch, in the order of its plan; knows no thread and no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from telegrad.nn.schedule import FORWARD, WEIGHTS, Action

Arrival = tuple[bool, int, int]  # whether it came from the stage before, not from the one behind; stage, micro-batch


class Agenda:
    """Tells what is next once that has come which it needs."""

    def __init__(self, actions: Sequence[Action], stages: int) -> None:
        """`stages` there are in the whole pipeline."""
        self._actions = actions
        self._last = stages - 1
        self._at = 0
        self._arrived: dict[Arrival, Any] = {}

    def __repr__(self) -> str:
        upcoming = f"next {self._actions[self._at]}" if not self.done else "done"
        return f"<Agenda: {self._at} of {len(self._actions)} done, {upcoming}; {len(self._arrived)} arrivals wait>"

    @property
    def done(self) -> bool:
        return self._at == len(self._actions)

    def come(self, arrival: Arrival, what: Any) -> None:
        """Something has come from the stage before or behind."""
        self._arrived[arrival] = what

    def awaited(self) -> Arrival | None:
        """What the next action needs and is not there."""
        if self.done:
            return None
        needed = self._needed(self._actions[self._at])
        return needed if needed is not None and needed not in self._arrived else None

    def begin(self) -> tuple[Action, Any]:
        """The next action, for which all is there, and what has come for it, if anything had to."""
        action = self._actions[self._at]
        self._at += 1
        needed = self._needed(action)
        return action, self._arrived.pop(needed) if needed is not None else None

    def _needed(self, action: Action) -> Arrival | None:
        forward = action.kind == FORWARD
        if action.kind == WEIGHTS or action.stage == (0 if forward else self._last):
            return None
        return forward, action.stage, action.batch
