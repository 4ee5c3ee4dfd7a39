"""A lock that lets a test act as another thread that comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Rival:
    """A lock that calls `act` right before its next acquisition, as another thread might."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.act: Callable[[], object] = lambda: None

    @classmethod
    def at(cls, owner: Any) -> Rival:
        """Replace the owner's lock by a rival."""
        rival = owner._lock = cls()
        return rival

    def __enter__(self) -> None:
        act, self.act = self.act, lambda: None
        act()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
