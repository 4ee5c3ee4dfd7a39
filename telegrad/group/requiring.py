"""When a worker of a dynamic group ends that only serves: with the group, as it is told, or with one it requires.

Itself it requires, too: once others take it for dead, nobody calls it any more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from telegrad.group.members import Member
from telegrad.group.registry import LOST


class Serving:
    """That of one worker; all but `ended` under the lock of its membership."""

    def __init__(self, me: Member) -> None:
        self._me = me
        self.ended = threading.Event()  # for those who only serve
        self.missed: Member | None = None  # which is required and was lost; stored once, before `ended`
        self._only_serves = False
        self._required: Sequence[Member] = ()

    @property
    def leaves(self) -> bool:
        """Whether this worker only serves, and has done so."""
        return self._only_serves and self.ended.is_set()

    def begin(self, required: Sequence[Member], gone: Mapping[str, str]) -> None:
        """From now on it only serves, until one of those dies, too; `gone` tells by incarnation how they went."""
        self._required, self._only_serves = required, True
        for member in required:
            self.miss(member, gone.get(member.incarnation, ""))

    def miss(self, member: Member, how: str) -> None:
        """A worker has gone, which may be required."""
        required = member.incarnation == self._me.incarnation or member.name in {each.name for each in self._required}
        if how == LOST and required and self.missed is None:
            self.missed = member
            self.ended.set()
