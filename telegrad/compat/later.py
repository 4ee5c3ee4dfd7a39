"""A package of torch's that is run only when somebody asks it for more than it was given."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import threading
from types import ModuleType
from typing import Any


class Later(importlib.abc.Loader):
    """Puts off what another loader does until the module is asked for a name that it does not have."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        lock = threading.RLock()  # guards the run
        running = False

        def run_and_get(name: str) -> Any:
            nonlocal running
            with lock:
                if not running and vars(module).get("__getattr__") is run_and_get:
                    running = True
                    try:
                        self._loader.exec_module(module)
                    finally:
                        running = False
                    if vars(module).get("__getattr__") is run_and_get:  # torch's own has none
                        del module.__getattr__
                elif running:  # it asks itself while it is run
                    raise AttributeError(f"partially initialized module {module.__name__!r} has no attribute {name!r}")
            return getattr(module, name)

        module.__getattr__ = run_and_get  # type: ignore[method-assign]
