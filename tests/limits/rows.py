"""All rows of the page, by what they show."""

from __future__ import annotations

from tests.limits import (
    cutting,
    features,
    left,
    pipelines,
    right_autograd,
    right_modules,
    right_optimizers,
    right_tensors,
    training,
    values,
)
from tests.limits.page import page

LIMITS = [*training.LIMITS, *features.LIMITS, *pipelines.LIMITS, *cutting.LIMITS, *values.LIMITS]
RIGHT = {
    "Autograd": right_autograd.RIGHT,
    "Modules": right_modules.RIGHT,
    "Optimizers": right_optimizers.RIGHT,
    "Tensors": right_tensors.RIGHT,
}
LEFT = left.LEFT


def text() -> str:
    return page(LIMITS, RIGHT, LEFT)
