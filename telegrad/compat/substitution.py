"""Replace modules, and every name that refers to the replaced ones. The replacement can be undone.

A module that is not imported yet is replaced when it is imported. The hooks for this also call a function when a module
was imported, before its importer continues, and can make a module import another one first.

A module's import can also be deferred. The module exists at once, with the attributes that the function sets, and its
own code runs when another attribute is accessed. It is then imported again normally, which takes Python's import locks.

This file does not import torch.
"""

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from telegrad._core.forks import renewed

_ABSENT: Any = object()


class Export(NamedTuple):
    """A name in a module that is not replaced, and its new value."""

    place: str
    name: str
    value: Any
    home: str = ""  # the module that defines torch's own value, if torch imports it lazily


class Substitution:
    """A replacement of modules and of names in other modules."""

    def __init__(
        self, modules: Mapping[str, ModuleType], exports: Iterable[Export], put_off: Container[str] = ()
    ) -> None:
        """`modules` are the new modules by the old names, each after its parent; those in `put_off` run their own code
        only when more than their exports is needed."""
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
            was = vars(module).get(export.name, _ABSENT)
            before.setdefault(export.name, _ABSENT if was is export.value else was)
            setattr(module, export.name, export.value)

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return the pairs of old and new values, for everything that the old modules define."""
        return [pair for name, new in self._modules.items() for pair in _pairs_of(self._old[name], new)]

    def undo(self) -> None:
        """Restore everything."""
        # First, deferred modules run. Without the hooks, the next import would make another module instead of filling
        # this one.
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
                    delattr(sys.modules[place], export.name)
                else:
                    setattr(sys.modules[place], export.name, value)
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
    # Programs hold replaced objects under names of their own, as after `from torch.distributed.rpc import RRef`, so the
    # names of all modules are looked at. Names in Telegrad's modules stay: they mean its own classes, also when `undo`
    # comes here with the pairs reversed. References from classes, closures and other objects are not found.
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


# Import hooks


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
            place, _, leaf = fullname.rpartition(".")
            if place in self.ready and sys._getframe(2).f_code.co_name != "find_spec":  # that of `importlib.util`
                try:
                    getattr(self.ready[place], leaf)
                except AttributeError as error:  # its text has advice
                    raise ModuleNotFoundError(str(error), name=fullname) from None
            return None
        # Asks the finders that would have been asked without this one, and only wraps the loader of their answer.
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, act)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A loader that calls a function after another loader has run. At the first import of a deferred module it only
    calls the function; at the second one it runs the module."""

    def __init__(self, loader: importlib.abc.Loader, act: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        # The second import must fill the same object, since the program has references to it.
        late = _finder.late.get(spec.name)
        return (late.module if late is not None else None) or self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        late = _finder.late.get(module.__name__)
        if late is not None and late.module is None:
            late.module = module
            self._act(module)
            vars(module)["__getattr__"] = late
            return
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader  # restore the original loader
        _finder.late.pop(module.__name__, None)
        self._loader.exec_module(module)
        self._act(module)
        if late is not None and vars(module).get("__getattr__") is late:
            del vars(module)["__getattr__"]


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
        # Only one thread removes the module from `sys.modules`. The import below then runs the module's code, in this
        # thread or in another one, and Python's lock for the import makes the rest wait. It must not be under this
        # lock: the thread that runs the code may itself come here, for a name that the module does not have yet.
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
    """Import `first` before any of these modules: the function called after its import needs them fully imported."""
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
