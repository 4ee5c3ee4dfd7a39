"""The object by which `rref.rpc_sync().method(...)` calls a method of a value at its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from telegrad._core.pickling.remote_text import fold
from telegrad.errors import UsageError

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
        return RemoteMethod(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return RemoteMethod(self, "")(*args, **kwargs)


class RemoteMethod(Generic[R]):
    """A method of a value at its owner. An attribute that is no method looks the same here, so it must not be used."""

    __slots__ = ("_name", "_proxy")

    def __init__(self, proxy: Proxy[R], name: str) -> None:
        self._proxy = proxy
        self._name = name

    def __call__(self, /, *args: Any, **kwargs: Any) -> R:
        try:
            return self._proxy._call(self._name, self._proxy._timeout, args, kwargs)
        except BaseException as error:
            fold(error)
            raise

    def __repr__(self) -> str:
        return f"<the remote method {self._name!r}, not called; of an attribute, rref.to_here().{self._name} is a copy>"

    def __bool__(self) -> bool:
        raise UsageError(
            f"{self._name!r} was not called: write .{self._name}(...) for a method. To read an attribute, write "
            f"rref.to_here().{self._name}, which copies the value, or call a function on the owner that returns it"
        )

    def __eq__(self, _: object) -> bool:
        return bool(self)

    __hash__ = object.__hash__
