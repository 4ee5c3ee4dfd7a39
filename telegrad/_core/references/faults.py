"""Error messages for references that cannot be used."""

from __future__ import annotations

from telegrad._core.references.control_messages import number
from telegrad._core.references.handle import Handle
from telegrad._core.references.reference_protocol import OWNER_DIED
from telegrad.errors import OwnerLost, RRefError, RRefLost

DELETED = "deleted"  # fault of a handle that the program has released


def error_for(fault: str, handle: Handle, made: str) -> RRefError:
    """Return the error for a fault; `made` is the place where the reference was created, or empty."""
    about = f"the reference {number(handle.id)} to a value of worker {handle.owner.name!r}"
    about += f", made at {made}," if made else ""
    if fault == OWNER_DIED:
        return OwnerLost(f"{about} is lost: that worker has died or left. Make the value anew on another")
    if fault == DELETED:
        return RRefError(f"{about} was given up before this worker left its group")
    return RRefLost(
        f"{about} is lost: a connection broke while it was on its way, or its owner took this worker for dead. "
        "Make or send it again"
    )
