"""One handle of a reference in this process; while it lives, so does the value."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from telegrad._core.membership.members import Identity
from telegrad._core.references.box import Box
from telegrad._core.references.letters import Id, number


class Handle:
    """What a table gives out; the references that users see hold one each."""

    __slots__ = ("box", "ended", "fault", "id", "owner")

    def __init__(self, ended: SimpleQueue[Any], id_: Id, owner: Identity, box: Box | None, fault: str = "") -> None:
        """Its id goes into `ended` at its end."""
        self.ended = ended
        self.id = id_
        self.owner = owner
        self.box = box  # on the owner
        self.fault = fault  # why this one never was one, or is none any more; its end then counts no more

    def __del__(self) -> None:
        # On any thread, even inside of the garbage collector under somebody's lock: this queue takes none.
        if not self.fault:
            self.ended.put(self.id)

    def __repr__(self) -> str:
        state = self.fault or (repr(self.box) if self.box is not None else f"on {self.owner.name!r}")
        return f"<Handle of {number(self.id)}: {state}>"
