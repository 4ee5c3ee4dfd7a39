"""What a row should reach: each kind of target gives a threshold in the unit of the row.

A time must be at most its threshold, a rate at least. Where what it is compared with was not measured, there is none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

Figures = Sequence[float]


class Measured(NamedTuple):
    """What targets of one row look at."""

    theirs: Figures  # the peer's figures of this row
    ours_elsewhere: Mapping[str, Figures]  # Telegrad's of other rows over the same transport, by name
    limits: Mapping[str, Figures]  # what the machine allows, by name
    pipelining: Figures = ()  # torch.distributed.pipelining's of this row


class Target(Protocol):
    def threshold(self, measured: Measured) -> float | None: ...

    @property
    def reason(self) -> str: ...


class OfPeer(NamedTuple):
    """So many times the peer's figure."""

    factor: float

    def threshold(self, measured: Measured) -> float | None:
        return _times(self.factor, measured.theirs)

    @property
    def reason(self) -> str:
        return f"{self.factor:g} of the peer's" if self.factor < 1 else f"{self.factor:g} times the peer's"


class OfPipelining(NamedTuple):
    """So many times the figure of torch.distributed.pipelining."""

    factor: float

    def threshold(self, measured: Measured) -> float | None:
        return _times(self.factor, measured.pipelining)

    @property
    def reason(self) -> str:
        return f"{self.factor:g} times torch.distributed.pipelining's"


class OfLimit(NamedTuple):
    """A part of what the machine allows."""

    part: float
    limit: str

    def threshold(self, measured: Measured) -> float | None:
        return _times(self.part, measured.limits.get(self.limit, ()))

    @property
    def reason(self) -> str:
        return f"{self.part:.0%} of the {self.limit}"


class OfRow(NamedTuple):
    """So many times Telegrad's figure of another row."""

    factor: float
    row: str

    def threshold(self, measured: Measured) -> float | None:
        return _times(self.factor, measured.ours_elsewhere.get(self.row, ()))

    @property
    def reason(self) -> str:
        return f"{self.factor:g} times {self.row}"


class Absolute(NamedTuple):
    """A figure as such."""

    figure: float

    def threshold(self, measured: Measured) -> float | None:
        return self.figure

    @property
    def reason(self) -> str:
        return ""


class Computed(NamedTuple):
    """A figure that is worked out when it is asked for."""

    compute: Callable[[], float]
    reason: str

    def threshold(self, measured: Measured) -> float | None:
        return self.compute()


def _times(factor: float, figures: Figures) -> float | None:
    return factor * statistics.median(figures) if figures else None
