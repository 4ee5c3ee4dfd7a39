"""Names under which another process finds the same function."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from telegrad.errors import FunctionNotFound

MAIN = "__main__"
_SPAWNED_MAIN = "__mp_main__"  # what multiprocessing calls the main module of a spawned child
_MANGLED = re.compile(r"___torch_mangle_\d+\.")
_CACHED = 4096

_names: dict[Any, str] = {}  # verified before; holds the functions, so that their hashes stay theirs


def name_of(function: Any, same_program: bool) -> str | None:
    """`module:qualname`, where that leads back to this very object in another process; else None.

    What is defined in the main program has a name only where the other process runs the same one.
    """
    try:
        name = _names.get(function)
    except TypeError:  # not hashable
        name = _find_name(function)
    else:
        if name is None:
            name = _find_name(function)
            if name is not None and len(_names) < _CACHED:
                _names[function] = name
    if name is not None and name.startswith("__main__:") and not same_program:
        return None
    return name


def resolve(name: str) -> Callable[..., Any]:
    """The function of that name in this process.

    Raises:
        FunctionNotFound: there is none; nothing was run.
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise FunctionNotFound(
            f"this worker has no {path!r} in module {module_name!r} ({error}); {_advice(module_name)}"
        ) from error
    return found  # type: ignore[no-any-return]


def _advice(module_name: str) -> str:
    if module_name == MAIN:
        return "define it at the top level of the main program, outside of `if __name__ == '__main__'`"
    return "make the same version of that module importable on all workers"


def _find_name(function: Any) -> str | None:
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _verified(function, "torch", f"ops.{function}")
    if isinstance(function, torch.jit.ScriptFunction):
        *modules, path = _MANGLED.sub("", function.qualified_name).removeprefix("__torch__.").split(".")
        module_name = ".".join(modules) or MAIN
    else:
        found = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
        if not isinstance(found, str):
            return None
        path = found
        module_name = str(pickle.whichmodule(function, path))  # type: ignore[attr-defined]
    return _verified(function, module_name, path) or _other_global(function, module_name)


def _verified(function: Any, module_name: str, path: str) -> str | None:
    if "<" in path:
        return None
    module_name = MAIN if module_name == _SPAWNED_MAIN else module_name
    try:
        found: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    same = found is function or (hasattr(function, "__func__") and found == function)
    return f"{module_name}:{path}" if same else None


def _other_global(function: Any, module_name: str) -> str | None:
    """A wrapper that still carries the name of what it wraps: the global that it is bound to."""
    module = sys.modules.get(module_name)
    for name, value in list(vars(module).items()) if module is not None else ():
        if value is function:
            return _verified(function, module_name, name)
    return None


_program: str | None = None


def program() -> str:
    """A fingerprint of the main program; empty where other processes cannot have the same (a notebook, a prompt)."""
    global _program
    if _program is None:
        path = getattr(sys.modules.get(MAIN), "__file__", None)
        try:
            with open(path, "rb") as file:  # type: ignore[arg-type]
                content = file.read()
        except (OSError, TypeError):
            _program = ""
        else:
            name = os.path.basename(path).encode()  # type: ignore[arg-type]
            _program = hashlib.sha256(name + b"\0" + content).hexdigest()[:32]
    return _program
