"""All rows of the page, by what they show."""

from __future__ import annotations

from tests.limits import (
    classes,
    cutting,
    features,
    left,
    pipelines,
    right_autograd,
    right_distributed,
    right_graphs,
    right_made,
    right_modules,
    right_optimizers,
    right_sent,
    right_tensors,
    sent,
    training,
    values,
)
from tests.limits.page import page

LIMITS = [*training.LIMITS, *features.LIMITS, *pipelines.LIMITS, *cutting.LIMITS, *values.LIMITS, *sent.LIMITS]
RIGHT = {
    "Autograd": {**right_autograd.RIGHT, **right_graphs.RIGHT},
    "Modules": {**right_modules.RIGHT, **right_made.RIGHT, **right_distributed.MODULES},
    "Optimizers": {**right_optimizers.RIGHT, **right_distributed.OPTIMIZERS},
    "Tensors": {**right_tensors.RIGHT, **right_sent.RIGHT, **right_distributed.TENSORS},
}
LEFT = left.LEFT


def text() -> str:
    right = {area: [*classes.GENERATED.get(area, ()), *programs] for area, programs in RIGHT.items()}
    return page(LIMITS, right, [*LEFT, *left.LEFT_TO_PROCESSES])
