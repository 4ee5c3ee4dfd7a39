"""When a worker of a dynamic group ends that only serves: with the group, as it is told, or with one it requires."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from telegrad.group.directory import LOST
from telegrad.group.members import Member


class Serving:
    """That of one worker; all but `ended` under the lock of its membership."""

    def __init__(self) -> None:
        self.ended = threading.Event()  # for those who only serve
        self.missed = ""  # a worker that is required and has died; stored once, before `ended`
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
            self.miss(member.name, gone.get(member.incarnation, ""))

    def miss(self, name: str, how: str) -> None:
        """A worker has gone, which may be required."""
        if how == LOST and not self.missed and any(name == each.name for each in self._required):
            self.missed = name
            self.ended.set()
