"""Who does which item: each worker has one at a time, and gets the next as it is through. Pure."""

from __future__ import annotations

from collections import deque


class Sharing:
    """Of items that are numbered among workers that are numbered."""

    def __init__(self, items: int, workers: int) -> None:
        self._left = deque(range(items))
        self._workers = workers
        self._there = min(items, workers)  # who are not gone, of those that have had an item

    def begin(self) -> list[tuple[int, int]]:
        """An item for each worker, as far as they go: the first for the first."""
        return [(self._left.popleft(), place) for place in range(self._there)]

    def ended(self, worker: int, gone: bool) -> tuple[int | None, list[int]]:
        """A worker is through with its item: the next one for it, and those that nobody is left to do."""
        if not gone:
            return (self._left.popleft() if self._left else None), []
        self._there -= 1
        if self._there:
            return None, []
        lost = list(self._left)
        self._left.clear()
        return None, lost
