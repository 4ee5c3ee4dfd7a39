"""A language model whose embedding and decoder live on a server, and whose recurrent part is here."""

from __future__ import annotations

from typing import Any

import torch
from common import Steps, report, run
from library import DistributedOptimizer, autograd, rpc
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

STEPS, LENGTH, BATCH = 40, 20, 16
WORDS, WIDTH = 2000, 64


def call(method: Any, reference: rpc.RRef, *args: Any) -> Any:
    """Call a method of what is referred to, where that lives."""
    return rpc.rpc_sync(reference.owner(), apply, (method, reference, *args))


def apply(method: Any, reference: rpc.RRef, *args: Any) -> Any:
    return method(reference.local_value(), *args)


def references(module: nn.Module) -> list[rpc.RRef]:
    return [rpc.RRef(parameter) for parameter in module.parameters()]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = rpc.remote("server", nn.Embedding, (WORDS, WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2)
        self.decoder = rpc.remote("server", nn.Linear, (WIDTH, WORDS))

    def forward(self, words: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, state = self.lstm(call(nn.Embedding.forward, self.embedding, words), state)
        return call(nn.Linear.forward, self.decoder, hidden), state

    def all_references(self) -> list[rpc.RRef]:
        remote = [call(references, part) for part in (self.embedding, self.decoder)]
        return [*remote[0], *references(self.lstm), *remote[1]]


def main() -> None:
    model = Model()
    optimizer = DistributedOptimizer(torch.optim.SGD, model.all_references(), lr=0.05)
    words = torch.randint(WORDS, (LENGTH + 1, BATCH))
    state: tuple[Tensor, ...] = (torch.zeros(2, BATCH, WIDTH), torch.zeros(2, BATCH, WIDTH))
    steps = Steps(STEPS)
    for _ in steps:
        state = tuple(part.detach() for part in state)
        with autograd.context() as context:
            outputs, state = model(words[:-1], state)
            loss = cross_entropy(outputs.view(-1, WORDS), words[1:].reshape(-1))
            autograd.backward(context, [loss])
            optimizer.step(context)
    report(steps.median)


if __name__ == "__main__":
    run(main, "trainer", "server")
