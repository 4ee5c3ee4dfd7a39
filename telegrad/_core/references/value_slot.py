"""The slot for a value at its owner: filled with the value or an error, or still empty."""

from __future__ import annotations

import threading
from typing import Any

from telegrad._core.calls.futures import Signal
from telegrad._core.pickling.exceptions import rebuild


class SlotFilled(Signal):
    __slots__ = ("_box",)

    def __init__(self, box: ValueSlot) -> None:
        super().__init__()
        self._box = box

    def wait(self) -> Any:
        return self._box.open()


class ValueSlot:
    """A slot that is filled once; other threads may wait for it."""

    __slots__ = ("_lock", "_opening", "failure", "full", "value")

    def __init__(self) -> None:
        self.full = False
        self.value: Any = None
        self.failure = b""  # serialised: an exception would keep alive the frames where it was raised
        self._lock = threading.Lock()  # guards _opening and changes of `full`; `full` is read without it
        self._opening: SlotFilled | None = None  # value and failure are stored before `full` is set

    @classmethod
    def of(cls, value: Any) -> ValueSlot:
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
        """Return a signal for the filling of the box; waiting for it returns the value or raises the error."""
        with self._lock:
            if not self.full:
                if self._opening is None:
                    self._opening = SlotFilled(self)
                return self._opening
        opening = SlotFilled(self)
        opening.set_result()
        return opening

    def open(self) -> Any:
        """Return the value of a full box, or raise its error."""
        if self.failure:
            raise rebuild(self.failure)
        return self.value

    def __repr__(self) -> str:
        what = "a failure" if self.failure else type(self.value).__name__
        return f"<ValueSlot: {what if self.full else 'still to be filled'}>"
