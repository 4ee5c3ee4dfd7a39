"""Has something done when a module has just been imported, before whoever imports it goes on."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from telegrad.compat.later import Later


class _Finder(importlib.abc.MetaPathFinder):
    """Stands before the real finders, and wraps the loaders of the modules that are waited for."""

    def __init__(self) -> None:
        self.acts: dict[str, Callable[[ModuleType], None]] = {}
        self.ready: dict[str, ModuleType] = {}
        self.late: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        ready = self.ready.get(fullname)
        if ready is not None:
            return importlib.machinery.ModuleSpec(fullname, _Ready(ready), is_package=hasattr(ready, "__path__"))
        act = self.acts.get(fullname)
        if act is None:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(Later(spec.loader) if fullname in self.late else spec.loader, act)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A loader that does something after another has done its work."""

    def __init__(self, loader: importlib.abc.Loader, act: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader  # as if nobody had stood between
        self._loader.exec_module(module)
        self._act(module)


class _Ready(importlib.abc.Loader):
    """Gives a module that there is already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import has changed


_finder = _Finder()


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Have `act(module)` done once, when the module of that name has been imported."""
    _finder.acts[name] = act
    _stand_first()


def put_off(name: str) -> None:
    """Have the module of that name, for which something `after_import` is done, run when more is asked of it."""
    _finder.late.add(name)


def serve_import(name: str, module: ModuleType) -> None:
    """Have imports of that name find `module`."""
    _finder.ready[name] = module
    _stand_first()


def _stand_first() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget_import(name: str) -> None:
    """Have nothing to do with imports of that name any longer."""
    _finder.acts.pop(name, None)
    _finder.ready.pop(name, None)
    _finder.late.discard(name)
    if not _finder.acts and not _finder.ready and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
