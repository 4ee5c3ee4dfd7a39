"""Stages that raise, workers that die, and pipelines that go on after that."""

import os
import pathlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import telegrad.autograd as autograd
import telegrad.checkpoint as checkpoint
from telegrad._core.membership.members import Identity
from telegrad._core.worker import current
from telegrad.errors import PeerError, PeerLost, UsageError
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.pipeline.pipeline_schedule import SCHEDULES
from telegrad.pipeline.stage_runner import BatchInputs, BatchSpec, StageRunner, StageRunners
from telegrad.rpc import RRef, actor, remote, rpc_sync
from tests.cluster import PATIENCE, agents, agents_here, group, wait_until
from tests.nn.training import backward, batch, filled, train, train_alone

WIDTH = 4
MORE_DEATHS = [
    ("1f1b", ("forward", 0), 0),
    ("gpipe", ("forward", 5), 2),
    ("gpipe", ("backward", 0), 2),
    ("1f1b", ("backward", 5), 0),
]
CHUNKS = 6


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, stage: "Stage") -> Tensor:
        ctx.stage = stage
        ctx.number = stage.number
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.stage.fail_in("backward", ctx.number)
        return gradient, None


class Stage(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = filled(nn.Linear(WIDTH, WIDTH), seed)
        self.number = 0
        self.when: tuple[str, int] | None = None
        self.dies = False

    def forward(self, value: Tensor) -> Tensor:
        self.fail_in("forward", self.number)
        found = Failing.apply(self.layer(value).tanh(), self)
        self.number = (self.number + 1) % CHUNKS
        assert isinstance(found, Tensor)
        return found

    def fail_in(self, what: str, number: int) -> None:
        if self.when == (what, number):
            self.when = None
            self.number = 0
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError(f"no {what} of {number} today")


def prepare(module: RRef[Stage], when: tuple[str, int], dies: bool) -> None:
    module.local_value().when, module.local_value().dies, module.local_value().number = when, dies, 0


def fails(stage: RemoteModule, *when: Any, dies: bool = False) -> None:
    rpc_sync(stage.module_rref.owner(), prepare, (stage.module_rref, when, dies))


def alone(steps: int) -> list[float]:
    return train_alone(nn.Sequential(*map(Stage, range(3))), steps)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("number", [0, pytest.param(3, marks=pytest.mark.nightly), CHUNKS - 1])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_stage_that_raises_ends_a_batch_and_the_next_runs(schedule: str, what: str, number: int, stage: int) -> None:
    stages = [RemoteModule(worker, Stage, (seed,)) for seed, worker in enumerate(["w1", "w2", "w0"])]
    pipeline = Pipeline(stages, chunks=CHUNKS, schedule=schedule)
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, pipeline, lr=0.05)
    fails(stages[stage], what, number)
    said = rf"no {what} of {number} today[\s\S]*stage {stage + 1} of 3 of a Pipeline \(Stage\)"
    with pytest.raises(ArithmeticError, match=said):
        backward(pipeline, *batch(0), mse_loss)
    for each in stages:
        fails(each, "never", 0)
    assert train(pipeline, optimizer, range(3)) == pytest.approx(alone(3))


def trained_through_a_death(folder: str, schedule: str, when: tuple[str, int], stage: int) -> tuple[list[float], float]:
    """Train, lose a stage's worker, replace the stage and go on; return the losses and the seconds until the error."""
    names = ["worker1", "worker2", "worker3"]
    stages = [RemoteModule(name, Stage, (seed,)) for seed, name in enumerate(names)]
    pipeline = Pipeline(stages, chunks=CHUNKS, schedule=schedule)
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, pipeline, lr=0.05)
    losses = train(pipeline, optimizer, range(2))
    checkpoint.save({"model": pipeline, "optimizer": optimizer}, folder)
    fails(stages[stage], *when, dies=True)
    start = time.perf_counter()
    with pytest.raises(PeerError, match=names[stage]):
        backward(pipeline, *batch(2), mse_loss)
    taken = time.perf_counter() - start
    pipeline.replace(stage, RemoteModule("worker0", Stage, (100,)))
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, pipeline, lr=0.05)
    checkpoint.load({"model": pipeline, "optimizer": optimizer}, folder)
    for left in set(range(3)) - {stage}:
        fails(stages[left], "never", 0)
    return losses + train(pipeline, optimizer, range(2, 5)), taken


@pytest.mark.parametrize(
    ("schedule", "when", "stage"),
    [
        ("1f1b", ("forward", 4), 1),
        ("zero-bubble", ("backward", 3), 2),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in MORE_DEATHS),
    ],
)
def test_a_dead_worker_is_named_at_once_and_its_stage_is_replaced(
    tmp_path: pathlib.Path, schedule: str, when: tuple[str, int], stage: int
) -> None:
    with group(4) as workers:
        losses, taken = workers[0].run(trained_through_a_death, str(tmp_path / "two"), schedule, when, stage)
    assert losses == pytest.approx(alone(5))
    assert taken < 1


@pytest.mark.usefixtures("here")
def test_a_batch_that_was_stopped_before_its_arrival_does_not_begin() -> None:
    driver = Pipeline([RemoteModule("w1", Stage, (0,)), RemoteModule("w2", Stage, (1,))], chunks=2)._drive()
    spec = BatchSpec((driver.pipeline, 1), 1, ("w0", ""), "1f1b", driver.runner_of, driver.workers, (), 2, False)
    driver.runners[1]._call("stop", 5, (1,), {})
    assert driver.runners[1]._call("run", 5, (spec,), {}) is None


@pytest.mark.usefixtures("here")
def test_replacing_a_stage_needs_its_number() -> None:
    with pytest.raises(UsageError, match="stage must be the number of a stage from 0 to 0, not 1"):
        Pipeline([Stage(0)]).replace(1, Stage(1))
    with pytest.raises(UsageError, match=r"stage must be the number of a stage.* not '0'"):
        Pipeline([Stage(0)]).replace("0", Stage(1))  # type: ignore[arg-type]


class Held(nn.Module):
    begun, goes_on = threading.Event(), threading.Event()

    def forward(self, value: Tensor) -> Tensor:
        self.begun.set()
        assert self.goes_on.wait(PATIENCE)
        return value


def test_runners_give_up_a_batch_whose_driver_has_died() -> None:
    with agents(3) as (driver, _, second):

        def drive() -> None:
            current.enter(driver)
            with torch.no_grad(), pytest.raises(PeerError):
                Pipeline([RemoteModule("w1", Held), RemoteModule("w2", nn.Identity)])(torch.ones(2, 2))

        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(drive)
            assert Held.begun.wait(PATIENCE)
            (runner,) = second.attached(StageRunners).runners.values()
            driver.agent.close()
            ended.result(PATIENCE)
            wait_until(lambda: not runner._runs)
            Held.goes_on.set()


def test_a_pipeline_may_begin_while_a_loss_is_handled() -> None:
    registry, late = StageRunners(SimpleNamespace(on=lambda *_: None, lost=[])), StageRunner({})  # type: ignore[arg-type]
    runners: Any = registry.runners
    runners.data["early"] = lambda: runners.setdefault("late", late)  # as another thread at that moment
    registry._on_lost(Identity("w1", 1, "a"), PeerLost("it died"))
    assert registry.runners["late"] is late


@actor
class Driver:
    """An actor that drives a pipeline, with a method that stages call."""

    def touch(self) -> None:
        return None

    def train(self, me: "RRef[Driver]", trains: bool) -> None:
        pipeline = Pipeline([RemoteModule("w1", nn.Identity), RemoteModule("w2", Touching, (me,))], chunks=2)
        with autograd.context() as context, torch.set_grad_enabled(trains):
            if trains:
                pipeline.forward_backward(context, torch.ones(4, 4), torch.ones(4, 4), mse_loss)
            else:
                pipeline(torch.ones(4, 4))


class Touching(nn.Module):
    def __init__(self, driver: RRef[Driver]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.driver = driver

    def forward(self, value: Tensor) -> Tensor:
        self.driver.rpc_sync().touch()
        return self.layer(value)


@pytest.mark.parametrize("trains", [True, False])
def test_an_actor_that_drives_a_pipeline_whose_stage_calls_it(trains: bool) -> None:
    with agents_here(3):
        made = remote("w1", Driver)
        with pytest.raises(UsageError, match="an actor runs one method at a time"):
            made.rpc_sync().train(made, trains)
        made.rpc_sync().touch()
        del made


class Hook:
    def __init__(self) -> None:
        self.turns = 0
        self.again = threading.Event()

    def step_in_pass(self, context_id: int, request: bytes) -> None:
        self.turns += 1
        if self.turns > 1:
            self.again.set()
        (runner,) = current.here().attached(StageRunners).runners.values()
        for run in runner._runs.values():
            run.take([])
        self.again.wait(0.05)  # takes as long as a step, during which a second turn could begin


def test_a_fused_step_runs_once_although_a_message_looks_for_work() -> None:
    with agents_here(2) as (_, other):
        pipeline = Pipeline([RemoteModule("w1", Stage, (0,))], chunks=2)
        hook = Hook()
        other.conductor.fused_steps[7] = hook
        made = pipeline._drive()
        inputs, targets = batch(0)
        given = BatchInputs(made.pack(0, [inputs]) * 2, made.pack(0, [targets]) * 2, mse_loss, [1.0, 1.0])
        fused: Any = SimpleNamespace(step_id=7, request=b"")
        with autograd.context():
            (result,) = made.run_batch("1f1b", given, 2, True, fused)
        assert hook.turns == len(result.stepped) == 1
