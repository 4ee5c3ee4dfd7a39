"""Import hooks: call a function when a module was imported, before its importer continues.

A module's import can also be deferred. The module exists at once, with the attributes that the function sets, and its
own code runs when another attribute is accessed. It is then imported again normally, which takes Python's import locks.

A module can also be made to import another one first.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from telegrad._core.forks import renewed


class _Finder(importlib.abc.MetaPathFinder):
    """A finder before the real ones, which wraps the loaders of the watched modules."""

    def __init__(self) -> None:
        self.acts: dict[str, Callable[[ModuleType], None]] = {}
        self.ready: dict[str, ModuleType] = {}
        self.late: dict[str, _Late] = {}
        self.behind: dict[str, str] = {}  # module name to the module that is imported before it

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        first = self.behind.get(fullname)
        if first is not None and first not in sys.modules:
            importlib.import_module(first)
        ready = self.ready.get(fullname) or (sys.modules.get(fullname) if first is not None else None)
        if ready is not None:
            return importlib.machinery.ModuleSpec(fullname, _Ready(ready), is_package=hasattr(ready, "__path__"))
        act = self.acts.get(fullname)
        if act is None:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    late = self.late.get(fullname)
                    spec.loader = _Loader(spec.loader, act) if late is None else _LateLoader(spec.loader, act, late)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A loader that calls a function after another loader has run."""

    def __init__(self, loader: importlib.abc.Loader, act: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader  # restore the original loader
        self._loader.exec_module(module)
        self._act(module)


class _Late:
    """A deferred module, whose own code has not run yet."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None  # set by the first import
        self._lock = renewed(threading.Lock())  # guards _asleep
        self._asleep = True

    def wake(self) -> None:
        """Run the module's code, or wait for the thread that runs it."""
        assert self.module is not None
        name = self.module.__name__
        with self._lock:
            if self._asleep:
                sys.modules.pop(name, None)  # the next import then runs the module
                self._asleep = False
        importlib.import_module(name)

    def __call__(self, name: str) -> Any:
        """Return an attribute that the module does not have yet; serves as the module's `__getattr__`."""
        assert self.module is not None
        if not name.startswith("__") or name == "__all__":  # other dunder names are probed by introspection
            self.wake()
            if name in vars(self.module):
                return vars(self.module)[name]
        raise AttributeError(f"module {self.module.__name__!r} has no attribute {name!r}")


class _LateLoader(_Loader):
    """A loader that at first only calls the function, and runs the module at the second import."""

    def __init__(self, loader: importlib.abc.Loader, act: Callable[[ModuleType], None], late: _Late) -> None:
        super().__init__(loader, act)
        self._late = late

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._late.module or super().create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._late.module is None:
            self._late.module = module
            self._act(module)
            vars(module)["__getattr__"] = self._late
            return
        del _finder.late[module.__name__]
        super().exec_module(module)
        if vars(module).get("__getattr__") is self._late:
            del vars(module)["__getattr__"]


class _Ready(importlib.abc.Loader):
    """A loader that returns an existing module."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has replaced it


_finder = _Finder()


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act(module)` once, after the module of that name is imported."""
    _finder.acts[name] = act
    _stand_first()


def put_off_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Do the same as `after_import`, but defer the code of a module that is not imported yet until it is needed."""
    if name not in sys.modules:
        _finder.late[name] = _Late()
    after_import(name, act)


def catch_up(name: str) -> None:
    """Run the code of a deferred module now, if the module was imported."""
    late = _finder.late.get(name)
    if late is not None and late.module is not None:
        late.wake()


def serve_import(name: str, module: ModuleType) -> None:
    """Make imports of that name return `module`."""
    _finder.ready[name] = module
    _stand_first()


def import_before(first: str, names: Iterable[str]) -> None:
    """Import `first` before any of these modules, because the function called after its import needs them fully
    imported."""
    _finder.behind.update(dict.fromkeys(names, first))
    _stand_first()


def _stand_first() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget_import(name: str) -> None:
    """Remove all hooks for that name."""
    _finder.acts.pop(name, None)
    _finder.ready.pop(name, None)
    _finder.late.pop(name, None)
    _finder.behind = {behind: first for behind, first in _finder.behind.items() if first != name}
    if not _finder.acts and not _finder.ready and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
