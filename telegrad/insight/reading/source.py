"""Where the displayed data of a group comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from telegrad.ext.events import Event
from telegrad.reporting.worker_state import WorkerState


class GroupSnapshot(NamedTuple):
    """A snapshot of a group."""

    accounts: Sequence[WorkerState]
    silent: Mapping[str, str]  # workers that did not answer, and the known reasons


class Source(Protocol):
    """Queries one group, from inside or outside of it. Its methods may be called from any thread."""

    def look(self) -> GroupSnapshot:
        """Query all workers. Block until all have answered, for a few seconds at most."""

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        """Return the events of each worker after its time in `after`, on the worker's own clock; oldest first."""
