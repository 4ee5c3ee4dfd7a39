"""How far a stream's function may run ahead of its reader, and what travels when. Pure.

    callee    Supply    what was yielded and has not left; which pulls wait for it; whether the function may go on
    reader    Intake    what has come and was not taken; when the callee must be told how much was taken

The function goes on while less than `window` of its items, and less than `most` bytes of them, were yielded and, as far
as the callee knows, not taken. A pull asks for all that is there. Pulls have numbers and are answered in their order,
however they arrive, so what the reader gets in that order is in the order of yielding.

An item for which a pull waits leaves at once. The callee keeps the others, and limits how many bytes it keeps for one
reader (`feeding`). So a reader that waits for an item gets it, however much of its other streams it does not read.

The reader tells how much it has taken with each pull, and besides whenever it has taken half of what the callee may be
ahead. So a callee that cannot go on always has more for the reader, or will hear of it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

from telegrad.errors import ProtocolViolation

W = TypeVar("W")
ITEM = 256  # bytes that an item takes at the callee beside those that it has


class Answer(NamedTuple):
    """To one pull: what leaves, and whether nothing comes after it."""

    to: Any
    items: list[Any]
    over: bool


class Supply(Generic[W]):
    """What a function has yielded for its reader. Pulls are whatever `W` is."""

    def __init__(self, window: int, most: int) -> None:
        self.window = window
        self._most = most
        self._items: deque[Any] = deque()  # that have not left
        self._weights: deque[int] = deque()  # of those that were not taken
        self._bytes = 0  # in all of these
        self._yielded = 0
        self._taken = 0
        self._pulls: dict[int, W] = {}  # that wait, by their numbers
        self._next = 0  # the pull to be answered next
        self.kept = 0  # bytes of the items that have not left
        self._over = False
        self._told = False  # that it is over
        self.closed = False  # the reader wants nothing more

    @property
    def may_go_on(self) -> bool:
        """Whether the function may be asked for its next item, or be closed; loaded by who feeds without a lock."""
        ahead = self._yielded - self._taken
        return self.closed or (ahead < self.window and self._bytes < self._most)

    @property
    def is_drained(self) -> bool:
        """Return True if a pull was told that nothing comes after it, or the reader wants nothing more."""
        return self.closed or self._told

    @property
    def awaited(self) -> W | None:
        """Return the pull that the next item will answer, if one waits."""
        return self._pulls.get(self._next)

    # Each of these gives the answers that are due

    def put(self, item: Any, weight: int) -> list[Answer]:
        """The function has yielded."""
        self._yielded += 1
        if self.closed:
            return []
        self._items.append(item)
        self._weights.append(weight)
        self._bytes += weight
        self.kept += weight + ITEM
        return self._due()

    def end(self) -> list[Answer]:
        """The function has ended."""
        self._over = True
        return self._due()

    def pull(self, number: int, taken: int, who: W) -> list[Answer]:
        """The reader asks; it has taken so many by now."""
        self._pulls[number] = who
        self.take(taken)
        return self._due()

    def take(self, taken: int) -> list[Answer]:
        """The reader has taken this many items; a larger number than have left counts as those."""
        taken = min(taken, self._yielded - len(self._items))
        while self._taken < taken and not self.closed:
            self._bytes -= self._weights.popleft()
            self._taken += 1
        return []

    def close(self) -> list[Answer]:
        """The reader has gone, or has had enough."""
        self.closed = self._over = True
        self._items.clear()
        self._weights.clear()
        self.kept = 0
        return self._due()

    def _due(self) -> list[Answer]:
        due = []
        if self.closed:  # all that wait: those before them may have been lost with their connection
            due = [Answer(waiting, [], True) for waiting in self._pulls.values()]
            self._pulls.clear()
        while (self._items or self._over) and self._next in self._pulls:
            due.append(Answer(self._pulls.pop(self._next), list(self._items), self._over))
            self._told = self._over
            self._items.clear()
            self.kept = 0
            self._next += 1
        return due

    def __repr__(self) -> str:
        state = "closed" if self.closed else "over" if self._over else "open"
        return f"<Supply: {self._yielded} yielded, {self._taken} taken, {len(self._pulls)} pulls wait, {state}>"


class Intake:
    """What has come to the reader."""

    def __init__(self, window: int, most: int) -> None:
        self._window = window
        self._most = most
        self._items: deque[tuple[Any, int]] = deque()  # and their weights
        self._taken_bytes = self._told = self._told_bytes = 0
        self._pulls = 0
        self.taken = 0
        self.over = False  # nothing more will come

    def came(self, items: list[Any], weights: list[int], over: bool) -> None:
        """The answer to the next pull.

        Raises:
            ProtocolViolation: it has more items than the callee may be ahead.
        """
        if not self.over:
            if len(self._items) + len(items) > self._window:
                raise ProtocolViolation(f"{len(items):,} items came, of which at most {self._window:,} may be unread")
            self._items.extend(zip(items, weights, strict=True))
            self.over = over

    def take(self) -> Any:
        """The next item; raises IndexError where there is none."""
        item, weight = self._items.popleft()
        self.taken += 1
        self._taken_bytes += weight
        return item

    @property
    def must_tell(self) -> bool:
        """Whether the callee must hear now of what was taken."""
        items, weight = self.taken - self._told, self._taken_bytes - self._told_bytes
        return not self.over and (2 * items >= self._window or 2 * weight >= self._most)

    def tell(self) -> int:
        """How much was taken, for the callee."""
        self._told, self._told_bytes = self.taken, self._taken_bytes
        return self.taken

    def pull(self) -> tuple[int, int]:
        """The number of the next pull, and what it tells."""
        self._pulls += 1
        return self._pulls - 1, self.tell()

    def close(self) -> None:
        """The reader wants nothing more."""
        self._items.clear()
        self.over = True

    @property
    def empty(self) -> bool:
        return not self._items

    def __repr__(self) -> str:
        return f"<Intake: {len(self._items)} items, {self.taken} taken{', over' if self.over else ''}>"
