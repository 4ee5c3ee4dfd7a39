"""Names of parametrized tests that are equal in each process."""

import re


def alike(value: object) -> str:
    """Return a value's text without its address in memory."""
    return re.sub(r" at 0x\w+", "", str(value))
