"""What has changed from each version to the next, piece by piece, for who has the one and fetches the other.

The publisher makes deltas when it publishes, as long as somebody is on another host; who has fetched a piece so passes
the same deltas on. Whose base is no version that they lead from gets the whole piece. Where most of a version has
changed, which the first pieces show, none are made, and none are looked for in the next ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor

from telegrad.weights.deltas import apply, encode
from telegrad.weights.layout import Layout
from telegrad.weights.words import About

Deltas = Literal["off", "fast", "small"]

WORTH = 0.5  # of a piece: a larger delta is not sent
SHOWN = 8  # pieces that show whether a version is worth it
RESTS = 31  # versions at most in which nothing is looked for


class Changes:
    """The deltas of the last versions, as long as they take less memory than a version does."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, Tensor]] = {}  # by the version that they lead to, and by pieces
        self._sizes: dict[int, int] = {}  # of all that lead to a version

    def keep(self, number: int, piece: int, delta: Tensor, room: int) -> None:
        """`room`: how many bytes a version has."""
        self._steps.setdefault(number, {})[piece] = delta
        self._sizes[number] = self._sizes.get(number, 0) + len(delta)
        while sum(self._sizes.values()) > room:
            oldest = min(self._steps)
            del self._steps[oldest], self._sizes[oldest]

    def between(self, base: int, number: int, piece: int, room: int) -> list[Tensor]:
        """What leads from one version to another; nothing where that is not here, or takes more than `room` bytes."""
        found: list[Tensor] = []
        for step in range(base + 1, number + 1):
            delta = self._steps.get(step, {}).get(piece)
            if delta is None or not base:
                return []
            found.append(delta)
            room -= len(delta)
        return found if room > 0 else []


class Finder:
    """Finds what has changed, where that pays."""

    def __init__(self, deltas: Deltas) -> None:
        self._small = deltas == "small"
        self._off = deltas == "off"
        self._rests = self._left = 0  # versions: how many to rest for, and how many of these are left

    def find(self, layout: Layout, about: About, old: Tensor, new: Tensor) -> dict[int, Tensor]:
        """Deltas of two versions by pieces, without those that are not worth it."""
        if self._off or self._left:
            self._left = max(0, self._left - 1)
            return {}
        found: dict[int, Tensor] = {}
        spent = size = 0
        for looked, piece in enumerate(_spread(about.pieces), 1):
            before, after = part(layout, about, old, piece), part(layout, about, new, piece)
            delta = encode(before, after, small=self._small)
            whole = min(about.piece, about.size - piece * about.piece)
            worth = len(delta) < WORTH * whole
            size += whole
            spent += len(delta) if worth else whole
            if worth:
                found[piece] = delta
            if looked >= min(SHOWN, about.pieces) and spent > WORTH * size:
                self._rests = self._left = min(2 * self._rests + 1, RESTS)
                return {}
        self._rests = 0
        return found


def part(layout: Layout, about: About, memory: Tensor, piece: int) -> list[Tensor]:
    """The tensors of a piece, as far as they lie in it."""
    return layout.parts(memory, piece * about.piece, min((piece + 1) * about.piece, about.size))


def renew(layout: Layout, about: About, old: Tensor, new: Tensor, piece: int, deltas: Sequence[Tensor]) -> None:
    """Make a piece of a version from that of an older one.

    Raises:
        DeltaRefused: they do not lead from there.
    """
    parts = part(layout, about, new, piece)
    for here, there in zip(parts, part(layout, about, old, piece), strict=True):
        here.copy_(there)
    for delta in deltas:
        apply(delta, parts)


def _spread(count: int) -> Iterator[int]:
    """All numbers below it, the first of them from everywhere."""
    step = max(1, count // SHOWN)
    for start in range(step):
        yield from range(start, count, step)
