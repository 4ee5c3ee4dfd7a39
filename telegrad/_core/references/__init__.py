"""Distributed reference counting: a protocol without I/O, and the table of one worker that runs it.

This file has the ids, and the state that one worker keeps of one reference; reference_protocol.py maintains it.

No data classes: creating one at import takes longer than creating a thousand records.
"""

from __future__ import annotations

from typing import TypeVar

from telegrad._core.membership.members import Identity

Id = tuple[str, int]  # the worker that created it, and its number there


def number(ref: Id) -> str:
    """Return a reference's id as shown to users."""
    return f"{ref[0].rpartition('#')[0]}/{ref[1]}"


def key_of(who: Identity) -> str:
    """Return a key for this incarnation of a worker: a later worker of the same name has another key."""
    return f"{who.name}#{who.incarnation}"


K = TypeVar("K")
V = TypeVar("V")


def remember(table: dict[K, V], key: K, value: V, most: int) -> None:
    """Store an entry that late messages may still need, and keep only the newest entries."""
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]


def added(entries: list[K] | None, entry: K) -> list[K]:
    """Return the list, or a new one, after adding an entry."""
    entries = entries or []
    entries.append(entry)
    return entries


class SharedFork:
    """A user's state of a reference: its one fork, and what keeps the fork alive."""

    __slots__ = ("children", "confirmed", "extras", "fault", "fork", "handles", "owner", "parents")

    def __init__(self, owner: str, fork: Id, confirmed: bool, handles: int = 1) -> None:
        self.owner = owner
        self.fork = fork
        self.confirmed = confirmed
        self.handles = handles
        # Made by the first entry: most references have none, and the garbage collector visits each object.
        self.parents: list[tuple[str, Id]] | None = None  # that get SETTLED once the owner knows the fork
        self.extras: list[Id] | None = None  # known to the owner, dropped once the fork is confirmed
        self.children: dict[Id, str] | None = None  # forks sent to others and not settled
        self.fault = ""


class Owned:
    """The owner's state of a reference."""

    __slots__ = ("forks", "handles", "made")

    def __init__(self, made: bool, handles: int = 0) -> None:
        self.made = made  # the value exists, or its creating call has arrived or never will
        self.handles = handles
        self.forks: dict[Id, str] = {}  # with the workers that hold them or will receive them; `Holders` changes it


class Holders:
    """Counts each worker's forks of the owner's references."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, owned: Owned, fork: Id, holder: str) -> None:
        """Add a fork."""
        if fork in owned.forks:
            self.end(owned, fork)
        owned.forks[fork] = holder
        self.counts[holder] = self.counts.get(holder, 0) + 1

    def end(self, owned: Owned, fork: Id) -> None:
        """Remove a fork, if it is known."""
        holder = owned.forks.pop(fork, None)
        if holder is not None:
            self.counts[holder] -= 1
            if not self.counts[holder]:
                del self.counts[holder]
