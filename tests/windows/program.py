"""Workers that call each other, on a platform that lacks what Windows lacks."""

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import telegrad
from telegrad import autograd, checkpoint, errors, rpc
from telegrad.launch.local import LocalGroup
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.weights import Publisher, Subscriber


def counting(most: int) -> Iterator[int]:
    yield from range(most)


def summed(ref: rpc.RRef[torch.Tensor]) -> float:
    return float((ref + 1).sum().to_here())


def reading() -> float:
    return float(Subscriber("driver", "policy").refresh().state["w"].sum())


def call(group: LocalGroup) -> None:
    for name in group:  # no thread waits for the answer, so the leader must notice the new connection
        answered = threading.Event()
        rpc.rpc_async(name, int).then(lambda _, heard=answered: heard.set())  # type: ignore[misc]
        assert answered.wait(30)
    for size in (1, 1000, 1 << 22):
        tensors = [torch.arange(size, dtype=torch.float32) + n for n in range(3)]
        for tensor, back in zip(tensors, rpc.rpc_sync("a", list, (tensors,)), strict=True):
            assert torch.equal(tensor, back)
    futures = [rpc.rpc_async("a", pow, (n, 2)) for n in range(2000)]
    assert [future.wait() for future in futures] == [n * n for n in range(2000)]
    assert rpc.rpc_sync("b", summed, (rpc.remote("a", torch.ones, (1 << 20,)),)) == 2 << 20
    assert list(rpc.rpc_stream("b", counting, (5,))) == [0, 1, 2, 3, 4]


def trained_on_b(model: nn.Sequential) -> list[torch.Tensor]:
    last: Any = model[1]
    return [ref.to_here().clone() for ref in last.remote_parameters()]


def train() -> None:
    model = nn.Sequential(RemoteModule("a", nn.Linear, (4, 4)), RemoteModule("b", nn.Linear, (4, 1)))
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, model, lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [model(torch.ones(2, 4)).sum()])
        optimizer.step(context_id)
    before = trained_on_b(model)
    checkpoint.save({"model": model}, "saved")
    checkpoint.load({"model": model}, "saved")
    assert all(map(torch.equal, before, trained_on_b(model)))
    with Publisher("policy", {"w": torch.ones(100_000)}) as publisher:
        publisher.publish()
        assert rpc.rpc_sync("a", reading) == 100_000


def lose(name: str) -> None:
    try:
        rpc.rpc_sync(name, os._exit, (7,))
    except errors.PeerLost:
        return
    raise AssertionError("nobody said that it has ended")


def local() -> None:
    """Run calls and training on workers that this process starts."""
    with telegrad.local(["a", "b"]) as group:
        assert not any(hasattr(os, name) for name in ("fork", "memfd_create", "getuid"))
        assert not rpc.rpc_sync("a", hasattr, (os, "fork"))
        call(group)
        train()
        lose("b")
        assert rpc.rpc_sync("a", int) == 0


def joining(rank: str, port: str) -> None:
    """Join a group of fixed size and then a dynamic one, whose store outlives the worker that served it."""
    options = rpc.TelegradOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"w{rank}", rank=int(rank), world_size=2, rpc_backend_options=options)
    assert rpc.rpc_sync(f"w{1 - int(rank)}", pow, (2, 3)) == 8
    rpc.shutdown()
    rpc.init_rpc(f"w{rank}", rank=int(rank), rpc_backend_options=options)
    if rank == "0":
        rpc.wait_for_workers(["w1"])
        while not rpc.rpc_sync("w1", os.getenv, ("LISTENS",)):
            pass
        print("done", flush=True)
        os._exit(0)
    lost = threading.Event()
    rpc.on_lost(lambda *_: lost.set())
    os.environ["LISTENS"] = "yes"
    assert lost.wait(30)
    rpc.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("done")
