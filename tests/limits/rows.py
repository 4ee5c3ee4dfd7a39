"""All rows of the page, by the kind of their result."""

from tests.limits import classes, left, pipelines, right_autograd, right_modules, right_tensors, training, values
from tests.limits.page import lefts, limits, page, programs

AREAS = (
    *("Autograd", "Modules", "Optimizers", "Tensors", "Pipelines"),
    *("Functions and values", "References", "Actors", "Weights", "Checkpoints"),
)
REFUSED = training.REFUSED | pipelines.REFUSED | values.REFUSED
LIMITS = [limit for area in AREAS for limit in limits(area, REFUSED[area])]
RIGHT = {
    area: programs(table) for area, table in (right_autograd.RIGHT | right_modules.RIGHT | right_tensors.RIGHT).items()
}
LEFT = [each for area, table in left.LEFT.items() for each in lefts(area, table)]
LEFT_TO_PROCESSES = [each for area, table in left.LEFT_TO_PROCESSES.items() for each in lefts(area, table)]


def text() -> str:
    right = {area: [*classes.GENERATED.get(area, ()), *rows] for area, rows in RIGHT.items()}
    return page(LIMITS, right, [*LEFT, *LEFT_TO_PROCESSES])
