"""Who is in a group, and how each is reached."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from telegrad.errors import InvalidName, UnknownWorker

LONGEST_NAME = 127
_NAME = re.compile(r"[A-Za-z0-9_:-]+")


class Member(NamedTuple):
    """What a worker publishes about itself."""

    name: str
    id: int
    incarnation: str  # tells a worker that was started anew from its former self
    program: str  # equal where the main programs are
    host: str  # equal where the kernel and the network are the same
    unix: str  # its Unix socket's name, empty where it has none
    tcp: tuple[str, int]

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        name, id_, incarnation, program, host, unix, (address, port) = json.loads(text)
        return cls(name, id_, incarnation, program, host, unix, (address, port))

    def __str__(self) -> str:
        return f"{self.name!r} (rank {self.id}, at {self.tcp[0]}:{self.tcp[1]})"


class Members:
    """A group of fixed size."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._by_id = {member.id: member for member in members}
        self._by_name = {member.name: member for member in self._by_id.values()}

    def find(self, to: str | int) -> Member:
        """The member of that name or rank.

        Raises:
            UnknownWorker: there is none.
        """
        member = self._by_name.get(to) if isinstance(to, str) else self._by_id.get(to)
        if member is None:
            raise unknown(to, [each.name for each in self])
        return member

    def __iter__(self) -> Iterator[Member]:
        return iter(sorted(self._by_id.values(), key=lambda member: member.id))

    def __len__(self) -> int:
        return len(self._by_id)


def unknown(to: str | int, names: list[str]) -> UnknownWorker:
    """The error for a worker that is not there, with what the caller may have meant."""
    if not isinstance(to, str):
        return UnknownWorker(f"no worker has rank {to}; the group has ranks 0 to {len(names) - 1}")
    close = difflib.get_close_matches(to, names, 1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    shown = ", ".join(names[:16]) + (", ..." if len(names) > 16 else "")
    return UnknownWorker(f"no worker is named {to!r}{meant} The group has: {shown or 'nobody'}")


def check_name(name: str) -> None:
    """Raise InvalidName where `name` is none that a worker may have."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise InvalidName(
            f"{name!r} cannot be a worker's name: "
            f"use 1 to {LONGEST_NAME} letters, digits, underscores, colons and dashes"
        )
