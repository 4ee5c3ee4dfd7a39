"""Estimate offsets between the clocks of workers from pairs of readings. No clock is read here.

In one exchange, a worker reads its clock and asks another worker. The other worker reads its clock when the question
arrives and when the answer leaves. Then the first worker reads its clock again. The split of the transfer time between
the two directions is unknown, so the other clock is ahead by a value between (left - received) and (came - sent). The
offset is their middle, and the uncertainty is half their difference. The exchange with the least uncertainty counts
most.

A call that both workers recorded is such an exchange, and so is a mark in a profile.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

FAR = 1.0  # minimum seconds between exchanges to estimate drift
REFERENCE, SAME, UNKNOWN = "the reference", "the same clock as the reference", "unknown"
MEASURED, CALLS = "measured by exchanges", "from recorded calls"


class Exchange(NamedTuple):
    """A question and its answer."""

    sent: float  # on the asking worker's clock
    came: float  # on the other clock
    left: float
    received: float  # on the asking worker's clock

    @property
    def offset(self) -> float:
        return ((self.came - self.sent) + (self.left - self.received)) / 2

    @property
    def uncertainty(self) -> float:
        return abs((self.received - self.sent) - (self.left - self.came)) / 2


class ClockOffset(NamedTuple):
    """The other clock's reading minus the reference's."""

    offset: float  # at the time `at` of the reference
    uncertainty: float
    drift: float = 0.0  # seconds gained per second of the reference
    at: float = 0.0
    how: str = MEASURED

    def to_reference(self, there: float) -> float:
        """Return the reference's reading when the other clock reads `there`."""
        return self.at + (there - self.at - self.offset) / (1 + self.drift)

    def __str__(self) -> str:
        if self.how in (REFERENCE, SAME, UNKNOWN):
            return self.how
        drift = f", drifts by {self.drift * 1e6:+.1f} µs per second" if self.drift else ""
        return f"{self.how}: {self.offset * 1e6:+,.1f} µs, ± {self.uncertainty * 1e6:,.1f} µs{drift}"


def estimate(exchanges: Sequence[Exchange], how: str = MEASURED) -> ClockOffset:
    """Return the offset of the other clock from the asking worker's clock. At least one exchange is needed."""
    sent = [each.sent for each in exchanges]
    middle = (min(sent) + max(sent)) / 2
    uncertainty = attrgetter("uncertainty")
    early = min((each for each in exchanges if each.sent <= middle), key=uncertainty)
    late = min((each for each in exchanges if each.sent >= middle), key=uncertainty)
    best, apart, gained = min(early, late, key=uncertainty), late.sent - early.sent, late.offset - early.offset
    if apart >= FAR and abs(gained) > early.uncertainty + late.uncertainty:  # a smaller difference may not be drift
        worse = max(early.uncertainty, late.uncertainty)
        return ClockOffset(early.offset, worse, gained / apart, (early.sent + early.received) / 2, how)
    return ClockOffset(best.offset, best.uncertainty, 0.0, (best.sent + best.received) / 2, how)


def offsets_from(reference: str, exchanges: Mapping[tuple[str, str], Sequence[Exchange]]) -> dict[str, ClockOffset]:
    """Return the offsets of all clocks that are connected by exchanges, each through as few other clocks as possible.

    `exchanges` is keyed by pairs of clocks, the asking worker's first. The uncertainties along a path add up.
    """
    known: dict[str, dict[str, list[Exchange]]] = defaultdict(lambda: defaultdict(list))
    for (asking, asked), own in exchanges.items():
        known[asking][asked] += own
        known[asked][asking] += [Exchange(each.came, each.sent, each.received, each.left) for each in own]
    found = {reference: ClockOffset(0.0, 0.0, how=SAME)}
    ahead = [reference]
    for here in ahead:
        clock = found[here]
        for there, own in known[here].items():
            if there in found:
                continue
            moved = [
                Exchange(clock.to_reference(sent), came, left, clock.to_reference(received))
                for sent, came, left, received in own
            ]
            offset = estimate(moved, CALLS)
            found[there] = offset._replace(uncertainty=offset.uncertainty + clock.uncertainty)
            ahead.append(there)
    return found


# Marks in a profile: regions whose names have the worker's clock reading from right before they began

MARK = "telegrad clock "


def mark(time: float) -> str:
    """Return the name of a mark that begins now, at `time`."""
    return f"{MARK}{time!r}"


def offset_of_profile(regions: Iterable[tuple[str, float, float]]) -> ClockOffset | None:
    """Return the offset of a profile's clock from its worker's clock, from the marks among its regions (name, begin,
    end).

    A mark lies between its own time and that of the next mark. Return None if there are fewer than two marks.
    """
    marks = sorted((float(name[len(MARK) :]), begun, ended) for name, begun, ended in regions if name.startswith(MARK))
    pairs = itertools.pairwise(marks)
    exchanges = [Exchange(sent, begun, ended, received) for (sent, begun, ended), (received, *_) in pairs]
    return estimate(exchanges) if exchanges else None
