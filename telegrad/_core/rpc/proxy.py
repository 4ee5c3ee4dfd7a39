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
        return partial(_use, self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return _use(self, "", *args, **kwargs)


def _use(proxy: Proxy[R], method: str, /, *args: Any, **kwargs: Any) -> R:
    try:
        return proxy._call(method, proxy._timeout, args, kwargs)
    except BaseException as error:
        fold(error)
        raise
