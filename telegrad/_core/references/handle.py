"""A handle of a reference in this process; the value lives at least as long as the handle."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from telegrad._core.membership.members import Identity
from telegrad._core.references.control_messages import Id, number
from telegrad._core.references.value_slot import ValueSlot


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
