"""Names under which another process finds the same function."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from time import monotonic, sleep
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import Any

import torch

from telegrad._core.host.private_files import open_regular
from telegrad._core.pickling import main_program as programs
from telegrad._core.pickling.main_program import MAIN, SPAWNED_MAIN, fingerprint
from telegrad._core.pickling.remote_text import first_line, short
from telegrad.errors import FunctionNotFound

_MAIN_PREFIX = f"{MAIN}:"
_MANGLED = re.compile(r"___torch_mangle_\d+\.")
_REMADE = (MethodType, BuiltinFunctionType)  # a new object at each look, equal to the last one
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_SAME: Any = object.__eq__
_CACHED = 4096

MOST_TRIES = 10  # of one import
WITHHELD = 1.0  # seconds at most that a module is waited for which must not be imported now

_names: dict[Any, str] = {}  # verified before; holds the functions, so that their hashes stay theirs


def name_of(function: Any, same_program: bool) -> str | None:
    """`module:qualname`, where that leads back to this very object in another process; else None.

    What is defined in the main program has a name only where the other process runs the same one, and where workers
    have imported it, only if all that it uses is there.
    """
    try:
        name = _names.get(function)
    except TypeError:  # not hashable
        name = _find_name(function)
    else:
        if name is None:
            name = _find_name(function)
            own_equality = type(function).__eq__ is not _SAME and not isinstance(function, _REMADE)
            if name is not None and not own_equality:
                if len(_names) >= _CACHED:
                    _names.clear()
                _names[function] = name
    if name is not None and name.startswith(_MAIN_PREFIX):
        if not same_program:
            return None
        if programs.hosts:
            from telegrad._core.pickling.global_names import lacks

            if lacks(function):
                return None
    return name


def resolve(name: str) -> Callable[..., Any]:
    """What has that name in this process now; its module is imported if need be.

    Raises:
        FunctionNotFound: there is none; nothing was run.
    """
    module_name, _, path = name.partition(":")
    found: Any = _imported(module_name)
    if found is not None:
        try:
            for part in path.split("."):
                found = getattr(found, part)
            return found  # type: ignore[no-any-return]
        except AttributeError:
            pass  # another thread may be in the midst of importing the module: wait for it below
    try:
        found = import_anew(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise not_found(module_name, path, error) from error
    return found  # type: ignore[no-any-return]


def import_anew(module_name: str) -> ModuleType:
    """Import a module; again where Python refused, as two threads were amid modules that need each other."""
    for _ in range(MOST_TRIES):
        try:
            return importlib.import_module(module_name)
        except RuntimeError as error:
            if "deadlock detected" not in str(error):
                raise
            sleep(1e-2)
    return importlib.import_module(module_name)


def _imported(module_name: str) -> ModuleType | None:
    """The module, if it was imported; waits while a thread withholds it, as torch's compiler does for a moment."""
    until = 0.0
    while (found := sys.modules.get(module_name)) is None and module_name in sys.modules:
        until = until or monotonic() + WITHHELD
        if monotonic() > until:
            break
        sleep(1e-3)
    return found


def not_found(module_name: str, path: str, error: BaseException) -> FunctionNotFound:
    """The error that says what is missing and what helps."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if module_name == MAIN:
        advice = "define it at the top level of the main program, outside of `if __name__ == '__main__'`"
    elif file is None:
        advice = "make the same version of that module importable on all workers"
    else:
        advice = (
            f"its module here is {file}, as it was when this worker imported it, maybe an older version than that of "
            "the caller. Start this worker anew with the same version"
        )
    return FunctionNotFound(
        f"this worker has no {short(path)!r} in module {short(module_name)!r} ({first_line(error)}); "
        f"the RPC pickler does not serialize what can be imported by its name: {advice}, "
        "or send the function itself, as telegrad.rpc.functions.by_value(function)"
    )


def _find_name(function: Any) -> str | None:
    if isinstance(function, _OPERATORS):
        return _verified(function, "torch", f"ops.{function}")
    if isinstance(function, torch.jit.ScriptFunction):
        return _verified(function, *home_of_script(function))
    path = getattr(function, "__qualname__", None)
    owner = getattr(function, "__self__", None)
    if not isinstance(path, str) or not isinstance(owner, (type, ModuleType, type(None))):
        return None
    if isinstance(function, MethodType) and isinstance(owner, type):  # the class may be an heir of the one in `path`
        return _verified(function, owner.__module__, f"{owner.__qualname__}.{function.__name__}")
    module_names = _modules_of(function)
    if "<" in path:  # a lambda or a local function, which may be bound to a global once compiled
        return _other_global(function, module_names[0]) if hasattr(function, "_torchdynamo_orig_callable") else None
    for module_name in module_names:
        for candidate in (path, getattr(function, "__name__", path)):
            name = _verified(function, module_name, candidate)
            if name is not None:
                return name
    return _other_global(function, module_names[0])


def home_of_script(function: torch.jit.ScriptFunction[Any, Any]) -> tuple[str, str]:
    """The module where a script function was made, and its name there."""
    *modules, last = _MANGLED.sub("", function.qualified_name).removeprefix("__torch__.").split(".")
    return ".".join(modules) or MAIN, last


def _modules_of(function: Any) -> tuple[str, ...]:
    """Where a function may be found; built-in ones often do not tell."""
    for teller in (function, getattr(function, "__objclass__", None)):
        module_name = getattr(teller, "__module__", None)
        if isinstance(module_name, str):
            return (MAIN if module_name == SPAWNED_MAIN else module_name,)
    return "builtins", "torch"


def _verified(function: Any, module_name: str, path: str) -> str | None:
    """The name, if it leads to this very object."""
    if module_name == SPAWNED_MAIN:
        module_name = MAIN
    while module_name not in sys.modules and "." in module_name:  # a namespace made by an extension
        module_name, _, last = module_name.rpartition(".")
        path = f"{last}.{path}"
    found: Any = _imported(module_name)
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):  # `torch.ops` raises the latter
        return None
    same = found is function or (isinstance(function, _REMADE) and found == function)
    return f"{module_name}:{path}" if same else None


def _other_global(function: Any, module_name: str) -> str | None:
    """A wrapper that still carries the name of what it wraps: the global that it is bound to."""
    module = sys.modules.get(module_name)
    for name, value in list(vars(module).items()) if module is not None else ():
        if value is function:
            return f"{module_name}:{name}"
    return None


_program: str | None = None


def program() -> str:
    """A fingerprint of the main program; empty where other processes cannot have the same (a notebook, a prompt)."""
    global _program
    if _program is None:
        path = getattr(sys.modules.get(MAIN), "__file__", None)
        try:
            with open_regular(path) as file:  # type: ignore[arg-type]
                content = file.read()
        except (OSError, TypeError):
            _program = ""
        else:
            _program = fingerprint(path, content)  # type: ignore[arg-type]
    return _program
