"""Who has come to where a group of fixed size forms: noted by the worker that waits there, told to any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from telegrad._core.membership.members import Member, listed

MOST_ASKED = 32  # ranks of one look, and workers that are knocked at: all others of the group do the same


class Attendance:
    """As far as this worker has looked. What it keeps is replaced as wholes, so that it is told without a lock."""

    def __init__(self, size: int, me: int, names: Sequence[str] = ()) -> None:
        """`names` are those of all ranks, where they are known beforehand."""
        self._names = names
        self._come: dict[int, Member] = {}
        self._absent = [(me + step) % size for step in range(1, size)] if me in range(size) else list(range(size))
        self._unasked = len(self._absent)  # how many of these were never looked for; they are the first ones
        self._silent: list[Member] = []  # those that came, and do not answer any more

    def look(self, entry_of: Callable[[int], str]) -> None:
        """Look for some ranks that are not known to have come; `entry_of` a rank is what it has published, or ""."""
        asked, others = self._absent[:MOST_ASKED], self._absent[MOST_ASKED:]
        entries = {rank: entry_of(rank) for rank in asked}
        self._come |= {rank: Member.from_json(entry) for rank, entry in entries.items() if entry}
        self._absent = others + [rank for rank, entry in entries.items() if not entry]
        self._unasked = max(0, self._unasked - len(asked))

    @property
    def is_complete(self) -> bool:
        """Return True if each rank was looked for."""
        return not self._unasked

    def knock(self, is_alive: Callable[[Member], bool]) -> None:
        """Probe the workers that were found last, and note the ones that do not answer."""
        self._silent = [member for member in list(self._come.values())[-MOST_ASKED:] if not is_alive(member)]

    def complete(self, members: Iterable[Member]) -> None:
        """All have come."""
        self._absent, self._unasked, self._come = [], 0, {member.id: member for member in members}

    def missing(self) -> list[str]:
        """Who is waited for: by name, or as "rank 2"."""
        absent = sorted(self._absent)
        return [self._name(rank) or f"rank {rank}" for rank in absent] + [who.name for who in self._silent]

    def said(self) -> list[str]:
        """The same, for people."""
        said = []
        if absent := sorted(self._absent):
            ranks = listed([repr(self._name(rank)) if self._names else str(rank) for rank in absent])
            way = "are not known to have come yet" if self._unasked and self._come else "did not come"
            said.append(f"{'' if self._names else 'rank ' if len(absent) == 1 else 'ranks '}{ranks} {way}")
        if self._silent:
            said.append(f"{listed(list(map(str, self._silent)))} came, and does not answer any more")
        return said

    def _name(self, rank: int) -> str:
        return self._names[rank] if self._names else ""

    def __repr__(self) -> str:
        return f"<Attendance: {len(self._come)} have come; {'; '.join(self.said()) or 'nobody is missing'}>"
