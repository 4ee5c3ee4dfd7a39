"""The slot for a value at its owner: filled with the value or an error, or still empty."""

from __future__ import annotations

from typing import Any

from telegrad._core.calls.futures import Signal
from telegrad._core.pickling.exceptions import rebuild


class ValueSlot(Signal):
    """A signal that the value of a reference exists. It is filled once; other threads may wait for it."""

    __slots__ = ("answer", "failure", "value")

    full: Any = Signal._happened  # type: ignore[misc]  # as `done`, without a call; set after value and failure

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None
        self.failure = b""  # serialised: an exception would keep alive the frames where it was raised
        self.answer = b""  # for the caller, if a call creates the value

    @classmethod
    def of(cls, value: Any) -> ValueSlot:
        box = cls()
        box.value, box._happened = value, True
        return box

    def fulfil(self, value: Any) -> None:
        self.value = value
        self.set_result()

    def fail(self, failure: bytes) -> None:
        self.failure = failure
        self.set_result()

    def receipt(self) -> bytes:
        return self.answer

    def open(self) -> Any:
        """Return the value of a full box, or raise its error."""
        if self.failure:
            raise rebuild(self.failure)
        return self.value

    def wait(self) -> Any:
        return self.open()

    def __repr__(self) -> str:
        what = "a failure" if self.failure else type(self.value).__name__
        return f"<ValueSlot: {what if self.full else 'still to be filled'}>"
