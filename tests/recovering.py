"""A training whose workers are killed: the programs of its processes, and their restarts.

The driver has a pipeline on two workers and an embedding on a third. After the loss of a worker it goes on from the
last checkpoint; if it is killed itself, it begins with that.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import telegrad
import telegrad.autograd as autograd
import telegrad.checkpoint as checkpoint
import telegrad.rpc as rpc
from telegrad.errors import TelegradError
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.cluster import Process, context, free_port, pause

WORKERS = ["driver", "first", "second", "table"]  # the names by rank
WIDTH, WORDS, BATCH = 4, 10, 8
EVERY = 5  # steps between checkpoints
BACK = 20.0  # seconds for the restart of a lost worker


class Layer(nn.Module):
    """A layer that starts with the same parameters everywhere."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.linear(value))


class Table(nn.Module):
    """An embedding that starts with the same parameters everywhere."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(WORDS, WIDTH).double()

    def forward(self, words: Tensor) -> Tensor:
        return self.embedding(words)


class Model(nn.Module):
    """A model over three workers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RemoteModule("table", Table, restore=True)
        stages = [RemoteModule("first", Layer, (1,), restore=True), RemoteModule("second", Layer, (2,), restore=True)]
        self.pipeline = Pipeline(stages, chunks=2)


def batch(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (BATCH,), generator=chance)
    return words, torch.randn(BATCH, WIDTH, generator=chance).double()


def alone(steps: int) -> list[float]:
    """Return the losses of the same model in one process."""
    model = nn.Sequential(Table(), Layer(1), Layer(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    losses = []
    for step in range(steps):
        words, targets = batch(step)
        optimizer.zero_grad()
        loss = mse_loss(model(words), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


# The programs of the processes


def join(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the process that starts the workers serves the store
        TORCHELASTIC_RESTART_COUNT="0",
    )
    rpc.init_rpc(WORKERS[rank], rank=rank, rpc_backend_options=rpc.TelegradOptions(rpc_timeout=BACK))


def serve(rank: int, port: int) -> None:
    join(rank, port)
    rpc.serve()


def drive(port: int, folder: str) -> None:
    """Train until the file `enough` exists."""
    join(0, port)
    runs = pathlib.Path(folder)
    state = built(runs)
    while True:
        try:
            train(state, runs)
        except TelegradError as error:
            telegrad.recover(state, checkpoint.latest(runs), BACK, after=error)
        else:
            break
    (runs / "steps").write_text(str(state["step"]))
    for worker in WORKERS[1:]:
        with contextlib.suppress(TelegradError):
            rpc.rpc_sync(worker, rpc.stop_serving)
    rpc.shutdown()


def built(runs: pathlib.Path) -> dict[str, Any]:
    """Return the state of the last checkpoint, or the initial one; retry if a worker is lost meanwhile."""
    until = time.monotonic() + BACK
    while True:
        try:
            rpc.wait_for_workers(WORKERS, BACK)
            model = Model()
            optimizer = DistributedOptimizer.for_module(torch.optim.Adam, model, lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
            state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
            if last := checkpoint.latest(runs):
                checkpoint.load(state, last)
            else:
                save(state, runs)
            return state
        except TelegradError:
            if time.monotonic() > until:
                raise


def train(state: dict[str, Any], runs: pathlib.Path) -> None:
    while not (runs / "enough").exists():
        for step in range(state["step"], state["step"] + EVERY):
            words, targets = batch(step)
            with autograd.context() as context_id:
                inputs = state["model"].table(words)
                loss = state["model"].pipeline.forward_backward(
                    context_id, inputs, targets, mse_loss, step=state["optimizer"] if step % 2 else None
                )
                if step % 2 == 0:
                    state["optimizer"].step(context_id)
            state["scheduler"].step()
            state["step"] = step + 1
            with (runs / "losses").open("a") as file:
                file.write(json.dumps([step, loss.item()]) + "\n")
        save(state, runs)


def save(state: dict[str, Any], runs: pathlib.Path) -> None:
    checkpoint.save(state, runs / f"{state['step']}-{time.monotonic_ns()}")


# Restarts


class Troupe:
    """The four processes; a killed one is restarted."""

    def __init__(self, runs: pathlib.Path) -> None:
        self.runs = runs
        self.port = free_port()
        self.store = dist.TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        self.processes = [self._start(rank) for rank in range(len(WORKERS))]
        self.kills: list[str] = []

    def _start(self, rank: int) -> Process:
        process = Process(context(), WORKERS[rank])
        if rank == 0:
            process.begin(drive, self.port, str(self.runs))
        else:
            process.begin(serve, rank, self.port)
        return process

    def kill(self, rank: int) -> None:
        self.processes[rank].kill(signal.SIGKILL)
        self.processes[rank].stop()
        self.kills.append(WORKERS[rank])
        self.processes[rank] = self._start(rank)

    def losses(self) -> list[tuple[int, float]]:
        """Return the losses of all steps; repeated steps occur several times."""
        path = self.runs / "losses"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, wanted: Any, patience: float = 60.0) -> None:
        until = time.monotonic() + patience
        while not wanted():
            assert time.monotonic() < until, f"nothing goes on after {self.kills}: {self.said()}"
            threading.Event().wait(0.02)

    def said(self) -> list[str]:
        """Return the names of processes that have ended with an error."""
        found = []
        for process in self.processes:
            if process._pipe.poll():
                with contextlib.suppress(Exception):
                    process.end(0)
                    continue
                found.append(process.name)
        return found

    def stop(self) -> None:
        for process in self.processes:
            process.stop()


def train_through(kills: int, seed: int, runs: pathlib.Path) -> tuple[list[tuple[int, float]], int, list[str]]:
    """Kill workers at random moments; return the losses, the number of steps, and the killed workers."""
    chance = random.Random(seed)
    troupe = Troupe(runs)
    try:
        troupe.wait(lambda: len(troupe.losses()) > 2)
        for number in range(kills):
            seen = len(troupe.losses())
            rank = number if number < len(WORKERS) else chance.randrange(len(WORKERS))
            pause(chance.uniform(0, 0.1))
            troupe.kill(rank)
            if chance.random() < 0.75:  # else the next kill happens during the recovery
                troupe.wait(lambda seen=seen: len(troupe.losses()) > seen + 1)
        (runs / "enough").touch()
        troupe.wait((runs / "steps").exists)
        return troupe.losses(), int((runs / "steps").read_text()), troupe.kills
    finally:
        troupe.stop()
