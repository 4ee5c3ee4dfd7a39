"""Federated averaging: clients train one model without sharing their data.

Each client has its own digits, with an uneven distribution of the labels. In each round, the server sends the model to
all clients, each client trains it on its own data, and the server averages the returned parameters.
"""

from __future__ import annotations

import argparse

import torch
from common import Digits, Progress, compare, digits, group, learn, seeded
from torch import Tensor, nn

import telegrad.rpc as rpc

BATCH = 32
RATE = 0.3
EPOCHS = 2  # over a client's data, per round

State = dict[str, Tensor]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


class Client:
    """A client whose data stays on its worker."""

    def __init__(self, own: Digits) -> None:
        self.own = own
        self.model = network()

    def train(self, state: State) -> tuple[State, float, int]:
        """Train a model from `state`. Return the new state, the last loss and the number of samples."""
        self.model.load_state_dict(state)
        count = len(self.own.labels)
        batches = (self.own.batch(step, BATCH) for step in range(EPOCHS * count // BATCH))
        losses = learn(self.model, batches, RATE)
        return dict(self.model.state_dict()), losses[-1], count


def unlike(seen: Digits, clients: int) -> list[Digits]:
    """Return a shard for each client. Half of the data is sorted by label, so the shards differ."""
    half = len(seen.labels) // 2
    order = torch.cat([seen.labels[:half].argsort(), torch.arange(half, len(seen.labels))])
    parts = [torch.cat(pair) for pair in zip(order[:half].chunk(clients), order[half:].chunk(clients), strict=True)]
    mixed = [part[torch.randperm(len(part), generator=torch.Generator().manual_seed(0))] for part in parts]
    return [Digits(seen.images[places], seen.labels[places]) for places in mixed]


def mean(states: list[State], counts: list[int]) -> State:
    """Return the mean of the states, weighted by the number of samples."""
    shares = [count / sum(counts) for count in counts]
    return {name: sum(state[name] * share for state, share in zip(states, shares, strict=True)) for name in states[0]}


def train(model: nn.Module, clients: list[rpc.RRef[Client]], rounds: int) -> None:
    progress = Progress(f"{len(clients)} clients,", rounds)
    for _ in range(rounds):
        state = dict(model.state_dict())
        answers = torch.futures.wait_all([client.rpc_async().train(state) for client in clients])
        states, losses, counts = (list(column) for column in zip(*answers, strict=True))
        model.load_state_dict(mean(states, counts))
        progress.advance(f"loss {sum(losses) / len(losses):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="how many clients")
    parser.add_argument("--steps", type=int, default=20, help="how many rounds")
    chosen = parser.parse_args()

    names = [f"client{number}" for number in range(chosen.workers)]
    with group("server", *names):
        seen, unseen = digits()
        shares = unlike(seen, chosen.workers)
        clients = [rpc.remote(name, Client, (share,)) for name, share in zip(names, shares, strict=True)]
        model = seeded(0, network)
        train(model, clients, chosen.steps)

    single = seeded(0, network)
    steps = chosen.steps * EPOCHS * len(seen.labels) // BATCH // chosen.workers  # the number of steps of each client
    batches = (seen.batch(step, BATCH) for step in range(steps))
    learn(single, batches, RATE, Progress("one process with all data,", steps))
    compare(model(unseen.images), single(unseen.images), unseen.labels, exact=False)


if __name__ == "__main__":
    main()
