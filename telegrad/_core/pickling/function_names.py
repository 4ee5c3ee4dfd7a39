"""Names under which other processes find the same function.

A name is `module:path`, where the path consists of attributes. The receiver imports the module if necessary, and
follows the path. The sender uses a name only if it leads to this very object in its own process: a decorator may have
given its wrapper the name of the wrapped function, and a name may have been bound again.
"""

import atexit
import functools
import importlib
import re
import sys
from collections.abc import Callable
from operator import attrgetter
from time import monotonic, sleep
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import Any

import torch

from telegrad._core.pickling import main_program as programs
from telegrad._core.pickling.global_names import lacks, warn_of_differing
from telegrad._core.pickling.main_program import MAIN, SPAWNED_MAIN, fingerprint_of
from telegrad._core.pickling.remote_text import first_line, short
from telegrad.errors import FunctionNotFound

_MAIN_PREFIX = f"{MAIN}:"
_MANGLED = re.compile(r"___torch_mangle_\d+\.")
_REMADE = (MethodType, BuiltinFunctionType)  # each attribute access returns a new, equal object
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_SAME: Any = object.__eq__
_CACHED = 4096

MOST_TRIES = 10  # attempts of one import
WITHHELD = 1.0  # maximum seconds to wait while a module is withheld from import

_looked: set[str] = set()  # functions of the main program whose globals were compared with the driver's
# Verified names, which are valid in all processes; and those of the main program, which are not. The tables keep the
# functions alive, because ids in hashes could be reused.
verified: dict[Any, str] = {}
_verified_in_main: dict[Any, str] = {}
atexit.register(verified.clear)  # see `_own` in main_modules.py
atexit.register(_verified_in_main.clear)


def keep_name(names: dict[Any, str], function: Any, name: str) -> None:
    """Store the name of a function; forget an earlier function of that name, which was defined again."""
    if len(names) >= _CACHED:
        names.clear()
    for earlier in [each for each, known in names.copy().items() if known == name]:
        names.pop(earlier, None)  # another thread may be faster
    names[function] = name


def name_of(function: Any, same_program: bool) -> str | None:
    """Return `module:qualname` if it leads to this very object in another process; else None.

    A function of the main program has a name only if the other process runs the same program. If workers have imported
    that program, all globals that the function uses must exist there, too.
    """
    try:
        name = verified.get(function) or _verified_in_main.get(function)
    except TypeError:  # unhashable
        name = _find_name(function)
    else:
        if name is None:
            name = _find_name(function)
            # A callable with an equality of its own may equal another one, which would get its name from the table.
            own_equality = type(function).__eq__ is not _SAME and not isinstance(function, _REMADE)
            if name is not None and not own_equality:
                keep_name(_verified_in_main if name.startswith(_MAIN_PREFIX) else verified, function, name)
    if name is not None and name.startswith(_MAIN_PREFIX):
        if not same_program:
            return None
        # A worker that has imported the program from its file lacks the names that only the guard or a function has
        # bound. A function that reads one of them is sent by value, with its globals.
        if programs.hosts and lacks(function):
            return None
    return name


def resolve(name: str) -> Callable[..., Any]:
    """Return the object with that name, and import its module if necessary; raise FunctionNotFound if there is none."""
    module_name, _, path = name.partition(":")
    found: Any = sys.modules.get(module_name)
    if found is None:
        found = _imported(module_name)
    if found is not None:
        try:
            found = attrgetter(path)(found)
            if programs.differing and module_name == MAIN and path not in _looked:
                _looked.add(path)
                warn_of_differing(found)
            return found  # type: ignore[no-any-return]
        except AttributeError:
            pass  # another thread may be importing the module: wait for it below
    try:
        return attrgetter(path)(import_anew(module_name))  # type: ignore[no-any-return]
    except Exception as error:
        raise not_found(module_name, path, error) from cause_of(module_name, error)


def import_anew(module_name: str) -> ModuleType:
    """Import a module; retry if Python detects a deadlock of two threads that import circular modules."""
    # Python holds a lock for each module that a thread imports. If one thread imports `a`, which imports `b`, and
    # another thread imports `b`, which imports `a`, Python detects the circle, and raises in one of them. A later
    # attempt succeeds, once the other thread has finished.
    for _ in range(MOST_TRIES):
        try:
            return importlib.import_module(module_name)
        except RuntimeError as error:
            if "deadlock detected" not in str(error):
                raise
            sleep(1e-2)
    return importlib.import_module(module_name)


def _imported(module_name: str) -> ModuleType | None:
    """Return the module if it is imported; wait while a thread withholds it, as torch's compiler does briefly."""
    until = 0.0
    while (found := sys.modules.get(module_name)) is None and module_name in sys.modules:
        until = until or monotonic() + WITHHELD
        if monotonic() > until:
            break
        sleep(1e-3)
    return found


def not_found(module_name: str, path: str, error: BaseException) -> FunctionNotFound:
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if module_name == MAIN:
        advice = "define it at the top level of the main program before `init_rpc`, outside `if __name__ == '__main__'`"
    elif file is None:
        advice = "make the same version of that module importable on all workers"
    else:
        advice = (
            f"this worker imported the module from {file}, maybe an older version than the caller's. Restart this "
            "worker with the same version"
        )
    return FunctionNotFound(
        f"this worker has no {short(path)!r} in module {short(module_name)!r} ({first_line(error)}); "
        f"the RPC pickler does not serialize what can be imported by its name: {advice}, "
        "or send the function itself, as telegrad.rpc.functions.by_value(function)"
    )


def cause_of(module_name: str, error: BaseException) -> BaseException | None:
    """Return the error if code of the module has raised it: `not_found` tells all about other errors."""
    if isinstance(error, ImportError):
        return error if error.name != module_name else None
    return error if module_name not in sys.modules else None


def _find_name(function: Any) -> str | None:
    if isinstance(function, OPERATORS):
        return _verified(function, "torch", f"ops.{function}")
    if isinstance(function, torch.jit.ScriptFunction):
        return _verified(function, *home_of_script(function))
    path = getattr(function, "__qualname__", None)
    owner = getattr(function, "__self__", None)
    if not isinstance(path, str) or not isinstance(owner, (type, ModuleType, type(None))):
        return None
    if isinstance(function, MethodType) and isinstance(owner, type):  # the class may be a subclass of the one in `path`
        return _verified(function, owner.__module__, f"{owner.__qualname__}.{function.__name__}")
    module_names = _modules_of(function)
    if "<" in path:  # a lambda or local function; a compiled one may be bound to a global
        return _other_global(function, module_names[0]) if hasattr(function, "_torchdynamo_orig_callable") else None
    for module_name in module_names:
        for candidate in (path, getattr(function, "__name__", path)):
            name = _verified(function, module_name, candidate)
            if name is not None:
                return name
    return _other_global(function, module_names[0])


def home_of_script(function: "torch.jit.ScriptFunction[Any, Any]") -> tuple[str, str]:
    *modules, last = _MANGLED.sub("", function.qualified_name).removeprefix("__torch__.").split(".")
    return ".".join(modules) or MAIN, last


def _modules_of(function: Any) -> tuple[str, ...]:
    """Return the modules that may contain a function; built-in functions often do not name theirs."""
    for teller in (function, getattr(function, "__objclass__", None)):
        module_name = getattr(teller, "__module__", None)
        if isinstance(module_name, str):
            return (MAIN if module_name == SPAWNED_MAIN else module_name,)
    return "builtins", "torch"


def _verified(function: Any, module_name: str, path: str) -> str | None:
    if module_name == SPAWNED_MAIN:
        module_name = MAIN
    while module_name not in sys.modules and "." in module_name:  # a namespace created by an extension module
        module_name, _, last = module_name.rpartition(".")
        path = f"{last}.{path}"
    try:
        found = attrgetter(path)(_imported(module_name))
    except (AttributeError, RuntimeError):  # `torch.ops` raises RuntimeError
        return None
    same = found is function or (isinstance(function, _REMADE) and found == function)
    return f"{module_name}:{path}" if same else None


def _other_global(function: Any, module_name: str) -> str | None:
    """Return the name of the global that is bound to a wrapper whose own name is that of the wrapped function."""
    module = sys.modules.get(module_name)
    for name, value in list(vars(module).items()) if module is not None else ():
        if value is function:
            return f"{module_name}:{name}"
    return None


@functools.cache
def program() -> str:
    """Return a fingerprint of the main program; "" if other processes cannot have the same (a notebook, a prompt)."""
    return fingerprint_of(getattr(sys.modules.get(MAIN), "__file__", None))
