"""Draw the picture in docs/insight/graph.md: `python -m tests.insight.picture`."""

import functools
import pathlib

import torch
from torch import Tensor, nn

import telegrad.autograd as autograd
import telegrad.rpc as rpc
from telegrad._core.worker import current
from telegrad.insight.autograd_graph import GradientGraph, graph
from tests.cluster import agents

FILE = pathlib.Path(__file__).parents[2] / "docs" / "insight" / "graph.svg"


@functools.cache
def modules() -> tuple[nn.Module, nn.Module]:
    """Made at the first call: those made at import are behind `gc.freeze`, where no name is found."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)), nn.Linear(16, 4)


def encode(images: Tensor) -> Tensor:
    encoder, _ = modules()
    return encoder(images)


def decode(code: Tensor, scale: Tensor) -> Tensor:
    _, decoder = modules()
    return decoder(torch.tanh(code) * scale)


def drawn(encodes: str, decodes: str) -> GradientGraph:
    """Return the graph of the documentation: calls of two workers one after the other, and a local loss."""
    scale = torch.ones(16, requires_grad=True)
    with autograd.context() as context_id:
        code = rpc.rpc_sync(encodes, encode, (torch.ones(5, 8),))
        output = rpc.rpc_sync(decodes, decode, (code, scale))
        loss = output.pow(2).mean() + code.abs().mean()
        return graph(context_id, loss)


if __name__ == "__main__":
    with agents(3) as workers:
        current.enter(workers[0])
        found = drawn("w1", "w2")
        found.context_id = 1
        found.save(FILE)
