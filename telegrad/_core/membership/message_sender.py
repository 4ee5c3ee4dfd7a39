"""The interface of an agent that its group uses, and a queue of messages to send by it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from telegrad._core.membership.members import Identity
from telegrad.errors import PeerError

log = logging.getLogger("telegrad")


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


class MessageQueue:
    """Sends messages in the order in which they were decided, from any thread.

    If a slow thread sent one after the other worker had left, that would open a connection, and its failure would look
    like the death of that worker.
    """

    def __init__(self, post: MessageSender) -> None:
        self._post = post
        self._messages: deque[tuple[int, tuple[Any, ...]]] = deque()
        self._sending = threading.Lock()  # acquired without waiting

    def add(self, messages: Iterable[tuple[int, tuple[Any, ...]]]) -> None:
        """Queue messages under the lock of their decision. Call `send` after it is released."""
        self._messages.extend(messages)

    def send(self) -> None:
        """Send the queued messages, unless another thread does: that one looks again after it releases the lock."""
        while self._messages and self._sending.acquire(blocking=False):
            try:
                while self._messages:
                    to, message = self._messages.popleft()
                    try:
                        self._post.notify(to, message)
                    except PeerError:
                        log.debug("telegrad: %r has already left", to)
            finally:
                self._sending.release()
