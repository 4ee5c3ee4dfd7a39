"""Which workers have arrived where a group of fixed size forms: written by the waiting worker, read by any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from telegrad._core.membership.members import Member, listed

MOST_ASKED = 32  # ranks per check, and workers that are probed: all others of the group do the same


class ArrivalTable:
    """The attendance as far as this worker has checked. Its values are replaced as wholes, so readers need no lock."""

    def __init__(self, size: int, me: int, names: Sequence[str] = ()) -> None:
        """`names` are those of all ranks, if known in advance."""
        self._names = names
        self._come: dict[int, Member] = {}
        self._absent = [(me + step) % size for step in range(1, size)] if me in range(size) else list(range(size))
        self._unasked = len(self._absent)  # how many of these, the first ones, were never checked
        self._silent: list[Member] = []  # workers that came and no longer answer

    def look(self, entry_of: Callable[[int], str]) -> None:
        """Check some ranks not known to have come; `entry_of` returns what a rank has published, or ""."""
        asked, others = self._absent[:MOST_ASKED], self._absent[MOST_ASKED:]
        entries = {rank: entry_of(rank) for rank in asked}
        self._come |= {rank: Member.from_json(entry) for rank, entry in entries.items() if entry}
        self._absent = others + [rank for rank, entry in entries.items() if not entry]
        self._unasked = max(0, self._unasked - len(asked))

    @property
    def is_complete(self) -> bool:
        """Return True if each rank was checked."""
        return not self._unasked

    def knock(self, is_alive: Callable[[Member], bool]) -> None:
        """Probe the workers found last, and record those that do not answer."""
        self._silent = [member for member in list(self._come.values())[-MOST_ASKED:] if not is_alive(member)]

    def complete(self, members: Iterable[Member]) -> None:
        """Record that all have come."""
        self._absent, self._unasked, self._come = [], 0, {member.id: member for member in members}

    def missing(self) -> list[str]:
        """Return the missing workers, by name, or as "rank 2"."""
        absent = sorted(self._absent)
        return [self._name(rank) or f"rank {rank}" for rank in absent] + [who.name for who in self._silent]

    def said(self) -> list[str]:
        """Return the missing workers as text for users."""
        said = []
        if absent := sorted(self._absent):
            ranks = listed([repr(self._name(rank)) if self._names else str(rank) for rank in absent])
            way = "not known to have joined yet" if self._unasked and self._come else "did not join"
            said.append(f"{'' if self._names else 'rank ' if len(absent) == 1 else 'ranks '}{ranks} {way}")
        if self._silent:
            said.append(f"{listed(list(map(str, self._silent)))} joined, then stopped answering")
        return said

    def _name(self, rank: int) -> str:
        return self._names[rank] if self._names else ""

    def __repr__(self) -> str:
        return f"<ArrivalTable: {len(self._come)} have come; {'; '.join(self.said()) or 'nobody is missing'}>"
