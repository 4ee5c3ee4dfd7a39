"""The claim by which a worker owns a published value, and a box that opens only while the claim is valid."""

from __future__ import annotations

from typing import Any, NamedTuple

from telegrad.errors import ClaimLost
from telegrad.ext.references import ValueSlot
from telegrad.ext.workers import Claim, DynamicGroup, current


class Ownership(NamedTuple):
    """A claim of this worker, and the directory registration that made it."""

    name: str
    group: DynamicGroup
    claim: Claim

    @property
    def holds(self) -> bool:
        return self.group.owns(self.name, self.claim)

    def check(self) -> None:
        """Raise ClaimLost if this worker must not act as the owner."""
        if not self.holds:
            late = (
                "it did not renew its lease in the group's directory in time, so another worker may own the value now"
            )
            worker = current.here()
            over = self.group.over if worker.directory is self.group else ""  # else only the registration has ended
            why = f"refuses calls to the value {self.name!r}: {over or late}. The call was not run"
            error = ClaimLost(f"worker {worker.me.name!r} {why}; use the reference again: it finds the owner")
            error.claim = self.name, self.claim.token
            raise error


class OwnedBox(ValueSlot):
    """A published value at its owner. It opens only while the worker may act as the owner."""

    __slots__ = ("_owned",)

    def __init__(self, owned: Ownership) -> None:
        super().__init__()
        self._owned = owned

    def open(self) -> Any:
        self._owned.check()
        return super().open()
