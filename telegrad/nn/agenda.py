"""What one station has still to do for a batch, in the order of its plan; knows no thread and no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from telegrad.nn.schedule import ADD_GRADIENT, BACKWARD, FORWARD, INPUT, LOAD_WEIGHT, Action

Need = tuple[str, int, int]  # for which kind of action; of which stage, and micro-batch or tie

_FOR = {FORWARD: FORWARD, BACKWARD: BACKWARD, INPUT: BACKWARD, LOAD_WEIGHT: LOAD_WEIGHT, ADD_GRADIENT: ADD_GRADIENT}


class Agenda:
    """Tells what is next once that has come which it needs."""

    def __init__(self, actions: Sequence[Action], stages: int) -> None:
        """`stages` there are in the whole pipeline."""
        self._actions = actions
        self._last = stages - 1
        self._at = 0
        self._arrived: dict[Need, Any] = {}

    def __repr__(self) -> str:
        upcoming = (
            "done" if self.done else "next {0.kind} of stage {0.stage}, {0.batch}".format(self._actions[self._at])
        )
        return f"<Agenda: {self._at} of {len(self._actions)}, {upcoming}; {len(self._arrived)} deliveries wait>"

    @property
    def done(self) -> bool:
        return self._at == len(self._actions)

    def come(self, need: Need, what: Any) -> None:
        """Something has come that an action needs."""
        self._arrived[need] = what

    def awaited(self) -> Need | None:
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

    def _needed(self, action: Action) -> Need | None:
        """The first stage has its inputs, and the last begins its backward by itself."""
        what = _FOR.get(action.kind)
        if what is None or action.stage == {FORWARD: 0, BACKWARD: self._last}.get(what):
            return None
        return what, action.stage, action.batch
