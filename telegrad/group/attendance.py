"""Who has come to where a group of fixed size forms: noted by the worker that waits there, told to any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from telegrad.group.members import Member, listed


class Attendance:
    """As far as this worker has looked. What it keeps is replaced as wholes, so that it is told without a lock."""

    def __init__(self, size: int, me: int, names: Sequence[str] = ()) -> None:
        """`names` are those of all ranks, where they are known beforehand."""
        self._names = names
        self._come: dict[int, Member] = {}
        self._absent = [rank for rank in range(size) if rank != me]
        self._silent: list[Member] = []  # those that came, and do not answer any more

    def look(self, entry_of: Callable[[int], str]) -> None:
        """See who has come; `entry_of` a rank is what it has published, or ""."""
        entries = {rank: entry_of(rank) for rank in self._absent}
        self._come |= {rank: Member.from_json(entry) for rank, entry in entries.items() if entry}
        self._absent = [rank for rank, entry in entries.items() if not entry]

    def knock(self, is_alive: Callable[[Member], bool]) -> None:
        """See who of those still lives."""
        self._silent = [member for member in self._come.values() if not is_alive(member)]

    def complete(self, members: Iterable[Member]) -> None:
        """All have come."""
        self._absent, self._come = [], {member.id: member for member in members}

    def missing(self) -> list[str]:
        """Who is waited for: by name, or as "rank 2"."""
        return [self._name(rank) or f"rank {rank}" for rank in self._absent] + [who.name for who in self._silent]

    def said(self) -> list[str]:
        """The same, for people."""
        said = []
        if absent := self._absent:
            ranks = listed([repr(self._name(rank)) if self._names else str(rank) for rank in absent])
            said.append(f"{'' if self._names else 'rank ' if len(absent) == 1 else 'ranks '}{ranks} did not come")
        if self._silent:
            said.append(f"{listed(list(map(str, self._silent)))} came, and does not answer any more")
        return said

    def _name(self, rank: int) -> str:
        return self._names[rank] if self._names else ""

    def __repr__(self) -> str:
        return f"<Attendance: {len(self._come)} have come; {'; '.join(self.said()) or 'nobody is missing'}>"
