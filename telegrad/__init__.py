"""Distributed model parallelism for PyTorch: remote calls, remote references, autograd, modules, optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from telegrad import errors
from telegrad.version import VERSION as __version__

if TYPE_CHECKING:
    from telegrad import autograd, checkpoint, compat, insight, nn, optim, rpc, weights
    from telegrad.hosting import LocalGroup

__all__ = [
    "__version__",
    "autograd",
    "checkpoint",
    "compat",
    "errors",
    "insight",
    "local",
    "nn",
    "optim",
    "rpc",
    "weights",
]

_ROOMS = ("autograd", "checkpoint", "compat", "insight", "nn", "optim", "rpc", "weights")


def __getattr__(name: str) -> ModuleType:
    """What users import from here, imported when they use it."""
    if name in _ROOMS:
        return import_module(f"telegrad.{name}")
    raise AttributeError(f"module 'telegrad' has no attribute {name!r}")


def local(workers: int | Sequence[str], *, driver: str = "driver", rpc_timeout: float = 60.0) -> LocalGroup:
    """Start workers on this host, and join them as `driver`; in a `with` statement, or until `shutdown()`.

    `workers` is their number (they are named worker0, worker1 ...) or their names. They can import what this process
    can, and run what it defines in its main program or notebook. What they print comes out here. They end with this
    process, however it ends; Ctrl-C does not reach them.

    Raises:
        RendezvousError: a worker ended before all had met; the message has its last lines.
        AlreadyInitialized: this process is in a group already.
    """
    from telegrad.hosting import LocalGroup

    return LocalGroup(workers, driver, rpc_timeout)
