"""Targets of rows. Each kind of target computes a threshold in the unit of the row.

A time must be at most its threshold, a rate at least. The threshold is None if the compared figure was not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

Figures = Sequence[float]


class Measured(NamedTuple):
    """The figures from which the targets of one row are computed."""

    theirs: Figures  # figures of torch.distributed.rpc for this row
    ours_elsewhere: Mapping[str, Figures]  # Telegrad's figures of other rows over the same transport, by name
    limits: Mapping[str, Figures]  # limits of the machine, by name
    pipelining: Figures = ()  # figures of torch.distributed.pipelining for this row


class Target(Protocol):
    def threshold(self, measured: Measured) -> float | None: ...

    @property
    def reason(self) -> str: ...


class OfPeer(NamedTuple):
    """A multiple of the peer's figure."""

    factor: float

    def threshold(self, measured: Measured) -> float | None:
        return _times(self.factor, measured.theirs)

    @property
    def reason(self) -> str:
        return f"{self.factor:g} of the peer's" if self.factor < 1 else f"{self.factor:g} times the peer's"


class OfPipelining(NamedTuple):
    """A multiple of the figure of torch.distributed.pipelining."""

    factor: float

    def threshold(self, measured: Measured) -> float | None:
        return _times(self.factor, measured.pipelining)

    @property
    def reason(self) -> str:
        return f"{self.factor:g} times torch.distributed.pipelining's"


class OfLimit(NamedTuple):
    """A fraction of a limit of the machine."""

    part: float
    limit: str

    def threshold(self, measured: Measured) -> float | None:
        return _times(self.part, measured.limits.get(self.limit, ()))

    @property
    def reason(self) -> str:
        return f"{self.part:.0%} of the {self.limit}"


class OfRow(NamedTuple):
    """A multiple of Telegrad's figure in another row."""

    factor: float
    row: str

    def threshold(self, measured: Measured) -> float | None:
        return _times(self.factor, measured.ours_elsewhere.get(self.row, ()))

    @property
    def reason(self) -> str:
        return f"{self.factor:g} times {self.row}"


class Absolute(NamedTuple):
    """A fixed figure."""

    figure: float

    def threshold(self, measured: Measured) -> float | None:
        return self.figure

    @property
    def reason(self) -> str:
        return ""


class Computed(NamedTuple):
    """A figure that is computed on demand."""

    compute: Callable[[], float]
    reason: str

    def threshold(self, measured: Measured) -> float | None:
        return self.compute()


def _times(factor: float, figures: Figures) -> float | None:
    return factor * statistics.median(figures) if figures else None
