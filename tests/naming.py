"""Names of parametrized tests that are alike in each process."""

from __future__ import annotations

import re


def alike(value: object) -> str:
    """A value's text, without where in memory it lies."""
    return re.sub(r" at 0x\w+", "", str(value))
