"""`python -m tests.limits` writes docs/limits.md anew."""

from tests.limits import pipelines, training, values
from tests.limits.page import PAGE, page

PAGE.write_text(page([*training.LIMITS, *pipelines.LIMITS, *values.LIMITS]))
