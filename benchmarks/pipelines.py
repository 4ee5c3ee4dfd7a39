"""Benchmarks of pipelines on three workers. All libraries train the same stages, micro-batches and loss.

A step is timed on the process that has the loss. On Telegrad and torch.distributed.rpc, this is the driver, which has
the last stage. With torch.distributed.pipelining, every rank runs its own program, and the last rank is timed.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import mse_loss

from benchmarks.measuring import OTHER, PIPELINING, TELEGRAD, THIRD, TORCH, Row, times
from benchmarks.targets import Computed, OfPeer, OfPipelining
from benchmarks.training import neighbour, training_step

WORKERS = (OTHER, THIRD, "worker0")  # workers of the stages, in order
SCHEDULES = {  # classes of torch.distributed.pipelining, by Telegrad's names
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
ASLEEP = 0.02  # seconds that the sleeping stages of one worker take for one kind of work


# Stages


class Stage(nn.Module):
    """A stage of two layers."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, reference: Any) -> Tensor:
        value = self.layers(reference.to_here() if hasattr(reference, "to_here") else reference)
        assert isinstance(value, Tensor)
        return value


class _SleepsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingStage(nn.Module):
    """A stage that sleeps equally long in forward, for the gradients of its inputs, and for those of its weights.

    The two gradients are separate branches of an addition, so a split backward can compute one without the other.
    """

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self._asleep(value) + self._asleep(self.weight)

    def _asleep(self, value: Tensor) -> Tensor:
        asleep: Tensor = _SleepsBackward.apply(value, self.seconds)
        return asleep


class _Kept:
    """A marker that lives as long as the tensors that a forward pass has saved for backward."""


class CountingStage(Stage):
    """A stage that counts the micro-batches with saved activations. There is one such stage per process."""

    kept: ClassVar[WeakSet[_Kept]] = WeakSet()
    most: ClassVar[int] = 0

    def forward(self, reference: Any) -> Tensor:
        mark = _Kept()
        self.kept.add(mark)
        CountingStage.most = max(CountingStage.most, len(self.kept))
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, mark), lambda packed: packed[0]):
            return super().forward(reference)


def take_most() -> int:
    """Return and reset the maximum number of micro-batches with saved activations in this process."""
    gc.collect()  # frees remains of previous rows
    most, CountingStage.most = CountingStage.most, 0
    return most


# Training steps


class Training(NamedTuple):
    """A training setup that all libraries run."""

    schedule: str
    stage: Callable[[int], nn.Module] = Stage  # called with the width
    width: int = 128
    samples: int = 32  # per micro-batch
    batches: int = 8
    rounds: int = 1  # number of stages per worker
    steps: bool = True  # whether to include an optimizer step

    def data(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets. Without optimizer steps, inputs have gradients so that stages take equal time."""
        shape = self.samples * self.batches, self.width
        return torch.ones(shape, requires_grad=not self.steps), torch.zeros(shape)

    def timeline(self) -> Any:
        """Simulate Telegrad's schedule with the costs of the stages only, in units of one forward."""
        # Imported here, because processes forked from one with the rows must not have imported Telegrad.
        from benchmarks.schedule_simulation import simulate
        from telegrad.pipeline.pipeline_schedule import plan

        runners = tuple(range(len(WORKERS))) * self.rounds
        return simulate(plan(self.schedule, runners, self.batches), runners, self.batches)


def step_of(library: Any, training: Training) -> Callable[[], None]:
    """Return a function that makes one training step with a library."""
    made = {TELEGRAD: _by_schedule, TORCH: _by_calls, PIPELINING: _by_ranks}[library.__name__]
    return made(library, training)


def _by_schedule(rpc: Any, training: Training) -> Callable[[], None]:
    autograd, optim = neighbour(rpc, "autograd"), neighbour(rpc, "optim")
    stages = _stages_of(rpc, training)
    pipeline = neighbour(rpc, "nn").Pipeline(stages, training.batches, training.schedule)
    optimizer = optim.DistributedOptimizer.for_module(torch.optim.SGD, pipeline, lr=1e-6)
    inputs, targets = training.data()

    def step() -> None:
        with autograd.context() as context:
            pipeline.forward_backward(context, inputs, targets, mse_loss, step=optimizer if training.steps else None)

    return step


def _by_calls(rpc: Any, training: Training) -> Callable[[], None]:
    """Return a step without a schedule, as in the tutorial of torch's RPC."""
    autograd, optim = neighbour(rpc, "autograd"), neighbour(rpc, "optim")
    stages = first, second, third = _stages_of(rpc, training)
    parameters = [parameter for stage in stages for parameter in _parameters_of(rpc, stage)]
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=1e-6)
    inputs, targets = training.data()

    def step() -> None:
        with autograd.context() as context:
            parts = inputs.chunk(training.batches)
            middle = [second.remote().forward(first.remote().forward(each)) for each in parts]
            outputs = [third.rpc_async().forward(each) for each in middle]
            autograd.backward(context, [mse_loss(torch.cat(torch.futures.wait_all(outputs)), targets)])
            optimizer.step(context)

    return step


def _by_ranks(pipelining: Any, training: Training) -> Callable[[], None]:
    """Return the step of one rank: the first rank has the inputs, the last one has the loss."""
    inputs, targets = training.data()
    stages = _stages_of_rank(pipelining, training, inputs[: training.samples])
    made = getattr(pipelining, SCHEDULES[training.schedule])
    takes_one = training.schedule in ("gpipe", "1f1b")
    schedule = made(stages[0] if takes_one else stages, training.batches, loss_fn=mse_loss)
    optimizer = torch.optim.SGD([each for stage in stages for each in stage.submod.parameters()], lr=1e-6)
    losses: list[Tensor] = []
    arguments = (inputs,) if stages[0].is_first else ()
    options = {"target": targets, "losses": losses} if stages[-1].is_last else {}

    def step() -> None:
        schedule.step(*arguments, **options, return_outputs=False)
        if training.steps:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _stages_of_rank(pipelining: Any, training: Training, inputs: Tensor) -> list[Any]:
    """Return the stages of this rank.

    Shapes are given: to infer them, each stage would run once, and the first one would keep the activations.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    count = size * training.rounds
    cpu, passed = torch.device("cpu"), torch.empty(inputs.shape, requires_grad=True)
    return [
        pipelining.PipelineStage(
            training.stage(training.width),
            number,
            count,
            cpu,
            input_args=passed if number else inputs,
            output_args=passed,
        )
        for number in range(rank, count, size)
    ]


def _stages_of(rpc: Any, training: Training) -> list[Any]:
    return [rpc.remote(worker, training.stage, (training.width,)) for worker in WORKERS * training.rounds]


def _parameters_of(rpc: Any, stage: Any) -> list[Any]:
    """Return references to the parameters of a stage."""
    found: list[Any] = rpc.rpc_sync(stage.owner(), _references_to_parameters, (stage,))
    return found


def _references_to_parameters(stage: Any) -> list[Any]:
    rpc = importlib.import_module(TORCH)
    return [rpc.RRef(parameter) for parameter in stage.local_value().parameters()]


# Rows


def pipeline_step(rpc: Any, batches: int) -> float:
    """Time three stages, the last one local. More than eight batches at a time block all threads of torch's RPC."""
    first, second, third = rpc.remote(OTHER, Stage), rpc.remote(THIRD, Stage), Stage()
    inputs = [torch.ones(32, 128) for _ in range(batches)]

    def forward() -> Tensor:
        losses = []
        for start in range(0, batches, 8):
            some = inputs[start : start + 8]
            passed = [second.rpc_async().forward(first.remote().forward(each)) for each in some]
            losses += [third(future.wait()).sum() for future in passed]
        return torch.stack(losses).sum()

    return training_step(rpc, forward, 30)


def batches_growth(rpc: Any) -> float:
    """Return the time of 32 micro-batches relative to 8."""
    return pipeline_step(rpc, 32) / pipeline_step(rpc, 8)


def step_time(library: Any, training: Training, count: int, unit: float) -> float:
    return statistics.median(times(count, step_of(library, training))) / unit


def most_kept(library: Any, training: Training) -> float:
    """Return the maximum number of micro-batches for which a stage keeps activations."""
    step = step_of(library, training)

    def most() -> float:
        if library.__name__ == PIPELINING:
            found = torch.tensor(take_most())
            distributed.all_reduce(found, distributed.ReduceOp.MAX)
            return float(found)
        return float(max(library.rpc_sync(worker, take_most) for worker in WORKERS))

    step()
    most()
    for _ in range(3):
        step()
    return most()


def _computing(schedule: str) -> list[Row]:
    """Return rows for small stages, where the overhead dominates, and for larger ones."""
    all_three = (TELEGRAD, TORCH, PIPELINING)
    name = "pipeline training step, 3 stages"
    small, large = Training(schedule), Training(schedule, width=512, samples=64)
    return [
        Row(
            f"{name}, {schedule}",
            "µs",
            False,
            partial(step_time, training=small, count=30, unit=1e-6),
            targets=(OfPeer(0.5), OfPipelining(1)),
            libraries=all_three,
        ),
        Row(
            f"{name} of width 512, {schedule}",
            "µs",
            False,
            partial(step_time, training=large, count=20, unit=1e-6),
            targets=(OfPipelining(1),),
            libraries=all_three,
        ),
    ]


def _asleep(schedule: str, rounds: int = 1) -> Row:
    """Return a row for stages that sleep for a known time and leave the processor free."""
    seconds = ASLEEP / rounds
    training = Training(schedule, partial(SleepingStage, seconds=seconds), rounds=rounds, steps=False)
    return Row(
        f"pipeline of {3 * rounds} stages that sleep, {schedule}",
        "ms",
        False,
        partial(step_time, training=training, count=4, unit=1e-3),
        targets=(Computed(lambda: 1.05 * training.timeline().length * seconds * 1e3, "105% of the schedule's length"),),
        rounds=3,
        libraries=(TELEGRAD, PIPELINING),
    )


def _keeping(schedule: str) -> Row:
    training = Training(schedule, CountingStage)
    return Row(
        f"activations kept by a stage at most, {schedule}",
        "micro-batches",
        False,
        partial(most_kept, training=training),
        targets=(Computed(lambda: float(max(training.timeline().kept)), "the schedule's"),),
        rounds=2,
        libraries=(TELEGRAD, PIPELINING),
    )


PIPELINES = [
    Row(
        "pipeline of 3 stages, 8 micro-batches", "µs", False, partial(pipeline_step, batches=8), targets=(OfPeer(0.9),)
    ),
    Row("pipeline, 32 micro-batches to 8", "times", False, batches_growth, rounds=3),
    *_computing("gpipe"),
    *_computing("1f1b"),
    _asleep("1f1b"),
    _asleep("interleaved", rounds=2),
    _asleep("zero-bubble"),
    _keeping("1f1b"),
]
