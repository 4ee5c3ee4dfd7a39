"""A group inside of actors on a cluster of three nodes: all on this host, but each with its own daemons."""

from __future__ import annotations

import os
import signal
import time

import ray
from ray.cluster_utils import Cluster

import telegrad.rpc as rpc
from telegrad import errors

Place = tuple[str, str, int]  # a worker's name, its node, and its process


class Actor:
    def __init__(self, name: str) -> None:
        rpc.init_rpc(name, role="actor")

    def call(self, name: str) -> Place:
        return rpc.rpc_sync(name, where, wait_for_worker=True)


def where() -> Place:
    return rpc.get_worker_info().name, ray.get_runtime_context().get_node_id(), os.getpid()


def call_until_it_is_back(name: str, before: Place) -> Place:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            found: Place = rpc.rpc_sync(name, where)
        except (errors.PeerError, errors.UnknownWorker):
            time.sleep(0.1)
        else:
            if found != before:
                return found
    raise TimeoutError(name)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        spread = ray.remote(num_cpus=1, max_restarts=1, scheduling_strategy="SPREAD")(Actor)
        actors = [spread.remote(f"actor{number}") for number in range(3)]
        ring = ray.get(
            [actor.call.remote(f"actor{(number + 1) % 3}") for number, actor in enumerate(actors)], timeout=120
        )
        assert [name for name, _, _ in ring] == ["actor1", "actor2", "actor0"], ring
        rpc.init_rpc("driver")
        found = rpc.group("actor").rpc_sync(where)
        assert sorted(found) == sorted(ring), (found, ring)
        assert len({node for _, node, _ in found}) == 2, found
        os.kill(found[1][2], signal.SIGKILL)
        name, _, process = call_until_it_is_back(found[1][0], found[1])
        assert process != found[1][2]
        assert rpc.rpc_sync(found[0][0], rpc.rpc_sync, [name, pow, (2, 3)]) == 8
        rpc.shutdown(graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()
    print("all is well")


if __name__ == "__main__":
    main()
