"""What a program finds in place of a name that only the reference's own machinery has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def missing_from(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module that stands in for `module`."""

    def look_up(name: str) -> NoReturn:
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: Telegrad serves this module, and the name belongs to the "
            "inner workings of torch's own. What to use instead is in docs/migration.md of Telegrad"
        )

    return look_up
