"""A group of workers inside of actors that Ray places, and starts again where they die."""

from __future__ import annotations

import os

import ray

import telegrad.rpc as rpc


@ray.remote(num_cpus=1, max_restarts=2)
class Actor:
    """One worker, under its own name also after a restart."""

    def __init__(self, name: str) -> None:
        rpc.init_rpc(name, role="actor")

    def ready(self) -> str:
        return rpc.get_worker_info().name

    def leave(self) -> None:
        rpc.shutdown(graceful=False)


def where() -> tuple[str, str, int]:
    return rpc.get_worker_info().name, ray.get_runtime_context().get_node_id(), os.getpid()


def main() -> None:
    ray.init()
    count = min(4, int(ray.cluster_resources()["CPU"]))
    actors = [Actor.options(scheduling_strategy="SPREAD").remote(f"actor{number}") for number in range(count)]
    print(ray.get([actor.ready.remote() for actor in actors]))
    rpc.init_rpc("driver")
    for name, node, process in rpc.group("actor").rpc_sync(where):
        print(f"{name} is process {process} on node {node}")
    ray.get([actor.leave.remote() for actor in actors])
    rpc.shutdown(graceful=False)
    print("all have left")


if __name__ == "__main__":
    main()
