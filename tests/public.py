"""The public functions, classes and methods, for tests that go through all of them."""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from tests.surface import HANDED_OUT, INTERNAL, MODULES, PROMISES, Levels, exported

PROTOCOLS = ("__call__", "__iter__", "__next__", "__len__", "__enter__", "__exit__", "__repr__", "__str__", "__await__")


def modules() -> list[str]:
    return [name for name in MODULES if name not in ("telegrad.errors", "telegrad.compat")]


def functions() -> dict[str, Any]:
    """Return public functions by `module.name`."""
    return {name: value for name, value in _exports() if inspect.isroutine(value)}


def classes() -> dict[str, type]:
    """Return public classes by `module.name`, and those that users get but cannot import."""
    found = {
        name: value
        for name, value in _exports()
        if isinstance(value, type) and value.__name__ == name.rpartition(".")[2]  # without aliases
    }
    for module, name in HANDED_OUT:
        found[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
    return found


def _exports() -> Iterator[tuple[str, Any]]:
    levels = Levels.read(PROMISES.read_text())
    for module in modules():
        for name in exported(module):
            if levels.of(module, name) != INTERNAL:
                yield f"{module}.{name}", getattr(importlib.import_module(module), name)


def members(kind: type) -> dict[str, Any]:
    """Return the methods and properties of a class and of its bases, as far as this package defines them."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("telegrad."):
            found.update(vars(base))
    return {
        name: value
        for name, value in found.items()
        if (not name.startswith("_") or name in PROTOCOLS)
        and (inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod))
    }
