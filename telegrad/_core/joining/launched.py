"""Chooses where a worker meets the others.

The program's arguments have priority: an `init_method`, a rank or a size. Without them, `telegrad run` decides, then
Ray, then the variables of a launcher (torchrun, mpirun, srun, ...). Inside Ray, a framework may have set the variables
of a launcher as well, for its own group: then the program must choose.
"""

from __future__ import annotations

import logging
import os

from telegrad._core.joining import on_ray
from telegrad._core.joining.launchers import detect_launcher, one_of_several
from telegrad._core.stores.group_keys import Key, find_keys, given_keys
from telegrad._core.stores.stores import RendezvousStore, open_store
from telegrad._core.stores.supervised import STORE
from telegrad.errors import RendezvousError, UsageError

SAID_BY_ENVIRONMENT = "env://"

log = logging.getLogger("telegrad")


def open_meeting(init_method: str, rank: int, world_size: int | None, key: Key, timeout: float) -> RendezvousStore:
    """Open the store. The program's arguments have priority; a rank without a size is that of a dynamic group.

    Raises:
        UsageError: the program or the launcher gives invalid or insufficient data; or there is no key.
        RendezvousError: the store cannot be opened.
    """
    if init_method.partition(":")[0] == "ray":
        return _on_ray(rank, world_size, key, timeout)
    if init_method != SAID_BY_ENVIRONMENT or rank != -1 or world_size is not None:
        return open_store(init_method, rank, world_size, find_keys(key), timeout)
    if STORE not in os.environ and on_ray.has_started_this_process():
        _check_contradiction()
        return _on_ray(rank, world_size, key, timeout)
    found = detect_launcher(os.environ)
    if found is None:
        return open_store(init_method, rank, world_size, find_keys(key), timeout)
    log.info("telegrad: %s", found)
    try:
        return open_store(found.init_method, found.rank, found.size, find_keys(key), timeout)
    except (UsageError, RendezvousError) as error:
        raise type(error)(f"{error} ({found})") from error


def find_place(init_method: str, rank: int) -> tuple[str, int]:
    """Return where an elastic group meets, and the rank that this worker prefers. The group's size is its own.

    Raises:
        UsageError: the launcher gives invalid or insufficient data.
    """
    found = detect_launcher(os.environ) if init_method == SAID_BY_ENVIRONMENT else None
    if found is None:
        return init_method, rank
    log.info("telegrad: %s", found)
    return found.init_method, found.rank if rank == -1 else rank


def _on_ray(rank: int, world_size: int | None, key: Key, timeout: float) -> RendezvousStore:
    """Find the directory of the group of this job.

    Raises:
        UsageError: this process is not one of Ray's, or its program gives a rank or a size.
    """
    if not on_ray.has_started_this_process():
        raise UsageError('init_method="ray://" is for Ray processes: call ray.init() first')
    if rank != -1 or world_size is not None:
        raise UsageError('init_method="ray://" is for dynamic groups: leave out rank and world_size')
    _check_drivers()
    return on_ray.meet(timeout, given_keys(key))


def _check_contradiction() -> None:
    """Raise UsageError if Ray has started this process, and variables name another group."""
    said = [f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE") if name in os.environ]
    if said:
        raise UsageError(
            f"this process belongs to a Ray job, but its environment names another group ({', '.join(said)}). Choose "
            'one: TelegradOptions(init_method="ray://") for the workers of this Ray job; or pass rank and '
            "world_size, or an init_method such as tcp://HOST:PORT, to init_rpc for the other group"
        )


def _check_drivers() -> None:
    """Raise UsageError if a launcher has started several drivers of Ray: each would have its own group."""
    launcher = one_of_several(os.environ)
    if launcher and on_ray.is_driver():
        raise UsageError(
            f"this process is one of several Ray drivers that {launcher} has started. To form one group of them, "
            "give all the same init_method, such as tcp://HOST:PORT; to form a group with the actors of a Ray job, "
            "start its driver once"
        )
