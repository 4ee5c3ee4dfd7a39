"""Disable torch's own RPC, so that no test passes with it."""

import os
import types
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

RPC, AUTOGRAD = "torch._C._distributed_rpc", "torch._C._distributed_autograd"
MARK = "torch's own RPC was reached:"


def forbid(modules: Iterable[types.ModuleType]) -> None:
    """Replace the entry points in the modules by functions that raise.

    Pass the modules that `install()` took out of `sys.modules`, too: functions that are still referenced use them, and
    they contain the entry points themselves.
    """
    modules = list(modules)
    closed = {
        getattr(room, name): _closed(f"{room.__name__}.{name}")
        for room in modules
        if room.__name__ in (RPC, AUTOGRAD)
        for name in dir(room)
        if _is_door(room, name)
    }
    assert closed, "torch's own modules in C are not among these"
    for module in modules:
        for name, value in list(vars(module).items()):
            if type(value) is types.BuiltinFunctionType and value in closed:
                setattr(module, name, closed[value])


def _is_door(room: types.ModuleType, name: str) -> bool:
    """Return True for calls and the start of an agent, and for every function of autograd."""
    if room.__name__ == AUTOGRAD:
        return isinstance(getattr(room, name), types.BuiltinFunctionType)
    return name.startswith("_invoke_") or name == "_set_and_start_rpc_agent"


def _closed(name: str) -> Callable[..., NoReturn]:
    def closed(*args: Any, **kwargs: Any) -> NoReturn:
        os.write(2, f"{MARK} {name}\n".encode())  # a test may expect an error, so the log shows this one
        raise AssertionError(f"{MARK} {name}")

    return closed
