"""One handle of a reference in this process; while it lives, so does the value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telegrad.group.members import Identity
from telegrad.rref.box import Box
from telegrad.rref.letters import Id

if TYPE_CHECKING:
    from telegrad.rref.keeper import Keeper


class Handle:
    """What a keeper gives out; the class that users see derives from it."""

    __slots__ = ("__weakref__", "_box", "_fault", "_id", "_keeper", "_owner")

    _keeper: Keeper
    _id: Id
    _owner: Identity
    _box: Box | None  # on the owner
    _fault: str  # why this handle never was one

    def _begin(self, keeper: Keeper, id_: Id, owner: Identity, box: Box | None, fault: str = "") -> None:
        self._keeper = keeper
        self._id = id_
        self._owner = owner
        self._box = box
        self._fault = fault

    def __del__(self) -> None:
        # On any thread, even inside of the garbage collector under somebody's lock.
        keeper = getattr(self, "_keeper", None)
        if keeper is not None and not self._fault:
            keeper.let_go(self._id)
