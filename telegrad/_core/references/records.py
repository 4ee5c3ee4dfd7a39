"""What one worker knows of one reference: see protocol.py, which keeps these records.

No data classes: to make one at import takes longer than to make a thousand records.
"""

from __future__ import annotations

from typing import TypeVar

from telegrad._core.references.letters import Id

K = TypeVar("K")
V = TypeVar("V")


def remember(table: dict[K, V], key: K, value: V, most: int) -> None:
    """Note something that is over, of which something may still come late; only the newest are kept."""
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]


class Share:
    """What a user has of a reference: its one fork, and what keeps that alive."""

    __slots__ = ("children", "confirmed", "extras", "fault", "fork", "handles", "owner", "parents")

    def __init__(self, owner: str, fork: Id, confirmed: bool, handles: int = 1) -> None:
        self.owner = owner
        self.fork = fork
        self.confirmed = confirmed
        self.handles = handles
        self.parents: list[tuple[str, Id]] = []  # to be told once the owner knows the fork
        self.extras: list[Id] = []  # known to the owner, given back once the fork is confirmed
        self.children: dict[Id, str] = {}  # sent on, and not settled
        self.fault = ""


class Owned:
    """What the owner knows of a reference."""

    __slots__ = ("forks", "handles", "made")

    def __init__(self, made: bool, handles: int = 0) -> None:
        self.made = made  # the value exists, or the call that creates it has come, or never will
        self.handles = handles
        self.forks: dict[Id, str] = {}  # where each lives, or is on its way to; `Holders` changes it


class Holders:
    """How many forks of the owner's references each worker has."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, owned: Owned, fork: Id, holder: str) -> None:
        """Note a fork."""
        self.end(owned, fork)
        owned.forks[fork] = holder
        self.counts[holder] = self.counts.get(holder, 0) + 1

    def end(self, owned: Owned, fork: Id) -> None:
        """Forget a fork, if it is known."""
        holder = owned.forks.pop(fork, None)
        if holder is not None:
            self.counts[holder] -= 1
            if not self.counts[holder]:
                del self.counts[holder]
