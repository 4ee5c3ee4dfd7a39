"""The functions that run on workers that are called."""

import threading
from typing import Any

import torch
from torch import Tensor, nn

import telegrad.rpc as rpc
from telegrad.weights import Publisher
from tests.cluster import next_turn

WEIGHTS = 30_000  # elements of the large tensor of a version
HOPELESS = 1 << 60  # bytes that no machine has


class Deliberate(Exception):
    """A remote function's own error."""


class Counter:
    """A counter that counts each call once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0

    def add(self) -> int:
        with self._lock:
            self._value += 1
            return self._value


def mirror(token: int, value: Any) -> tuple[int, Any]:
    """Return the value with the number of the call."""
    return token, value


def fail(token: int) -> None:
    raise Deliberate(token)


def hoard() -> int:
    return len(bytearray(HOPELESS))


def relay(to: str, token: int, value: Any, timeout: float) -> tuple[int, Any]:
    return rpc.rpc_sync(to, mirror, (token, value), timeout=timeout)


@rpc.functions.async_execution
def relay_async(to: str, token: int, value: Any, timeout: float) -> Any:
    future = rpc.rpc_async(to, mirror, (token, value), timeout=timeout)
    return future.then(lambda done: (done.wait()[0] + 1, done.wait()[1]))


async def relay_awaiting(to: str, token: int, value: Any, timeout: float) -> tuple[int, Any]:
    await next_turn()
    return await rpc.rpc_async(to, mirror, (token, value), timeout=timeout)


def pattern(token: int, size: int) -> Tensor:
    """Return the tensor of a number: each element tells its position."""
    return torch.arange(token % 1000, token % 1000 + size, dtype=torch.float32)


# References that other workers keep

_shelf: dict[int, Any] = {}


def put(token: int, reference: Any) -> None:
    _shelf[token] = reference


def fetch(token: int, timeout: float) -> Any:
    """Take a reference off the shelf and return its value."""
    return _shelf.pop(token).to_here(timeout)


def clear_shelf() -> None:
    _shelf.clear()
    with _publishing:
        if _publishers:
            _publishers.pop().close()


# Published weights

_publishing = threading.Lock()  # guards _publishers, so that the number in a version is its own
_publishers: list[Publisher] = []


def weights(number: int) -> dict[str, Any]:
    """Return weights of which every value tells their version."""
    return {"large": torch.full((WEIGHTS,), float(number)), "small": torch.full((3,), number), "number": number}


def publish() -> int:
    """Publish another version and return its number."""
    with _publishing:
        if not _publishers:
            _publishers.append(Publisher("weights", lambda: weights(_publishers[0].version + 1)))
        return _publishers[0].publish()


# Training


def square(x: Tensor) -> Tensor:
    return x * x


def cube_by(to: str, x: Tensor, timeout: float) -> Tensor:
    return rpc.rpc_sync(to, square, (x,), timeout=timeout) * x


def make_layer(seed: int, inputs: int, outputs: int) -> nn.Module:
    """Return the same layer for the same seed on any worker."""
    chance = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=chance) - 0.5)
    return layer
