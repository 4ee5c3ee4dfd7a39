"""Workers in processes of their own, which share the memory of a GPU."""

import logging

import pytest
import torch

import telegrad.autograd as autograd
from telegrad import rpc
from telegrad._core.memory import staging
from telegrad._core.worker import current
from tests import accelerator
from tests.cluster import free_port, init, processes, run_all
from tests.devices.kinds import CUDA, SIM, Sharer, places

LARGE = 9_500_001  # bytes, sent in three pieces
ROUNDS = 3


def begin(rank: int, kind: str, port: int, transport: str, share: bool = False) -> None:
    if kind == "sim":
        accelerator.load()
        staging.SHARERS.update({"sim": Sharer()} if share else {})
    logging.getLogger("telegrad").setLevel(logging.INFO)
    here, there = places(kind)
    maps = {f"worker{other}": {here: there, there: here} for other in range(2)}
    init(rank, 2, port, transport=transport, device_maps=maps)


def add(x: torch.Tensor, y: torch.Tensor | int) -> torch.Tensor:
    return x + y


def exchange(kind: str) -> None:
    here, _ = places(kind)
    for round_ in range(ROUNDS):
        x = torch.full((1000,), float(round_), device=here)
        assert rpc.rpc_sync("worker1", add, (x, x)).sum().item() == 2000 * round_
        large = torch.arange(LARGE, device=here).to(torch.uint8)
        back = rpc.rpc_sync("worker1", add, (large, 1))
        large += 1
        assert torch.equal(back, large)
        y = torch.ones(3, device=here, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("worker1", torch.mul, (y, y)).sum()])
            assert autograd.get_gradients(context)[y].tolist() == [2.0] * 3
    kept = rpc.remote("worker1", add, (x, 1))
    assert kept.to_here().sum().item() == 1000 * ROUNDS


def ways() -> list[bool | None]:
    """Return whether each connection of this worker shares memory of devices; None means unknown."""
    peers = current.agent()._connections._peers.values()
    return [peer.link._outgoing._shares_devices for peer in peers]


def lent() -> int:
    return current.agent().memory.lent


def end(rank: int, kind: str) -> list[str]:
    rpc.shutdown()
    return accelerator.violations() if kind == "sim" else []


@pytest.mark.parametrize("transport", ["unix", pytest.param("tcp", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", [SIM, CUDA])
def test_two_processes(kind: str, transport: str) -> None:
    with processes(2) as made:
        run_all(made, begin, kind, free_port(), transport)
        made[0].run(exchange, kind)
        assert made[0].run(ways) == [kind == "cuda" and transport == "unix"]
        assert run_all(made, end, kind) == [[], []]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [SIM])
def test_blocks_that_the_receiver_cannot_open_are_copied_through_the_host(kind: str) -> None:
    """A block of the simulated accelerator cannot be opened by another process."""
    with processes(2) as made:
        run_all(made, begin, kind, free_port(), "unix", True)
        made[0].run(exchange, kind)
        assert made[0].run(ways) == [False]
        assert made[0].run(lent) == 0
        assert run_all(made, end, kind) == [[], []]
