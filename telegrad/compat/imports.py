"""Has something done when a module has just been imported, before whoever imports it goes on.

A module can also be put off: it is there at once, with what the act gives it, and its own code runs when it is asked
for anything else. It is then imported once more, as any other is, so that the locks of Python's imports hold for it.

And a module can be put behind another, which is imported before it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from telegrad._core.atfork import renewed


class _Finder(importlib.abc.MetaPathFinder):
    """Stands before the real finders, and wraps the loaders of the modules that are waited for."""

    def __init__(self) -> None:
        self.acts: dict[str, Callable[[ModuleType], None]] = {}
        self.ready: dict[str, ModuleType] = {}
        self.late: dict[str, _Late] = {}
        self.behind: dict[str, str] = {}  # modules, and which is imported before each

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


class _Late:
    """A module whose own code has not run yet."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None  # once it was asked for
        self._lock = renewed(threading.Lock())  # guards _asleep
        self._asleep = True

    def wake(self) -> None:
        """Run the module's code, or wait for whoever does."""
        assert self.module is not None
        name = self.module.__name__
        with self._lock:
            if self._asleep:
                sys.modules.pop(name, None)  # so that it is imported, by whoever comes first now
                self._asleep = False
        importlib.import_module(name)

    def __call__(self, name: str) -> Any:
        """What the module has under a name that it did not have so far: its `__getattr__`."""
        assert self.module is not None
        if not name.startswith("__") or name == "__all__":  # others are asked of modules by who only looks around
            self.wake()
            if name in vars(self.module):
                return vars(self.module)[name]
        raise AttributeError(f"module {self.module.__name__!r} has no attribute {name!r}")


class _LateLoader(_Loader):
    """As `_Loader`, but the first time only what comes after the work is done."""

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


def put_off_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """As `after_import`, but a module that is not imported yet runs its own code only when that is needed."""
    if name not in sys.modules:
        _finder.late[name] = _Late()
    after_import(name, act)


def catch_up(name: str) -> None:
    """Have a module that was put off, and asked for, run its own code now."""
    late = _finder.late.get(name)
    if late is not None and late.module is not None:
        late.wake()


def serve_import(name: str, module: ModuleType) -> None:
    """Have imports of that name find `module`."""
    _finder.ready[name] = module
    _stand_first()


def import_before(first: str, names: Iterable[str]) -> None:
    """Import `first` before any of these modules: the act that follows its import needs them whole."""
    _finder.behind.update(dict.fromkeys(names, first))
    _stand_first()


def _stand_first() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget_import(name: str) -> None:
    """Have nothing to do with imports of that name any longer."""
    _finder.acts.pop(name, None)
    _finder.ready.pop(name, None)
    _finder.late.pop(name, None)
    _finder.behind = {behind: first for behind, first in _finder.behind.items() if first != name}
    if not _finder.acts and not _finder.ready and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
