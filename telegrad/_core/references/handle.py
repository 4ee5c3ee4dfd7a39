"""The slot for a value at its owner, the handles of a reference in a process, and the errors of unusable ones.

A value outlives its handles.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from telegrad._core.calls.futures import Signal
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.exceptions import rebuild
from telegrad._core.references.reference_protocol import OWNER_DIED
from telegrad._core.references.reference_records import Id, number
from telegrad.errors import OwnerLost, RRefError, RRefLost

DELETED = "deleted"  # fault of a handle that the program has released


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


class Handle:
    """A reference count held by a Python object; each reference that a user sees holds one handle."""

    __slots__ = ("box", "ended", "fault", "id", "owner")

    def __init__(
        self, ended: SimpleQueue[Any], id_: Id, owner: Identity, box: ValueSlot | None, fault: str = ""
    ) -> None:
        """The handle's end puts its id into `ended`."""
        self.ended = ended
        self.id = id_
        self.owner = owner
        self.box = box  # only on the owner
        self.fault = fault  # why the handle is unusable; its end is then not counted

    def __del__(self) -> None:
        # Any thread may run this, even in the garbage collector while a lock is held: SimpleQueue takes no lock.
        if not self.fault:
            self.ended.put(self.id)

    def __repr__(self) -> str:
        state = self.fault or (repr(self.box) if self.box is not None else f"on {self.owner.name!r}")
        return f"<Handle of {number(self.id)}: {state}>"


def error_for(fault: str, handle: Handle, made: str) -> RRefError:
    """Return the error for a fault; `made` is the place where the reference was created, or empty."""
    about = f"the reference {number(handle.id)} to a value of worker {handle.owner.name!r}"
    about += f", created at {made}," if made else ""
    if fault == OWNER_DIED:
        return OwnerLost(f"{about} is lost: that worker died or left. Create the value again on another worker")
    if fault == DELETED:
        return RRefError(f"{about} was deleted before this worker left its group")
    return RRefLost(
        f"{about} is lost: a connection broke while it was being sent, or its owner declared this worker lost. Create "
        "or send it again"
    )
