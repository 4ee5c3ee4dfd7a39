"""Monarch: a client that calls one actor in a process of this host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from monarch.actor import Actor, endpoint, shutdown_context, this_host

from benchmarks import calls


class Callee(Actor):
    @endpoint
    def nothing(self) -> None:
        calls.nothing()

    @endpoint
    def echo(self, value: Any) -> Any:
        return calls.echo(value)

    @endpoint
    def take(self, value: Any) -> None:
        calls.take(value)

    @endpoint
    def give(self, size: int) -> torch.Tensor:
        return calls.give(size)


class Monarch:
    def __init__(self) -> None:
        self._processes = this_host().spawn_procs({"gpus": 1})  # the name of a dimension; no GPU is asked for
        self._callee = self._processes.spawn("callee", Callee)
        self._callee.nothing.call_one().get()

    def rpc_sync(self, to: str, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        return getattr(self._callee, function.__name__).call_one(*args).get()

    def rpc_async(self, to: str, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        return getattr(self._callee, function.__name__).call_one(*args)

    def publish(self, size: int) -> float:
        raise NotImplementedError("Monarch has nothing of the kind for memory of the host")

    def wait_all(self, futures: list[Any]) -> Any:
        return [future.get() for future in futures]

    def close(self) -> None:
        self._processes.stop().get()
        shutdown_context().get()


start = Monarch
