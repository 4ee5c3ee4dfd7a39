"""A crowd of actors on two workers: each keeps a state of its own, and passes what it finds on to its neighbour."""

from __future__ import annotations

import torch
from common import Steps, report, run
from library import rpc
from torch import Tensor

ROUNDS, ACTORS = 40, 16  # the reference has a thread for each that waits
WORKERS = ("worker1", "worker2")


class Actor:
    def __init__(self, number: int) -> None:
        self.weight = torch.full((64, 64), 1 / (number + 1))
        self.inbox: list[Tensor] = []

    def meet(self, neighbour: rpc.RRef) -> None:
        self.neighbour = neighbour

    def tell(self, message: Tensor) -> None:
        self.inbox.append(message)

    def act(self, seen: Tensor) -> Tensor:
        for message in self.inbox:
            seen = seen + message
        self.inbox.clear()
        found = (seen @ self.weight).tanh()
        self.neighbour.rpc_sync().tell(found)
        return found


def main() -> None:
    actors = [rpc.remote(WORKERS[number % len(WORKERS)], Actor, (number,)) for number in range(ACTORS)]
    for actor, neighbour in zip(actors, [*actors[1:], actors[0]], strict=True):
        actor.rpc_sync().meet(neighbour)
    steps = Steps(ROUNDS)
    for _ in steps:
        seen = torch.randn(16, 64)
        torch.stack(torch.futures.wait_all([actor.rpc_async().act(seen) for actor in actors])).mean()
    report(steps.median)


if __name__ == "__main__":
    run(main, "driver", *WORKERS, start="fork")
