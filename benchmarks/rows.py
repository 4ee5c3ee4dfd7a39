"""What is measured."""

from __future__ import annotations

from benchmarks.calls import CALLS
from benchmarks.crowds import CROWDS
from benchmarks.lifecycle import LIFECYCLE
from benchmarks.memory import MEMORY
from benchmarks.training import TRAINING

ROWS = [*CALLS, *TRAINING, *CROWDS, *LIFECYCLE, *MEMORY]
