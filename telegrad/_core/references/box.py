"""A value at its owner: there, still to come, or an error in its place."""

from __future__ import annotations

import threading
from typing import Any

from telegrad._core.calls.futures import Signal
from telegrad._core.pickling.exceptions import rebuild


class Opening(Signal):
    __slots__ = ("_box",)

    def __init__(self, box: Box) -> None:
        super().__init__()
        self._box = box

    def wait(self) -> Any:
        return self._box.open()


class Box:
    """Filled once; others may wait for that."""

    __slots__ = ("_lock", "_opening", "failure", "full", "value")

    def __init__(self) -> None:
        self.full = False
        self.value: Any = None
        self.failure = b""  # the description: an exception would keep alive the frames where it was raised
        self._lock = threading.Lock()  # guards _opening, and that `full` is set, which is loaded without it
        self._opening: Opening | None = None  # so value and failure are stored before, and not changed after

    @classmethod
    def of(cls, value: Any) -> Box:
        box = cls()
        box.value, box.full = value, True
        return box

    def fulfil(self, value: Any) -> None:
        self.value = value
        self._told()

    def fail(self, failure: bytes) -> None:
        self.failure = failure
        self._told()

    def _told(self) -> None:
        with self._lock:
            self.full = True
            opening, self._opening = self._opening, None
        if opening is not None:
            opening.set_result()

    def opening(self) -> Signal:
        """Happens once it is full; what waiting for it gives is what is inside."""
        with self._lock:
            if not self.full:
                if self._opening is None:
                    self._opening = Opening(self)
                return self._opening
        opening = Opening(self)
        opening.set_result()
        return opening

    def open(self) -> Any:
        """What is inside a box that is full."""
        if self.failure:
            raise rebuild(self.failure)
        return self.value

    def __repr__(self) -> str:
        what = "a failure" if self.failure else type(self.value).__name__
        return f"<Box: {what if self.full else 'still to be filled'}>"
