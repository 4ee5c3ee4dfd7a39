"""How the clocks of workers relate. It reads no clock by itself.

One exchange: a worker reads its clock and asks another, which reads its own when the question comes and when the
answer leaves, and the first reads its own again. Nobody knows how the time on the way was shared between the two
directions, so the other's clock is ahead by something between (left - received) and (came - sent). The middle of these
is the offset, half of what lies between its uncertainty, and the exchange that was the shortest on its way tells most.

A call that both sides have recorded is such an exchange, too, and so is a mark in a profile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

FAR = 1.0  # seconds between exchanges from which on they can tell of drift
REFERENCE, SAME, MEASURED, CALLS, UNKNOWN = (
    "the reference",
    "the same clock as the reference",
    "measured by exchanges",
    "from recorded calls",
    "unknown",
)


class Reading(NamedTuple):
    """What a worker's clocks show at one moment."""

    time: float  # of perf_counter, in seconds
    day: float  # time of day, in seconds
    clock: str  # equal where two processes read the same clock; empty where that is not known


class Exchange(NamedTuple):
    """A question and its answer."""

    sent: float  # on the clock of who asks
    came: float  # on the other clock
    left: float
    received: float  # on the clock of who asks

    @property
    def offset(self) -> float:
        return ((self.came - self.sent) + (self.left - self.received)) / 2

    @property
    def uncertainty(self) -> float:
        return max(0.0, (self.received - self.sent) - (self.left - self.came)) / 2


class Relation(NamedTuple):
    """How another clock relates to that of a reference: what it shows less what the reference shows."""

    offset: float  # at the time `at` of the reference
    uncertainty: float
    drift: float = 0.0  # seconds that it gains in one of the reference
    at: float = 0.0
    how: str = MEASURED

    def ahead(self, time: float) -> float:
        """The offset at a time of the reference."""
        return self.offset + self.drift * (time - self.at)

    def to_reference(self, there: float) -> float:
        """What the reference shows as the other clock shows `there`."""
        return self.at + (there - self.at - self.offset) / (1 + self.drift)

    def __str__(self) -> str:
        if self.how in (REFERENCE, SAME, UNKNOWN):
            return self.how
        drift = f", drifts by {self.drift * 1e6:+.1f} µs per second" if self.drift else ""
        return f"{self.how}: {self.offset * 1e6:+,.1f} µs, ± {self.uncertainty * 1e6:,.1f} µs{drift}"


def relate(exchanges: Sequence[Exchange], how: str = MEASURED) -> Relation:
    """How the other clock relates to that of who asked. At least one exchange is needed."""
    first = min(each.sent for each in exchanges)
    middle = (first + max(each.sent for each in exchanges)) / 2
    early, late = (
        min(half, key=_uncertainty, default=None)
        for half in (
            [each for each in exchanges if each.sent <= middle],
            [each for each in exchanges if each.sent > middle],
        )
    )
    if early is not None and late is not None and late.sent - early.sent >= FAR:
        apart = late.sent - early.sent
        drift = (late.offset - early.offset) / apart
        if abs(drift) > (early.uncertainty + late.uncertainty) / apart:  # else it may well be none
            uncertainty = max(early.uncertainty, late.uncertainty)
            return Relation(early.offset, uncertainty, drift, (early.sent + early.received) / 2, how)
    best = min(exchanges, key=_uncertainty)
    return Relation(best.offset, best.uncertainty, 0.0, (best.sent + best.received) / 2, how)


def _uncertainty(exchange: Exchange) -> float:
    return exchange.uncertainty


def through(middle: Relation, further: Relation) -> Relation:
    """How a clock relates to the reference's that was compared with the clock of a worker in the middle only."""
    offset = middle.offset + further.ahead(middle.at + middle.offset)
    how = further.how
    if how == SAME and middle.how != REFERENCE:
        how = middle.how
    return Relation(offset, middle.uncertainty + further.uncertainty, middle.drift + further.drift, middle.at, how)


def spread(reference: str, compared: Mapping[tuple[str, str], Relation]) -> dict[str, Relation]:
    """How the clocks of workers relate to the reference's, given how those of pairs do (who asked, who was asked).

    Of several ways the one with the fewest workers in the middle counts. Who is not reached is left out.
    """
    found = {reference: Relation(0.0, 0.0, how=REFERENCE)}
    wave = [reference]
    while wave:
        ahead = []
        for here in wave:
            for there, relation in sorted(_neighbours(here, compared), key=lambda pair: pair[1].uncertainty):
                if there not in found:
                    found[there] = through(found[here], relation)
                    ahead.append(there)
        wave = ahead
    return found


def _neighbours(here: str, compared: Mapping[tuple[str, str], Relation]) -> Iterator[tuple[str, Relation]]:
    for (one, other), relation in compared.items():
        if one == here:
            yield other, relation
        elif other == here:
            yield one, turned(relation)


def turned(relation: Relation) -> Relation:
    """The same, seen from the other side."""
    return relation._replace(offset=-relation.offset, drift=-relation.drift, at=relation.at + relation.offset)


# Marks in a profile: regions whose names tell what the worker's clock showed right before they began

MARK = "telegrad clock "


def mark(time: float) -> str:
    """The name of a mark that is made now."""
    return f"{MARK}{time!r}"


def of_profile(regions: Iterable[tuple[str, float, float]]) -> Relation | None:
    """How a profile's clock relates to that of its worker, by its marks: names, beginnings and ends, in their order.

    A mark lies between its own time and that of the next one. None where there are none.
    """
    marks = [(float(name[len(MARK) :]), begun, ended) for name, begun, ended in regions if name.startswith(MARK)]
    marks.sort()
    exchanges = [
        Exchange(sent, begun, ended, received) for (sent, begun, ended), (received, *_) in itertools.pairwise(marks)
    ]
    return relate(exchanges) if exchanges else None
