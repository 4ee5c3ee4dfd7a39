"""Chooses where a worker meets the others.

The program's arguments have priority: an `init_method`, a rank or a size. Without them, `telegrad run` decides, then
Ray, then the variables of a launcher (torchrun, mpirun, srun, ...). Inside Ray, a framework may have set the variables
of a launcher as well, for its own group: then the program must choose.

Ray gives a process no rank, so the group of a Ray job is dynamic. A named actor keeps its directory, one for each job.
The first worker, which may be the driver, lets Ray start the actor on the head node, because a cluster ends without
that node. The actor ends a minute after the last worker: it is detached, because otherwise it would end with the
process that happened to start it. Ray restarts it if it was killed. Its directory is a process that outlives it, and
the actor finds that by a note (`find_directory.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from telegrad._core.directory.directory import DirectoryLost
from telegrad._core.host.private_files import create_once, state_folder
from telegrad._core.joining.launchers import detect_launcher, one_of_several
from telegrad._core.membership.registry import Registry
from telegrad._core.security.keyring import Key, Keyring, find_keys, given_keys, new_key
from telegrad._core.stores.find_directory import DirectoryMonitor, Pointer, connect, note, noted
from telegrad._core.stores.sealed_store import SealedStore
from telegrad._core.stores.stores import LONGEST, RendezvousStore, open_store
from telegrad._core.stores.supervised import STORE
from telegrad._core.threads import Thread
from telegrad.errors import RendezvousError, StoreUnreachable, UsageError

SAID_BY_ENVIRONMENT = "env://"

NAMESPACE = "telegrad"  # of the actors' names, which contain the job's number
IDLE = 60.0  # seconds without workers until the directory ends
LOOK = 5.0  # seconds between two checks for workers
HEAD, LITTLE = "node:__internal_head__", 0.001  # Ray's name for its head node, as a resource of 1

log = logging.getLogger("telegrad")


def open_meeting(init_method: str, rank: int, world_size: int | None, key: Key, timeout: float) -> RendezvousStore:
    """Open the store. The program's arguments have priority; a rank without a size is that of a dynamic group.

    Raises:
        UsageError: the program or the launcher gives invalid or insufficient data; or there is no key.
        RendezvousError: the store cannot be opened.
    """
    found = None
    if init_method.partition(":")[0] == "ray":
        return _on_ray(rank, world_size, key, timeout)
    if init_method == SAID_BY_ENVIRONMENT and rank == -1 and world_size is None:
        if STORE not in os.environ and _is_of_ray():
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


def _is_of_ray() -> bool:
    """Return True if this process is one of Ray's, its driver included."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _check_contradiction() -> None:
    """Raise UsageError if Ray has started this process, and variables name another group."""
    said = [f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE") if name in os.environ]
    if said:
        raise UsageError(
            f"this process belongs to a Ray job, but its environment names another group ({', '.join(said)}). Choose "
            'one: TelegradOptions(init_method="ray://") for the workers of this Ray job; or pass rank and '
            "world_size, or an init_method such as tcp://HOST:PORT, to init_rpc for the other group"
        )


def _on_ray(rank: int, world_size: int | None, key: Key, timeout: float) -> RendezvousStore:
    """Find the directory of this job's group, with the given keys, or else with the key that the actor has made.

    Raises:
        UsageError: this process is not one of Ray's; its program gives a rank or a size; or a launcher has started
            several drivers.
        StoreUnreachable: Ray did not start the actor that keeps the directory, or it cannot be reached from here.
    """
    if not _is_of_ray():
        raise UsageError('init_method="ray://" is for Ray processes: call ray.init() first')
    if rank != -1 or world_size is not None:
        raise UsageError('init_method="ray://" is for dynamic groups: leave out rank and world_size')
    ray: Any = sys.modules["ray"]
    # Each of several drivers would have its own group.
    if (launcher := one_of_several(os.environ)) and ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        raise UsageError(
            f"this process is one of several Ray drivers that {launcher} has started. To form one group of them, "
            "give all the same init_method, such as tcp://HOST:PORT; to form a group with the actors of a Ray job, "
            "start its driver once"
        )
    given = given_keys(key)
    name = f"telegrad-{ray.get_runtime_context().get_job_id()}"
    at_head = {HEAD: LITTLE} if HEAD in ray.cluster_resources() else {}
    known = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached", "max_restarts": -1}
    actor = ray.remote(Keeper).options(**known, num_cpus=0, resources=at_head)
    try:
        text, made = ray.get(actor.remote(name, given).place.remote(), timeout=min(timeout, LONGEST))
    except ray.exceptions.RayError as error:
        raise StoreUnreachable(
            f"the actor {name!r}, which keeps the directory of this job's group, did not start within {timeout:g} s "
            f"({type(error).__name__}): is Telegrad installed on the cluster's head node? See `ray list actors`"
        ) from error
    keys = given or Keyring([made], source="the actor that keeps the directory of this job's group")
    pointer = Pointer.from_json(text)
    store = SealedStore(dist.HashStore(), keys)
    meeting = RendezvousStore(store, pointer.host, -1, None, directory=lambda: connect(pointer, keys), launched=True)
    return meeting._replace(file=f"the actor {name!r}")


class Keeper:
    """The actor that keeps the directory, and makes the key of the job's group, which Ray sends to its workers."""

    def __init__(self, name: str, given: Keyring | None) -> None:
        """`given` are the keys of the first worker, if its program or its environment sets any."""
        ray: Any = sys.modules["ray"]
        host = ray.util.get_node_ip_address()
        self._made = create_once(state_folder() / name, new_key())  # a restarted actor needs the same key
        self._keys = given or Keyring([self._made])
        self._keeping = DirectoryMonitor(self._keys, host, noted(name))
        note(name, self._keeping.pointer)
        self._needed = monotonic()  # the last time; no lock: a float is loaded and stored as a whole
        end = lambda: ray.kill(ray.get_actor(name, NAMESPACE))  # noqa: E731 - of itself, which Ray takes for no failure
        Thread(target=self._watch, args=(end,), name="telegrad-keeper").start()

    def place(self) -> tuple[str, bytes]:
        """Return the directory's address, and the key for a group without a given one."""
        self._needed = monotonic()
        return self._keeping.pointer.to_json(), self._made

    def _watch(self, end: Callable[[], None]) -> None:
        registry = Registry(connect(self._keeping.pointer, self._keys))
        while monotonic() - self._needed < IDLE:
            sleep(LOOK)
            with contextlib.suppress(DirectoryLost):
                if registry.roster().members:
                    self._needed = monotonic()
        end()
