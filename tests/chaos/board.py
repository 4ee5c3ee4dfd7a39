"""Numbers that all processes of a schedule see: the progress of each client, and which workers are dead."""

import mmap
from pathlib import Path

WORDS = 2  # of each client: operations that ended, and those that succeeded
MOST_CLIENTS = 8  # of each worker


class Board:
    """Memory that is shared through a file; each number has one writer."""

    def __init__(self, path: str, workers: int) -> None:
        self.path, self.workers = path, workers
        size = 8 * workers * (1 + MOST_CLIENTS * WORDS)
        if not Path(path).exists():
            Path(path).write_bytes(bytes(size))
        with open(path, "r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), size)).cast("q")

    def _at(self, worker: int, client: int) -> int:
        return self.workers + (worker * MOST_CLIENTS + client) * WORDS

    def note(self, worker: int, client: int, succeeded: bool) -> None:
        """Note that an operation has ended."""
        at = self._at(worker, client)
        self._numbers[at] += 1
        self._numbers[at + 1] += succeeded

    def ended(self, worker: int) -> int:
        return sum(self._numbers[self._at(worker, client)] for client in range(MOST_CLIENTS))

    def successes(self, worker: int) -> list[int]:
        """Return the number of successes of each client."""
        return [self._numbers[self._at(worker, client) + 1] for client in range(MOST_CLIENTS)]

    def bury(self, worker: int) -> None:
        self._numbers[worker] = 1

    def is_dead(self, worker: int) -> bool:
        return bool(self._numbers[worker])
