"""The error for names that only torch's own implementation has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def missing_from(module: str) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` for a module that replaces `module`."""

    def look_up(name: str) -> NoReturn:
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: Telegrad serves this module, and the name belongs to the "
            "inner workings of torch's own. What to use instead is in docs/migration.md of Telegrad"
        )

    return look_up
