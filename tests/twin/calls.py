"""Calls and references in the one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.twin.world import Stays, World


class RRef(Stays):
    """A reference to a value of one worker."""

    def __init__(self, value: Any, owner: int | None = None, error: BaseException | None = None) -> None:
        self.owner_number = self.world.here if owner is None else owner
        self.value, self.error = value, error

    def _found(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def to_here(self, timeout: float = 0) -> Any:
        found = self._found()
        if self.owner_number == self.world.here:
            return found
        here = self.world.here
        with self.world.at(self.owner_number):
            return self.world.carry(found, here)

    def local_value(self) -> Any:
        return self._found()

    def owner_name(self) -> str:
        return self.world.names[self.owner_number]

    def is_owner(self) -> bool:
        return self.owner_number == self.world.here

    def rpc_sync(self, timeout: float = 0) -> Proxy:
        return Proxy(self, rpc_sync_in(self.world))

    def rpc_async(self, timeout: float = 0) -> Proxy:
        return Proxy(self, rpc_async_in(self.world))

    def remote(self, timeout: float = 0) -> Proxy:
        return Proxy(self, remote_in(self.world))

    def rpc_stream(self, timeout: float = 0) -> Proxy:
        return Proxy(self, stream_in(self.world))


class Proxy:
    def __init__(self, reference: Any, way: Callable[..., Any]) -> None:
        self.__dict__.update(_reference=reference, _way=way)

    def __getattr__(self, name: str) -> Any:
        reference = self._reference
        return lambda *args, **kwargs: self._way(reference.owner_name(), _run_method, (reference, name, *args), kwargs)


def _run_method(reference: RRef, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(reference.local_value(), name)(*args, **kwargs)


def rpc_sync_in(world: World) -> Callable[..., Any]:
    return lambda to, function, args=None, kwargs=None, timeout=0: world.call(to, function, args or (), kwargs)


def rpc_async_in(world: World) -> Callable[..., Any]:
    def rpc_async(to: Any, function: Any, args: Any = None, kwargs: Any = None, timeout: float = 0) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        try:
            future.set_result(world.call(to, function, args or (), kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    return rpc_async


def remote_in(world: World) -> Callable[..., Any]:
    def remote(to: Any, function: Any, args: Any = None, kwargs: Any = None, timeout: float = 0) -> Any:
        owner = world.number_of(to)
        try:
            return world.kind(RRef)(world.call(to, function, args or (), kwargs, stay=True), owner)
        except Exception as error:
            return world.kind(RRef)(None, owner, error)

    return remote


class Stream:
    """A stream whose items are all made at once."""

    def __init__(self, items: list[Any], value: Any, error: BaseException | None) -> None:
        self.items, self.end, self.error, self.value = items, value, error, None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        if self.items:
            return self.items.pop(0)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.value = self.end
        raise StopIteration

    def close(self) -> None:
        self.items, self.error = [], None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stream_in(world: World) -> Callable[..., Any]:
    def rpc_stream(to: Any, function: Any, args: Any = None, kwargs: Any = None, **_: Any) -> Stream:
        source, items = world.here, []
        found = world.call(to, function, args or (), kwargs, stay=True)
        with world.at(world.number_of(to)):
            found = iter(found)
            while True:
                try:
                    items.append(world.carry(next(found), source))
                except StopIteration as end:
                    return Stream(items, world.carry(end.value, source), None)
                except Exception as error:
                    return Stream(items, None, error)

    return rpc_stream


def async_execution(function: Any) -> Any:
    function.is_async_execution = True
    return function
