"""Distributed model parallelism for PyTorch: remote calls, remote references, autograd, modules, optimizers.

The examples in these docstrings run in a group of three workers, started by `with telegrad.local(2):`. This process is
the worker "driver", the others are "worker0" and "worker1". The examples assume these imports:

    import telegrad, torch
    from telegrad import rpc
    from telegrad.rpc import functions
    from torch import nn
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from telegrad import errors
from telegrad._core.texts import SafeRecords
from telegrad.version import VERSION as __version__

if TYPE_CHECKING:
    from telegrad import autograd, checkpoint, compat, insight, nn, optim, rpc, weights
    from telegrad.launch.local import LocalGroup
    from telegrad.rpc import Group

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
    "process_group",
    "recover",
    "rpc",
    "weights",
]

logging.getLogger("telegrad").addFilter(SafeRecords())

# A torch that is imported later warns that NumPy, which is optional, is not installed; each worker would do so.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)


def __getattr__(name: str) -> ModuleType:
    """Import a subpackage when the user's program first accesses its name."""
    # Not before: programs that only start workers, such as `telegrad run`, do without torch.
    if name in __all__:
        return import_module(f"telegrad.{name}")
    raise AttributeError(f"module 'telegrad' has no attribute {name!r}")


def local(
    workers: int | Sequence[str] | Mapping[str, int], *, driver: str = "driver", rpc_timeout: float = 60.0
) -> LocalGroup:
    """Start workers on this host and join their group as `driver`, in a `with` statement or until `shutdown()`.

    The workers can import what this process can, and run what its main program or notebook defines. Their output is
    printed here. They end with this process, however it ends. Ctrl-C does not reach them.

    Args:
        workers: the number of workers (named worker0, worker1 ...), their names, or the number for each role:
            `{"learner": 1, "actor": 4}` makes learner0 and actor0 to actor3.
        driver: the name of this process in the group.
        rpc_timeout: seconds that a call may take if it sets no timeout itself; 0 for no limit.

    Returns:
        The group, with the names of its workers and the method `shutdown()`.

    Raises:
        RendezvousError: a worker ended before all workers had joined; its output was printed here before.
        AlreadyInitialized: this process is already in a group.

    Example:
        >>> with telegrad.local(1) as workers:
        ...     rpc.rpc_sync(workers[0], pow, (2, 3))
        8
    """
    from telegrad.launch.local import LocalGroup

    try:
        return LocalGroup(workers, driver, rpc_timeout)
    except BaseException as error:
        from telegrad._core.pickling.remote_text import fold  # imports torch

        fold(error)
        raise


def process_group(group: Group, backend: str = "gloo", timeout: float = -1.0) -> Any:
    """Create a `torch.distributed` process group of the workers of a group, for collectives. Each of them calls this.

    The rank of a worker in it is its position in the group. No default process group is needed. The process group
    ends when the worker leaves.

    Args:
        group: the workers.
        backend: the name of a `torch.distributed` backend.
        timeout: seconds for creating it and for each collective; 0 for no limit; by default `rpc_timeout`.

    Returns:
        The process group, to pass to collectives as `group=`.

    Raises:
        UsageError: this worker is not in the group.
        CallTimeout: some workers did not call this in time; the message names them.
        PeerLost: one of the workers was lost or left before it called this.

    Example:
        >>> def total(number):
        ...     import torch, telegrad
        ...     value, both = torch.tensor(number), telegrad.rpc.group(["worker0", "worker1"])
        ...     torch.distributed.all_reduce(value, group=telegrad.process_group(both))
        ...     return value.item()
        >>> rpc.group(["worker0", "worker1"]).map(total, [1, 2]).wait()
        [3, 3]
    """
    from telegrad._core import checks
    from telegrad.groups.collectives import process_group as make
    from telegrad.groups.group import Group

    if not isinstance(group, Group):
        text = checks.short_repr(group)
        raise errors.InvalidArgument(f"process_group takes a group of workers, such as rpc.group('actor'), not {text}")
    return make(group, backend, timeout)


def recover(
    state: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    timeout: float = 60.0,
    *,
    after: BaseException | None = None,
) -> None:
    """Restore all parts of a state from a checkpoint, including those of lost workers.

    Lost parts of models are created again when their workers come back, if they were made with `restore`. All owners
    create their optimizers again, pipelines reconnect to their stages, and the checkpoint is loaded. If another worker
    is lost meanwhile, recovery starts again.

    Args:
        state: a state as `checkpoint.save` and `load` take it.
        checkpoint_id: the path of a checkpoint, such as `checkpoint.latest(folder)`.
        timeout: seconds for a lost worker to come back; 0 for no limit.
        after: the error that ended a step; it is raised again if it reports anything but lost workers.

    Raises:
        CannotRestore: a lost part was made without `restore`.
        OwnerLost: the worker of a part did not come back in time.
        UsageError: the path has no complete checkpoint, or one of another state.

    Example:
        >>> model = telegrad.nn.RemoteModule("worker1", nn.Linear, (2, 1), restore=True)
        >>> saved = telegrad.checkpoint.save({"model": model}, "saved").wait()
        >>> telegrad.recover({"model": model}, saved)
    """
    from telegrad.checkpoint.loading import recover as recover_all

    recover_all(state, checkpoint_id, timeout, after)
