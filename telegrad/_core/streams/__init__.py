"""Streams of the items that a function yields. This file has their flow control: how far the function may run ahead of
its reader, and what is sent when. Without I/O.

    callee    SendWindow       items that were yielded and not sent; waiting pulls; whether the function may continue
    reader    ReceiveWindow    items that arrived and were not taken; when to notify the callee of taken items

The function continues while less than `window` of its items, and less than `most` bytes of them, were yielded and, as
far as the callee knows, not taken. A pull requests all available items. Pulls have numbers and are answered in this
order, even if they arrive in another. The items in that order are in the order of yielding.

An item for which a pull waits is sent at once. The callee keeps other items, and limits the bytes that it keeps for one
reader (`producer`). A reader that waits for an item therefore gets it, even if it does not read its other streams.

The reader sends how much it has taken with each pull, and also whenever it has taken half of what the callee may be
ahead. So less than half a window is taken and not reported, and the rest of a full window is still to be taken: a
blocked callee always has items for the reader, or will be notified. This holds for bytes only if both sides find the
same weight for an item (`generator_runs.weight_of`).
"""

from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

from telegrad.errors import ProtocolViolation

W = TypeVar("W")
ITEM = 256  # bytes that an item takes at the callee besides its data


class Answer(NamedTuple):
    """The answer to one pull: the items to send, and whether they are the last."""

    to: Any
    items: list[Any]
    over: bool


class SendWindow(Generic[W]):
    """The items that a function has yielded for its reader. `W` is the type of pulls."""

    def __init__(self, window: int, most: int) -> None:
        self.window = window
        self._most = most
        self._items: deque[Any] = deque()  # that were not sent
        self._weights: deque[int] = deque()  # of those that were not taken
        self._bytes = 0  # sum of `_weights`
        self._taken = 0
        self._pulls: dict[int, W] = {}  # waiting pulls, by number
        self._next = 0  # number of the pull to answer next
        self.kept = 0  # bytes of the items that were not sent
        self._over = False
        self._told = False  # an answer has said that the stream is over
        self.closed = False  # the reader wants no more items
        self._left = False  # this worker has left: nothing is answered any more

    @property
    def may_go_on(self) -> bool:
        """Return True if the function may yield its next item, or be closed; the producer reads it without a lock."""
        return self.closed or (len(self._weights) < self.window and self._bytes < self._most)

    @property
    def is_drained(self) -> bool:
        """Return True if an answer has said that the stream is over, or the reader wants no more."""
        return (self.closed and not self._left) or self._told

    @property
    def awaited(self) -> W | None:
        """Return the pull that the next item will answer, if one waits."""
        return self._pulls.get(self._next)

    # Each of these returns the answers that are due

    def put(self, item: Any, weight: int) -> list[Answer]:
        if self.closed:
            return []
        self._items.append(item)
        self._weights.append(weight)
        self._bytes += weight
        self.kept += weight + ITEM
        return self._due()

    def end(self) -> list[Answer]:
        self._over = True
        return self._due()

    def pull(self, number: int, taken: int, who: W) -> list[Answer]:
        """Add a pull of the reader, which has taken `taken` items so far."""
        self._pulls[number] = who
        self.take(taken)
        return self._due()

    def take(self, taken: int) -> list[Answer]:
        """Record that the reader has taken `taken` items, at most as many as were sent."""
        # The reader is another process, perhaps with an error. A number above this would remove the weights of items
        # that are still here, and let the function run ahead of the limits.
        taken = min(taken, self._taken + len(self._weights) - len(self._items))
        while self._taken < taken and not self.closed:
            self._bytes -= self._weights.popleft()
            self._taken += 1
        return []

    def close(self) -> list[Answer]:
        """Record that the reader has gone or wants no more items."""
        self.closed = self._over = True
        self._items.clear()
        self._weights.clear()
        self.kept = 0
        return self._due()

    def leave(self) -> list[Answer]:
        """Record that this worker leaves. An answer would tell the reader that the function has ended in order."""
        self._left = True
        return self.close()

    def _due(self) -> list[Answer]:
        if self._left:
            return []
        due = []
        if self.closed:  # answer all that wait: those before them may have been lost with their connection
            due = [Answer(waiting, [], True) for waiting in self._pulls.values()]
            self._pulls.clear()
        # Once the function has ended, each further pull gets an answer without items that reports the end, too.
        while (self._items or self._over) and self._next in self._pulls:
            due.append(Answer(self._pulls.pop(self._next), list(self._items), self._over))
            self._told = self._over
            self._items.clear()
            self.kept = 0
            self._next += 1
        return due


class ReceiveWindow:
    """The items that have arrived at the reader."""

    def __init__(self, window: int, most: int) -> None:
        self._window = window
        self._most = most
        self._items: deque[tuple[Any, int]] = deque()  # with their weights
        self._untold = self._untold_bytes = 0  # taken items of which the callee was not notified
        self._pulls = 0
        self.taken = 0
        self.over = False  # no more items will arrive

    def came(self, items: list[Any], weights: list[int], over: bool) -> None:
        """Add the answer to the next pull; raise ProtocolViolation if it exceeds what the callee may be ahead."""
        if not self.over:
            # A correct callee is at most one window ahead of what this side has reported, which is never more than it
            # has taken.
            if len(self._items) + len(items) > self._window:
                raise ProtocolViolation(f"{len(items):,} items arrived, but at most {self._window:,} may be unread")
            self._items.extend(zip(items, weights, strict=True))
            self.over = over

    def take(self) -> Any:
        """Return the next item; raise IndexError if there is none."""
        item, weight = self._items.popleft()
        self.taken += 1
        self._untold += 1
        self._untold_bytes += weight
        return item

    @property
    def must_tell(self) -> bool:
        """Return True if the callee must now be notified of taken items."""
        return not self.over and (2 * self._untold >= self._window or 2 * self._untold_bytes >= self._most)

    def tell(self) -> int:
        """Return the number of taken items, to be sent to the callee."""
        self._untold = self._untold_bytes = 0
        return self.taken

    def pull(self) -> tuple[int, int]:
        """Return the number of the next pull, and the number of taken items to send with it."""
        self._pulls += 1
        return self._pulls - 1, self.tell()

    def close(self) -> None:
        """Drop all items: the reader wants no more."""
        self._items.clear()
        self.over = True

    @property
    def empty(self) -> bool:
        return not self._items
