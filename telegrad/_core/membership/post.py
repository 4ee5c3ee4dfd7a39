"""What a group needs of the agent that it is part of."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from telegrad._core.membership.members import Identity
from telegrad.errors import PeerError


class Post(Protocol):
    """A worker's control messages, and what it knows of its own calls and connections."""

    lost: list[Callable[[Identity, PeerError], None]]  # called when a connection to a worker ended

    @property
    def closed(self) -> bool: ...

    @property
    def idle(self) -> bool:
        """Whether no call of this worker is in flight, and none runs here."""

    @property
    def started(self) -> int:
        """How many calls this worker has begun."""

    @property
    def stands_for(self) -> float:
        """For how many seconds no thread of this worker has looked at its connections, though some should have."""

    def on(self, message: type, handler: Callable[[Identity, Any], None]) -> None:
        """Have `handler(sender, message)` called for every control message of that class."""

    def notify(self, to: str | int, message: tuple[Any, ...]) -> None:
        """Send a control message; if it fails, those in `lost` are told."""

    def warn_lost(self, who: Identity, why: str) -> None:
        """Say that a worker was lost, unless that was said before."""

    def forget_names(self, but: Collection[str]) -> None:
        """Call nobody any more by a name that was looked up before, but for the lives that are still there."""

    def cut(self, who: Identity, reason: PeerError) -> None:
        """End the connections with a worker that is out of the group, and accept none from it any more."""
