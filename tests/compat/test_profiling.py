"""Profilers see every kind of call in the drop-in mode, too."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.cluster import agents, free_port, processes, run_all


class Counter:
    def add(self, number: int) -> int:
        return number + 1


def use_all(rpc: Any, remote_module: Any) -> None:
    counter = rpc.remote("worker1", Counter)
    counter.to_here()
    counter.rpc_sync().add(1)
    counter.rpc_async().add(1).wait()
    counter.remote().add(1).to_here()
    module = remote_module("worker1", nn.Linear, (2, 2))
    module(torch.ones(2))
    module.forward_async(torch.ones(2)).wait()
    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    rpc.rpc_async("worker1", torch.mul, args=(torch.ones(2), 1)).wait()


EVENTS = [
    "to_here#(worker0)->(worker1)",
    "rpc_sync#add(worker0 -> worker1)",
    "rpc_async#add(worker0 -> worker1)",
    "rpc_remote#add(worker0 -> worker1)",
    "rpc_sync#RemoteModule(Linear).forward(worker0 -> worker1)",
    "rpc_async#RemoteModule(Linear).forward(worker0 -> worker1)",
]
FUNCTIONS = {
    "legacy": ["rpc_sync#aten::add(worker0 -> worker1)", "rpc_async#aten::mul(worker0 -> worker1)"],
    "kineto": ["call#aten::add(worker0 -> worker1)", "future#aten::mul(worker0 -> worker1)"],
}


def work(rank: int, port: int, kind: str) -> list[str]:
    import telegrad.compat

    telegrad.compat.install()
    rpc = importlib.import_module("torch.distributed.rpc")
    remote_module = importlib.import_module("torch.distributed.nn.api.remote_module").RemoteModule
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    names: list[str] = []
    if rank == 0:
        profiler = importlib.import_module("torch.profiler" if kind == "kineto" else "torch.autograd.profiler_legacy")
        with profiler.profile() as seen:
            use_all(rpc, remote_module)
        names = [event.name for event in (seen.events() if kind == "kineto" else seen.function_events)]
    rpc.shutdown()
    return names


def ranks_before_init_rpc_returns() -> list[int]:
    from telegrad.compat.profiler import _rank

    with agents(2) as workers:
        return [workers[0].agent.call("w1", _rank, (), None), _rank()]


def test_a_call_that_is_served_before_init_rpc_returns_has_the_rank_of_its_worker() -> None:
    with processes(1) as (process,):
        assert process.run(ranks_before_init_rpc_returns) == [1, -1]


@pytest.mark.parametrize("kind", ["kineto", "legacy"])
def test_each_kind_of_call_is_an_event(kind: str) -> None:
    with processes(2) as group:
        names, _ = run_all(group, work, free_port(), kind)
    assert {*EVENTS, *FUNCTIONS[kind]} - set(names) == set()
