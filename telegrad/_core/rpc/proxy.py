"""The object by which `rref.rpc_sync().method(...)` calls a method of a value at its owner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from telegrad._core.pickling.remote_text import fold

R = TypeVar("R")


class Proxy(Generic[R]):
    """Makes `proxy.method(*args)` call that method at the owner of the value, and `proxy(*args)` call the value.

    Example:
        >>> words = rpc.remote("worker1", list, ("ab",))
        >>> words.rpc_sync().index("b")
        1
    """

    __slots__ = ("_call", "_timeout")

    def __init__(self, call: Callable[[str, float, Any, Any], R], timeout: float) -> None:
        self._call = call
        self._timeout = timeout

    def __getattr__(self, method: str) -> Callable[..., R]:
        if method.startswith("__"):
            raise AttributeError(method)  # Python looks for a protocol; no remote call is meant
        return RemoteMethod(_use, self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return _use(self, "", *args, **kwargs)


class RemoteMethod(partial[R]):
    """A method that a call runs at the owner of its value."""

    __slots__ = ()

    def __repr__(self) -> str:
        name = self.args[1]
        return f"<remote method {name!r}: call it; to read an attribute, write rref.to_here().{name}>"


def _use(proxy: Proxy[R], method: str, /, *args: Any, **kwargs: Any) -> R:
    try:
        return proxy._call(method, proxy._timeout, args, kwargs)
    except BaseException as error:
        fold(error)
        raise
