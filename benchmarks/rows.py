"""All rows of the benchmark."""

from __future__ import annotations

from benchmarks.calls import CALLS
from benchmarks.cancelling import CANCELLING
from benchmarks.checkpoints import CHECKPOINTS
from benchmarks.crowds import CROWDS
from benchmarks.lifecycle import LIFECYCLE
from benchmarks.memory import MEMORY
from benchmarks.pipelines import PIPELINES
from benchmarks.recording import RECORDING
from benchmarks.training import TRAINING
from benchmarks.values import VALUES
from benchmarks.weights import WEIGHTS

# One thread per process, the default of torchrun: more threads than cores slow each other down.
_TRAINING = [row._replace(threads=1) for row in (*TRAINING, *PIPELINES)]
ROWS = [*CALLS, *VALUES, *CANCELLING, *RECORDING, *_TRAINING, *CROWDS, *WEIGHTS, *CHECKPOINTS, *LIFECYCLE, *MEMORY]
