"""Ray: a driver that calls one actor. Its defaults, without the dashboard."""

from __future__ import annotations

import os
import secrets
import statistics
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else it writes one to the home directory
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy
import ray
import torch

from benchmarks import calls
from benchmarks.measuring import times
from benchmarks.weights import READERS


@ray.remote
class Callee:
    def nothing(self) -> None:
        calls.nothing()

    def echo(self, value: Any) -> Any:
        return calls.echo(value)

    def take(self, value: Any) -> None:
        calls.take(value)

    def give(self, size: int) -> torch.Tensor:
        return calls.give(size)


@ray.remote
class Reader:
    def read(self, value: Any) -> int:
        return int(value[0])


class Ray:
    def __init__(self) -> None:
        ray.init(num_cpus=1 + READERS, include_dashboard=False, log_to_driver=False, logging_level="error")
        self._callee: Any = Callee.remote()  # type: ignore[attr-defined]  # which ray has made of the class
        ray.get(self._callee.nothing.remote())

    def rpc_sync(self, to: str, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        return ray.get(getattr(self._callee, function.__name__).remote(*args))

    def rpc_async(self, to: str, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        return getattr(self._callee, function.__name__).remote(*args)

    def publish(self, size: int) -> float:
        """An array of numpy is what readers map without a copy."""
        value = numpy.ones(size // 4, dtype=numpy.float32)
        readers: list[Any] = [Reader.remote() for _ in range(READERS)]  # type: ignore[attr-defined]

        def all_read() -> None:
            put = ray.put(value)
            ray.get([reader.read.remote(put) for reader in readers])

        taken = statistics.median(times(20, all_read)) * 1e3
        for reader in readers:
            ray.kill(reader)
        return taken

    def wait_all(self, futures: list[Any]) -> Any:
        return ray.get(futures)

    def close(self) -> None:
        ray.shutdown()


start = Ray
