"""Where what is shown of a group comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from telegrad.ext.events import Event
from telegrad.reporting.account import Account


class Sight(NamedTuple):
    """A group at one moment, as far as it answers."""

    accounts: Sequence[Account]
    silent: Mapping[str, str]  # workers that did not answer, and what is known of them otherwise


class Source(Protocol):
    """What looks at one group, from inside or outside of it. Its methods may be called from any thread."""

    def look(self) -> Sight:
        """Ask all workers; takes as long as the slowest, and at most 1.5 seconds."""

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        """By worker, what was recorded since the times in `after`, on the worker's own clock; oldest first."""
