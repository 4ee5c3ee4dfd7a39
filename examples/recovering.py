"""Fault tolerance: a pipeline trains while its workers are killed, with the same result as without failures.

Three processes train: the driver, and two workers with one stage each. A process that dies is restarted. After the loss
of a stage, the driver waits for its worker, and training resumes from the last checkpoint. A restarted driver resumes
from the last checkpoint too.

Without arguments, this program starts, kills and restarts the three processes. `python recovering.py driver` is one of
them.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from common import Progress, compare, digits, free_port, learn, seeded
from torch import nn
from torch.nn.functional import cross_entropy

import telegrad
import telegrad.autograd as autograd
import telegrad.checkpoint as checkpoint
import telegrad.rpc as rpc
from telegrad import errors
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer

BATCH, RATE = 64, 0.5
EVERY = 20  # steps between checkpoints


def stage(name: str) -> nn.Module:
    """Create a stage, with the same parameters after each restart."""
    return seeded(len(name), layers, name)


def layers(name: str) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh()) if name == "first" else nn.Linear(64, 10)


def drive(folder: pathlib.Path, steps: int) -> None:
    """Train, from the last checkpoint if there is one, and save the outputs for the test images."""
    rpc.wait_for_workers(["first", "second"], timeout=60)
    pipeline = Pipeline([RemoteModule(name, stage, (name,), restore=True) for name in ("first", "second")], chunks=4)
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, pipeline, lr=RATE)
    state = {"model": pipeline, "optimizer": optimizer, "step": 0}
    if last := checkpoint.latest(folder):
        checkpoint.load(state, last)
    else:
        save(state, folder)
    training, test = digits()
    while state["step"] < steps:
        try:
            for step in range(state["step"], state["step"] + EVERY):
                batch = training.batch(step, BATCH)
                with autograd.context() as context:
                    pipeline.forward_backward(context, batch.images, batch.labels, cross_entropy, step=optimizer)
            state["step"] += EVERY
            save(state, folder)
        except errors.TelegradError as error:
            print(f"a worker was lost behind step {state['step']}: {str(error).splitlines()[0][:100]}", flush=True)
            telegrad.recover(state, checkpoint.latest(folder), after=error)
    with torch.no_grad():
        torch.save(pipeline.eval()(test.images), folder / "outputs")


def save(state: dict[str, Any], folder: pathlib.Path) -> None:
    checkpoint.save(state, folder / f"{state['step']}-{os.getpid()}")


def steps_of(path: str | None) -> int:
    return int(os.path.basename(path).partition("-")[0]) if path else 0


def live(name: str, folder: pathlib.Path, steps: int) -> None:
    """Run one of the three processes."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rpc.init_rpc(name)
    if name == "driver":
        drive(folder, steps)
        rpc.shutdown()
    else:
        rpc.serve()


def keep_alive(folder: pathlib.Path, steps: int, kills: int) -> None:
    """Start all processes, kill one from time to time, and restart dead ones, until the driver has finished."""

    def start(name: str) -> subprocess.Popen[bytes]:
        own = [name, "--steps", str(steps), "--folder", str(folder)]
        return subprocess.Popen([sys.executable, __file__, *own])

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    processes = {name: start(name) for name in ("driver", "first", "second")}
    rpc.init_rpc("keeper", rank=0)  # rank 0 serves the group's store
    progress = Progress("training with deaths", steps // EVERY)
    victims = [("second", "driver", "first")[number % 3] for number in range(kills)]
    while processes["driver"].poll() != 0:
        done = steps_of(checkpoint.latest(folder)) // EVERY
        while progress.done < done:
            progress.advance()
        if victims and done > (kills - len(victims) + 1) * steps // EVERY // (kills + 1):
            processes[victims.pop(0)].kill()
        for name, process in processes.items():
            if process.poll() not in (None, 0):
                print(f"{name} has died and is started again", flush=True)
                processes[name] = start(name)
        time.sleep(0.01)
    rpc.shutdown()  # ends `serve` in the other two processes
    for process in processes.values():
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=["driver", "first", "second"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--folder", type=pathlib.Path, help="of the checkpoints, for one process alone")
    args = parser.parse_args()
    if args.name:
        live(args.name, args.folder, args.steps)
        return
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        keep_alive(pathlib.Path(folder), args.steps, args.kills)
        outputs = torch.load(pathlib.Path(folder, "outputs"))
    training, test = digits()
    single = nn.Sequential(stage("first"), stage("second"))
    batches = (training.batch(step, BATCH) for step in range(args.steps))
    learn(single, batches, RATE, Progress("the same, in one process", args.steps))
    with torch.no_grad():
        compare(outputs, single(test.images), test.labels)


if __name__ == "__main__":
    main()
