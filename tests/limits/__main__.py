"""Write docs/limits.md anew: `python -m tests.limits`."""

from tests.limits import rows
from tests.limits.page import PAGE

PAGE.write_text(rows.text())
