"""Graphs are freed as soon as their context has ended, without a run of Python's garbage collector."""

import gc
import pathlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from telegrad import autograd
from telegrad.rpc import remote, rpc_sync
from tests.cluster import wait_until

pytestmark = pytest.mark.usefixtures("contexts_end")


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    PROBES.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Probe:
    """An object that a graph holds."""


PROBES: list[weakref.ref[Probe]] = []


class Probed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.probe = Probe()
        PROBES.append(weakref.ref(ctx.probe))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def probed(x: Tensor) -> Tensor:
    return Probed.apply(x)


def probed_sum(x: Tensor) -> Tensor:
    return probed(x).sum()


def leaf() -> Tensor:
    return torch.ones(3, 3, dtype=torch.float64, requires_grad=True)


def graphs_hold_probes() -> bool:
    return any(probe() is not None for probe in PROBES)


def graph_over_three_workers(run: bool) -> Tensor:
    """Return the output of a graph whose context has ended, after a backward pass if `run`."""
    with autograd.context() as context:
        kept: Tensor = rpc_sync("w1", probed, (rpc_sync("w2", probed, (probed(leaf()),)),))
        if run:
            autograd.backward(context, kept.sum(), retain_graph=True)
        assert all(probe() is not None for probe in PROBES)
    return kept


@pytest.mark.parametrize("run", [True, False])
def test_the_end_of_a_context_frees_its_graphs_on_all_workers(run: bool) -> None:
    kept = graph_over_three_workers(run)
    wait_until(lambda: not graphs_hold_probes())
    assert kept.grad_fn is not None, "it leads to a context that has ended, and holds nothing of it"


def test_graphs_are_freed_in_a_process_with_a_replicated_module(tmp_path: pathlib.Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        replica = DistributedDataParallel(nn.Linear(3, 3))
        graph_over_three_workers(run=True)
        wait_until(lambda: not graphs_hold_probes())
        del replica
    finally:
        dist.destroy_process_group()


def test_graphs_of_references_as_roots_are_freed_at_their_owners() -> None:
    with autograd.context() as context:
        roots = [remote(worker, probed_sum, (leaf(),)) for worker in ("w1", "w2")]
        autograd.backward(context, [*roots, remote("w1", probed_sum, (leaf(),))], retain_graph=True)
        assert graphs_hold_probes()
    del roots
    wait_until(lambda: not graphs_hold_probes())
