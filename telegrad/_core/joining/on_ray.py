"""The meeting place of workers in the processes of a Ray cluster, including its driver.

Ray gives a process no rank, so the group is dynamic. A named actor keeps its directory, one for each job. The first
worker lets Ray start the actor on the head node, because a cluster ends without that node. The actor ends a minute
after the last worker: it is detached, because otherwise it would end with the process that happened to start it. Ray
restarts it if it was killed. Its directory is a process that outlives it, and the actor finds that by a note
(`find_directory.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from telegrad._core.directory.directory import DirectoryLost
from telegrad._core.host.private_files import create_once, state_folder
from telegrad._core.membership.registry import Registry
from telegrad._core.pickling.remote_text import first_line
from telegrad._core.security.keyring import Keyring, new_key
from telegrad._core.stores.find_directory import DirectoryMonitor, Pointer, connect, note, noted
from telegrad._core.stores.sealed_store import SealedStore
from telegrad._core.stores.stores import LONGEST, RendezvousStore
from telegrad._core.threads import Thread
from telegrad.errors import StoreUnreachable

NAMESPACE = "telegrad"  # of the actors' names, which contain the job's number
IDLE = 60.0  # seconds without workers until the directory ends
LOOK = 5.0  # seconds between two checks for workers
HEAD, LITTLE = "node:__internal_head__", 0.001  # Ray's name for its head node, as a resource of 1


def has_started_this_process() -> bool:
    """Return True if this process is one of Ray's, its driver included."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def is_driver() -> bool:
    """Return True if this process is not a worker that Ray has started, but a program connected to Ray."""
    ray: Any = sys.modules["ray"]
    return bool(ray.get_runtime_context().worker.mode != ray.WORKER_MODE)


def meet(timeout: float, given: Keyring | None) -> RendezvousStore:
    """Find the directory of this job's group, with the given keys, or else with the key that the actor has made.

    Raises:
        StoreUnreachable: Ray did not start the actor that keeps it, or it cannot be reached from here.
    """
    ray: Any = sys.modules["ray"]
    name = f"telegrad-{ray.get_runtime_context().get_job_id()}"
    at_head = {HEAD: LITTLE} if HEAD in ray.cluster_resources() else {}
    known = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached", "max_restarts": -1}
    actor = ray.remote(Keeper).options(**known, num_cpus=0, resources=at_head)
    try:
        text, made = ray.get(actor.remote(name, given).place.remote(), timeout=min(timeout, LONGEST))
    except ray.exceptions.RayError as error:
        raise StoreUnreachable(
            f"the actor {name!r}, which keeps the directory of this job's group, does not answer (waited up to "
            f"{min(timeout, LONGEST):g} s; {type(error).__name__}: {first_line(error)}): is Telegrad installed on the "
            "cluster's head node? See `ray list actors`"
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
        registry = Registry(connect(self._keeping.pointer, self._keys), "")
        while monotonic() - self._needed < IDLE:
            sleep(LOOK)
            with contextlib.suppress(DirectoryLost):
                if registry.roster().members:
                    self._needed = monotonic()
        end()
