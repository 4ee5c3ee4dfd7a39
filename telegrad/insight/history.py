"""What was seen of a group in the last minute: the two latest sights, and events of all workers on one clock.

Pure: whoever looks gives it what was found.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from telegrad.insight.source import Sight
from telegrad.instruments import Event
from telegrad.witness.account import Account

SECONDS = 60.0  # at most, of which something is shown
KEPT = 6000  # events of a kind, for each worker: many calls do not drive out few steps
MOST = 16_000  # events of a kind that are given at once, of all workers together: it is done each second
LOOKS = 600  # of which the memory is kept


class Memory(NamedTuple):
    """Of a worker at one moment, in bytes."""

    time: float
    resident: int
    shared: int


class Recent(NamedTuple):
    """By worker, what was recorded lately."""

    events: dict[str, list[Event]]
    whole: bool  # else there was more of some kind than is kept, or can be shown at once


class History:
    """Times are seconds since `epoch`, a time of day: that of the first account."""

    def __init__(self) -> None:
        self.epoch = 0.0
        self.now = 0.0  # when the workers were looked at, the latest time
        self.before: Sight | None = None
        self.sight = Sight((), {})
        self.memory: dict[str, deque[Memory]] = defaultdict(lambda: deque(maxlen=LOOKS))
        self._events: dict[str, dict[str, deque[Event]]] = defaultdict(lambda: defaultdict(lambda: deque(maxlen=KEPT)))
        self._shifts: dict[str, tuple[object, float]] = {}  # by worker: which process, and its clock's zero on ours
        self._after: dict[str, float] = {}  # on the workers' clocks

    def take(self, sight: Sight) -> dict[str, float]:
        """Add what was seen; gives the times after which events are wanted."""
        if sight.accounts:
            self.epoch = self.epoch or sight.accounts[0]["time"]
            times = sorted(account["time"] for account in sight.accounts)
            self.now = times[len(times) // 2] - self.epoch  # one clock that is far off moves nothing
            self.before, self.sight = self.sight, sight
        else:
            self.sight = sight
        for account in sight.accounts:
            self._meet(account)
            self.memory[account["worker"]].append(Memory(self.now, account["memory"], account["shared"]))
        return dict(self._after)

    def add(self, events: Mapping[str, Sequence[Event]]) -> None:
        """What was recorded since, oldest first, of workers that have been seen."""
        for worker, own in events.items():
            if not own or worker not in self._shifts:
                continue
            _, shift = self._shifts[worker]
            kept = self._events[worker]
            for kind, begun, ended, *rest in own:
                kept[kind].append((kind, begun + shift, ended + shift, *rest))
            self._after[worker] = max(event[2] for event in own)

    def recent(self, seconds: float) -> Recent:
        """The events that ended in the last `seconds`."""
        since = self.now - seconds
        most = min(KEPT, MOST // max(1, len(self._events)))
        events: dict[str, list[Event]] = {}
        whole = True
        for worker, kinds in self._events.items():
            events[worker] = []
            for own in kinds.values():
                found = list(islice(takewhile(lambda event: event[2] >= since, reversed(own)), most))
                events[worker] += found
                whole = whole and len(found) < most
        return Recent(events, whole)

    def _meet(self, account: Account) -> None:
        """A process that is new has a clock of its own."""
        worker, process = account["worker"], (account["host"], account["pid"])
        if self._shifts.get(worker, ("",))[0] != process:
            self._shifts[worker] = process, account["time"] - account["clock"] - self.epoch
            self._after.pop(worker, None)
