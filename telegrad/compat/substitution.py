"""Replace modules, and every name that refers to the replaced ones. The replacement can be undone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Container, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from telegrad.compat.imports import after_import, catch_up, forget_import, put_off_import, serve_import

_ABSENT: Any = object()


class Export(NamedTuple):
    """A name in a module that is not replaced, and its new value."""

    place: str
    name: str
    value: Any
    home: str = ""  # the module that defines torch's own value, if torch imports it lazily

    @property
    def holder(self) -> Any:
        return sys.modules[self.place]


class Substitution:
    """A replacement of modules and of names in other modules."""

    def __init__(
        self, modules: Mapping[str, ModuleType], exports: Iterable[Export], put_off: Container[str] = ()
    ) -> None:
        """`modules` are the new modules by the old names, each after its parent.

        Modules in `put_off` run their own code only when more than their exports is needed.
        """
        self._put_off = put_off
        self._modules = dict(modules)
        self._old: dict[str, ModuleType | None] = {}
        self._exports: dict[str, list[Export]] = {}  # by the module that has the names
        self._before: dict[str, dict[str, Any]] = {}  # the old values of these names
        for export in exports:
            self._exports.setdefault(export.place, []).append(export)

    def take_effect(self) -> None:
        """Replace everything. Modules that are not imported yet change when they are."""
        self._old = {name: sys.modules.get(name) for name in self._modules}
        for name, module in self._modules.items():
            serve_import(name, module)
            if self._old[name] is not None or _is_made_by_its_parent(name):
                _put(name, module)
        for place in self._exports:
            (put_off_import if place in self._put_off else after_import)(place, self._enter)
            if place in sys.modules:
                self._enter(sys.modules[place])
        _rebind(self._pairs())

    def _enter(self, module: ModuleType) -> None:
        """Set the new names of a module."""
        before = self._before.setdefault(module.__name__, {})
        for export in self._exports[module.__name__]:
            was = vars(export.holder).get(export.name, _ABSENT)
            before.setdefault(export.name, _ABSENT if was is export.value else was)
            setattr(export.holder, export.name, export.value)

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return the pairs of old and new values, for everything that the old modules define."""
        return [pair for name, new in self._modules.items() for pair in _pairs_of(self._old[name], new)]

    def undo(self) -> None:
        """Restore everything."""
        for place in self._exports:
            catch_up(place)
        for name in (*self._modules, *self._exports):
            forget_import(name)
        for name, ours in self._modules.items():
            if self._old[name] is None and sys.modules.get(name) is ours:  # it was imported later
                del sys.modules[name]
                self._old[name] = _imported(name)
            _put(name, self._old[name])
        for place, before in self._before.items():
            for export in self._exports[place]:
                value = before[export.name]
                if value is _ABSENT and export.home:
                    value = getattr(_imported(export.home), export.name, _ABSENT)
                if value is _ABSENT:
                    delattr(export.holder, export.name)
                else:
                    setattr(export.holder, export.name, value)
        _rebind([(new, old) for old, new in self._pairs()])


def _put(name: str, module: ModuleType | None) -> None:
    """Make imports of `name` return a module, or none; set the parent's attribute, too."""
    place, _, leaf = name.rpartition(".")
    parent = sys.modules.get(place)
    if module is not None:
        sys.modules[name] = module
        setattr(parent, leaf, module)
    elif parent is not None and name not in sys.modules:
        vars(parent).pop(leaf, None)


def _is_made_by_its_parent(name: str) -> bool:
    """Return True if imports do not search for a module, because its imported parent is not a package."""
    parent = sys.modules.get(name.rpartition(".")[0])
    return parent is not None and not hasattr(parent, "__path__")


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError):  # torch was built without it
        return None


def _pairs_of(old: ModuleType | None, new: ModuleType) -> list[tuple[Any, Any]]:
    if old is None:
        return []
    family = _family(old.__name__)
    pairs: list[tuple[Any, Any]] = [(old, new)]
    for name, value in vars(new).items():
        other = vars(old).get(name)
        if other is not value and not name.startswith("__") and _is_of(other, family):
            pairs.append((other, value))
    return pairs


def _is_of(value: Any, family: list[str]) -> bool:
    """Return True if a value is defined in the package, not only imported there."""
    if isinstance(value, ModuleType) or not callable(value):
        return False
    return _family(getattr(value, "__module__", None) or "") == family


def _family(module: str) -> list[str]:
    """Return the package of a module; C++ modules count as part of it."""
    return module.replace("torch._C._distributed_", "torch.distributed.").split(".")[:3]


def _rebind(pairs: list[tuple[Any, Any]]) -> None:
    """Make every name in any module that refers to the first of a pair refer to the second."""
    by_id = {id(old): (old, new) for old, new in reversed(pairs)}  # of several entries the first one counts
    spared = {id(vars(each)) for pair in pairs for each in pair if isinstance(each, ModuleType)}
    for name, module in list(sys.modules.items()):
        if (
            not isinstance(module, ModuleType)
            or f"{name}.".startswith(("torch._C.", "telegrad."))
            or id(vars(module)) in spared
        ):
            continue
        for member, value in list(vars(module).items()):
            if id(value) in by_id and by_id[id(value)][0] is value:
                setattr(module, member, by_id[id(value)][1])
