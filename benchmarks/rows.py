"""What is measured."""

from __future__ import annotations

from benchmarks.calls import CALLS
from benchmarks.training import TRAINING

ROWS = [*CALLS, *TRAINING]
