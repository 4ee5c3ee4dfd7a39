"""Where the workers of a group meet that run in the processes of a Ray cluster, its driver's among them.

Ray tells a process no rank: the group is dynamic. An actor with a name serves its store, one for each job: whoever
comes first has Ray start it, on the head node, without which a cluster ends. It ends a minute after the last worker:
it is detached, since else it would end with the process that happened to start it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from time import monotonic, sleep
from typing import Any

from telegrad.errors import StoreUnreachable
from telegrad.group.address import answers
from telegrad.group.dynamic import dynamic_group_lives
from telegrad.group.sealing import SealedStore
from telegrad.group.stores import LONGEST, Meeting, join_store
from telegrad.group.tcp import serve_tcp
from telegrad.keyring import Keyring, new_key

NAMESPACE = "telegrad"  # of the actors' names, which have the job's number in them
IDLE = 60.0  # seconds without workers until the store ends
LOOK = 5.0  # seconds between two looks whether there are any
KNOCK = 2.0  # seconds for a worker to show that it lives
HEAD, LITTLE = "node:__internal_head__", 0.001  # what Ray calls its head node, as a resource of 1


def places_this_process(variables: Mapping[str, str]) -> bool:
    """Whether it is one of Ray's, and nothing says that it meets elsewhere."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and not variables.keys() & {"MASTER_ADDR", "RANK"}


def is_driver() -> bool:
    """Whether it is no worker that Ray has started, but a program that is connected to Ray."""
    ray: Any = sys.modules["ray"]
    return bool(ray.get_runtime_context().worker.mode != ray.WORKER_MODE)


def meet(timeout: float, given: Keyring | None) -> Meeting:
    """Open the store of this job's group, with the keys that are given, else with the one that its keeper has made.

    Raises:
        StoreUnreachable: Ray did not start the actor that serves it, or it cannot be reached from here.
    """
    ray: Any = sys.modules["ray"]
    name = f"telegrad-{ray.get_runtime_context().get_job_id()}"
    at_head = {HEAD: LITTLE} if HEAD in ray.cluster_resources() else {}
    known = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
    actor = ray.remote(Keeper).options(**known, num_cpus=0, resources=at_head)
    try:
        host, port, made = ray.get(actor.remote(name, given).place.remote(), timeout=min(timeout, LONGEST))
    except ray.exceptions.RayError as error:
        raise StoreUnreachable(
            f"the actor {name!r}, which serves the store of this job's group, did not start within {timeout:g} s "
            f"({type(error).__name__}): is Telegrad installed on the cluster's head node? `ray list actors` tells more"
        ) from error
    keys = given or Keyring([made], source="the actor that keeps the store of this job's group")
    return Meeting(join_store(host, port, keys, timeout, lasting=True), host, -1, None, port)


class Keeper:
    """The actor that serves the store, and makes the key of the job's group, which Ray carries to its workers."""

    def __init__(self, name: str, given: Keyring | None) -> None:
        """`given` are the keys of the first worker, if its program or its environment says any."""
        ray: Any = sys.modules["ray"]
        self._host = ray.util.get_node_ip_address()
        self._made = new_key()
        raw, self._port = serve_tcp(self._host, 0)
        self._store = SealedStore(raw, given or Keyring([self._made]))
        self._needed = monotonic()  # the last time that it was; no lock: a float is loaded and stored as a whole
        end = lambda: ray.kill(ray.get_actor(name, NAMESPACE))  # noqa: E731 - of itself, which Ray takes for no failure
        threading.Thread(target=self._watch, args=(end,), name="telegrad-keeper", daemon=True).start()

    def place(self) -> tuple[str, int, bytes]:
        """Return the store's host and port, and the key of a group to which none is given."""
        self._needed = monotonic()
        return self._host, self._port, self._made

    def _watch(self, end: Callable[[], None]) -> None:
        while monotonic() - self._needed < IDLE:
            sleep(LOOK)
            if dynamic_group_lives(self._store, lambda member: answers(member.tcp, KNOCK)):
                self._needed = monotonic()
        end()
