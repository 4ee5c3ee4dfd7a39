"""Where the workers of a group meet: who has come, and who is missing. Pure.

A meeting is of those who are in the group as it begins. Who has come to one and comes again waits for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Key(NamedTuple):
    """What tells meetings apart."""

    kind: str  # the function that the workers call
    group: str
    name: str


class Meeting:
    """One."""

    def __init__(self, key: Key, members: Sequence[str]) -> None:
        self.key = key
        self.members = list(members)
        self.come: dict[str, Any] = {}  # with what each brought
        self.tired: set[str] = set()  # who waits no longer

    @property
    def missing(self) -> list[str]:
        return [name for name in self.members if name not in self.come]

    @property
    def late(self) -> list[str]:
        """Who never came, of those that are missing; where all did, those that wait no longer."""
        return [name for name in self.missing if name not in self.tired] or self.missing

    def brought(self) -> list[Any]:
        """What they brought, in the order of the members."""
        return [self.come[name] for name in self.members]

    def __repr__(self) -> str:
        return f"<Meeting of {len(self.members)}, missing: {', '.join(self.missing) or 'nobody'}>"


class Gatherings:
    """All meetings that one worker keeps."""

    def __init__(self) -> None:
        self._meetings: dict[Key, list[Meeting]] = {}  # not complete, in the order in which they began

    def arrive(self, key: Key, who: str, brings: Any, members: Sequence[str]) -> Meeting:
        """Someone has come; the meeting, which is over if nobody is missing. A new one is of these members."""
        meetings = self._meetings.setdefault(key, [])
        for meeting in meetings:
            if who in meeting.missing:
                break
        else:
            meeting = Meeting(key, members)
            meetings.append(meeting)
        meeting.come[who] = brings
        meeting.tired.discard(who)
        if not meeting.missing:
            self._end(meeting)
        return meeting

    def withdraw(self, who: str, meeting: Meeting) -> None:
        """Someone waits no longer, and counts as one who has not come."""
        meeting.come.pop(who, None)
        meeting.tired.add(who)
        if not meeting.come:
            self._end(meeting)

    def gone(self, who: str) -> list[Meeting]:
        """Someone has died or left: the meetings that will never be complete, which are over."""
        hopeless = [meeting for all_ in self._meetings.values() for meeting in all_ if who in meeting.missing]
        for meeting in hopeless:
            self._end(meeting)
        return hopeless

    def _end(self, meeting: Meeting) -> None:
        meetings = self._meetings.get(meeting.key, [])
        if meeting in meetings:
            meetings.remove(meeting)
        if not meetings:
            self._meetings.pop(meeting.key, None)
