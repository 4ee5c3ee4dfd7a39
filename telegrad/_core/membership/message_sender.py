"""The interface of an agent that its group uses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from telegrad._core.membership.members import Identity
from telegrad.errors import PeerError


class MessageSender(Protocol):
    """A worker's control messages, and the state of its calls and connections."""

    lost: list[Callable[[Identity, PeerError], None]]  # called when a connection to a worker ended

    @property
    def closed(self) -> bool: ...

    @property
    def idle(self) -> bool:
        """Return True if no call of this worker is in flight, and none runs here."""

    @property
    def started(self) -> int:
        """The number of calls that this worker has begun."""

    @property
    def stands_for(self) -> float:
        """The seconds for which no thread has polled this worker's connections, though one should have."""

    def on(self, message: type, handler: Callable[[Identity, Any], None]) -> None:
        """Call `handler(sender, message)` for every control message of that class."""

    def notify(self, to: str | int, message: tuple[Any, ...]) -> None:
        """Send a control message; on failure, call the functions in `lost`."""

    def warn_lost(self, who: Identity, why: str) -> None:
        """Log that a worker was lost, unless that was logged before."""

    def forget_names(self, but: Collection[str]) -> None:
        """Forget the results of earlier name lookups, except for the lives that are still present."""

    def cut(self, who: Identity, reason: PeerError) -> None:
        """Close the connections with a worker that is out of the group, and refuse later ones."""
