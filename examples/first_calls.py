"""Four workers on this machine call each other, share an object, send large tensors, and train a model together."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import sys
import time

import torch

import telegrad.autograd as autograd
import telegrad.rpc as rpc

WORKERS = 4
STEPS = 300
CALLS = 4000
BIG = 16 << 20  # bytes


def nothing() -> None:
    """Do nothing: the function of an empty call."""


def echo(value: torch.Tensor) -> torch.Tensor:
    return value


def around(path: list[str]) -> list[str]:
    """Call the workers of a path in a chain. Return their names in the order in which the calls return."""
    met = rpc.rpc_sync(path[0], around, (path[1:],)) if path else []
    return [*met, rpc.get_worker_info().name]


class Counter:
    """A counter on one worker. The other workers hold references to it."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


def count_there(counter: rpc.RRef[Counter], times: int) -> None:
    for _ in range(times):
        counter.rpc_sync().add(1)


class Layer(torch.nn.Module):
    """A layer of the model, on one worker."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(inputs, outputs)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(value)
        return made.tanh() if made.shape[1] > 1 else made

    def learn(self, context: int, rate: float) -> None:
        """Update the parameters with the gradients of a context."""
        gradients = autograd.get_gradients(context)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter -= rate * gradients[parameter]


@rpc.functions.async_execution
def add_there(to: str, x: torch.Tensor, y: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Add on another worker, without blocking a thread here."""
    return rpc.rpc_async(to, torch.add, (x, y))


def show(done: int, total: int, what: str) -> None:
    if sys.stdout.isatty():
        bar = "#" * (30 * done // total)
        print(f"\r[{bar:30}] {what:44}", end="\n" if done == total else "", flush=True)
    elif done == total:
        print(f"{what}: done")


def measure(what: str, others: list[str], rounds: int, call: object) -> float:
    """Return the seconds per `call(other)`, with each other worker in turn."""
    start = time.perf_counter()
    for i in range(rounds):
        call(others[i % len(others)])  # type: ignore[operator]
        if i % (rounds // 20 or 1) == 0:
            show(i, rounds, what)
    show(rounds, rounds, what)
    return (time.perf_counter() - start) / rounds


def train(others: list[str]) -> tuple[float, float]:
    """Train a model with layers on three workers to compute a sine. Return its first and its last loss."""
    sizes = [(1, 32), (32, 32), (32, 1)]
    layers = [rpc.remote(to, Layer, size) for to, size in zip(others, sizes, strict=True)]
    x = torch.linspace(-3, 3, 64).unsqueeze(1)
    losses = []
    for step in range(STEPS):
        with autograd.context() as context:
            value = x
            for layer in layers:
                value = layer.rpc_sync().forward(value)
            loss = (value - x.sin()).square().mean()
            autograd.backward(context, loss)
            torch.futures.wait_all([layer.rpc_async().learn(context, 0.1) for layer in layers])
        losses.append(loss.item())
        show(step + 1, STEPS, f"training on three workers, loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


def drive() -> None:
    """Run the demonstration on worker 0."""
    others = [f"worker{rank}" for rank in range(1, WORKERS)]
    path = [*others, "worker0", *others]
    assert rpc.rpc_sync("worker0", around, (path,)) == [*path[::-1], "worker0"]
    show(1, 1, f"a call through {len(path)} workers and back")
    assert rpc.rpc_sync("worker1", add_there, ("worker2", torch.ones(2), torch.ones(2))).tolist() == [2, 2]
    show(1, 1, "worker1 let worker2 add")
    counter = rpc.remote("worker1", Counter)
    for other in others:
        rpc.rpc_sync(other, count_there, (counter, 1000))
    assert counter.rpc_sync().add(0) == 1000 * len(others)
    show(1, 1, f"all counted on worker1, to {1000 * len(others):,}")

    first, last = train(others)
    assert last < first / 5

    empty = measure("empty calls, one after the other", others, CALLS, lambda to: rpc.rpc_sync(to, nothing))
    start = time.perf_counter()
    torch.futures.wait_all([rpc.rpc_async(others[i % 3], nothing) for i in range(CALLS)])
    flood = (time.perf_counter() - start) / CALLS
    show(1, 1, f"{CALLS} calls in flight at once")
    tensor = torch.ones(BIG // 4)
    big = measure("16 MB tensor, there and back", others, 60, lambda to: rpc.rpc_sync(to, echo, (tensor,)))

    print()
    print(f"{'loss, before and after':32}{first:10.3f} {last:.3f}")
    print(f"{'empty call':32}{empty * 1e6:10.0f} µs")
    print(f"{'calls in flight at once':32}{1 / flood:10,.0f} per second")
    print(f"{'16 MB tensor, both ways':32}{2 * BIG / big / 1e9:10.1f} GB/s")


def work(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS)
    if rank == 0:
        drive()
    rpc.shutdown()


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    workers = [mp.get_context("spawn").Process(target=work, args=(rank, port)) for rank in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode or 0) for worker in workers))


if __name__ == "__main__":
    main()
