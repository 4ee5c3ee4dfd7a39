"""What a peer has to offer: calls in the shape of `rpc`, so that what measures Telegrad measures it, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Peer(Protocol):
    """One callee, an actor in another process of this host, with `nothing`, `echo`, `take` and `give` as methods."""

    def rpc_sync(self, to: str, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """Call the method that has the function's name; `to` says nothing, there is one actor."""

    def rpc_async(self, to: str, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """The peer's own kind of future."""

    def publish(self, size: int) -> float:
        """Milliseconds until four actors have the same array of that many bytes, by the way that is meant for it."""

    def wait_all(self, futures: list[Any]) -> Any: ...

    def close(self) -> None: ...
