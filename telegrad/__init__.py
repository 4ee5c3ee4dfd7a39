"""Distributed model parallelism for PyTorch: remote calls, remote references, autograd, modules, optimizers.

Examples in these texts run in a group of three, which one line makes: `with telegrad.local(2):`. This process is
"driver" in it, the others are "worker0" and "worker1". They take `rpc`, `functions` and `nn` as imported:

    import telegrad, torch
    from telegrad import rpc
    from telegrad.rpc import functions
    from torch import nn
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from telegrad import errors
from telegrad._core.safe_text import SafeRecords
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

_ROOMS = ("autograd", "checkpoint", "compat", "insight", "nn", "optim", "rpc", "weights")


def __getattr__(name: str) -> ModuleType:
    """What users import from here, imported when they use it."""
    if name in _ROOMS:
        return import_module(f"telegrad.{name}")
    raise AttributeError(f"module 'telegrad' has no attribute {name!r}")


def local(
    workers: int | Sequence[str] | Mapping[str, int], *, driver: str = "driver", rpc_timeout: float = 60.0
) -> LocalGroup:
    """Start workers on this host, and join them as `driver`; in a `with` statement, or until `shutdown()`.

    They can import what this process can, and run what it defines in its main program or notebook. What they print
    comes out here. They end with this process, however it ends; Ctrl-C does not reach them.

    Args:
        workers: their number (they are named worker0, worker1 ...), their names, or how many there are of each role:
            `{"learner": 1, "actor": 4}` makes learner0 and actor0 to actor3.
        driver: the name of this process in the group.
        rpc_timeout: seconds that a call may take where it names no time itself; 0 for no limit.

    Returns:
        The group: the names of its workers, and `shutdown()`.

    Raises:
        RendezvousError: a worker ended before all had met; the message has its last lines.
        AlreadyInitialized: this process is in a group already.

    Example:
        >>> with telegrad.local(1) as workers:
        ...     rpc.rpc_sync(workers[0], pow, (2, 3))
        8
    """
    from telegrad.launch.local import LocalGroup

    return LocalGroup(workers, driver, rpc_timeout)


def process_group(group: Group, backend: str = "gloo", timeout: float = -1.0) -> Any:
    """A process group of `torch.distributed` of the workers of a group, for its collectives: each of them calls this.

    Their ranks in it are their places in the group; it needs no default group. It ends as the worker leaves.

    Args:
        group: the workers.
        backend: as `torch.distributed` names it.
        timeout: seconds for its forming and for its collectives; 0 for no limit, left out that of the options.

    Returns:
        The process group, to be given to collectives as `group=`.

    Raises:
        UsageError: this worker is not in the group.
        CallTimeout: not all came in time; it names those that did not.
        PeerLost: one of them died, or left, before it came.

    Example:
        >>> def total(number):
        ...     import torch, telegrad
        ...     value, both = torch.tensor(number), telegrad.rpc.group(["worker0", "worker1"])
        ...     torch.distributed.all_reduce(value, group=telegrad.process_group(both))
        ...     return value.item()
        >>> rpc.group(["worker0", "worker1"]).map(total, [1, 2]).wait()
        [3, 3]
    """
    from telegrad.groups.process_groups import process_group as make

    return make(group, backend, timeout)


def recover(
    state: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    timeout: float = 60.0,
    *,
    after: BaseException | None = None,
) -> None:
    """Have all parts of a state be as they were in a checkpoint, those whose workers were lost included.

    The lost parts of its models are made anew as their workers come back, where they were made with `restore`; all
    optimizers begin anew on all owners, pipelines find their stages, and the checkpoint is loaded. Where another worker
    is lost meanwhile, it begins once more.

    Args:
        state: what `checkpoint.save` and `load` take.
        checkpoint_id: the path of a checkpoint, such as `checkpoint.latest(folder)`.
        timeout: seconds for a lost worker to come back; 0 for no limit.
        after: the error that has ended a step: where it tells of anything but lost workers, it is raised again.

    Raises:
        CannotRestore: a lost part was made without `restore`.
        OwnerLost: its worker did not come back in time.
        UsageError: there is no complete checkpoint there, or one of something else.

    Example:
        >>> model = telegrad.nn.RemoteModule("worker1", nn.Linear, (2, 1), restore=True)
        >>> saved = telegrad.checkpoint.save({"model": model}, "saved").wait()
        >>> telegrad.recover({"model": model}, saved)
    """
    from telegrad.checkpoint.recovery import recover as recover_all

    recover_all(state, checkpoint_id, timeout, after)
