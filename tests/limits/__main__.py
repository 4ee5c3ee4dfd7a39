"""`python -m tests.limits` writes docs/limits.md anew."""

from tests.limits import rows
from tests.limits.page import PAGE

PAGE.write_text(rows.text())
