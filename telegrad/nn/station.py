"""The stages of one pipeline on one worker: they go through their plan for a batch, and pass on what they make.

The driver calls each station once for a batch. From then on values and gradients go from station to station in one-way
messages. Whatever comes is put into the batch's agenda; whoever puts in what is next finds a thread for it, which goes
on as long as there is something to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from telegrad.agent import scene
from telegrad.agent.agent import Agent
from telegrad.agent.futures import Future
from telegrad.agent.naming import known_as, runs_as
from telegrad.agent.server import Later
from telegrad.autograd import backward
from telegrad.autograd.api import check_root
from telegrad.autograd.record import AutogradContext
from telegrad.errors import PeerError, PeerLost
from telegrad.group.members import Identity
from telegrad.nn.agenda import Agenda
from telegrad.nn.backward import Backward, Entry
from telegrad.nn.losses import Loss, check_scalar
from telegrad.nn.schedule import FORWARD, INPUT, WEIGHTS, Action, plan
from telegrad.nn.stage import Parcel, Stage, parcel
from telegrad.rpc import RRef, current
from telegrad.wire.messages import INFERENCE, NO_GRAD

SHORT = 1e-3  # seconds of one action, up to which the thread that reads does it
NO_GRADIENT = -1  # among `places`
BatchId = tuple[str, int]  # of which pipeline; and which, in order


class Onward(NamedTuple):
    """A micro-batch for a stage, from the one before."""

    batch: BatchId
    stage: int
    number: int
    body: bytes
    places: list[int]  # of the tensors that require gradients
    tensors: Sequence[Tensor] = ()


class Back(NamedTuple):
    """The gradients of what a stage has sent on, from the one behind."""

    batch: BatchId
    stage: int
    number: int
    places: list[int]  # for each tensor that requires one, which of `tensors`
    tensors: Sequence[Tensor] = ()


class Job(NamedTuple):
    """What all stations must know of a batch."""

    id: BatchId
    oldest: int  # of the batches of that pipeline that have not ended
    schedule: str
    stations: tuple[int, ...]  # of each stage
    workers: tuple[tuple[str, str], ...]  # of each station, and which incarnation
    batches: int
    trains: bool


class Ends(NamedTuple):
    """What the driver gives to the first station and to the last one, for each micro-batch."""

    inputs: Sequence[Parcel] = ()
    targets: Sequence[Parcel] = ()
    loss: Loss | None = None
    weights: Sequence[float] = ()


class Outcome(NamedTuple):
    """What a station gives back to the driver."""

    losses: list[Tensor]
    outputs: list[Any]
    gradients: dict[int, Sequence[Tensor | None]]  # of inputs, by micro-batches
    of_targets: dict[int, Sequence[Tensor | None]]


class Station:
    """Lives as long as its pipeline."""

    def __init__(self, agent: Agent, stages: dict[int, Stage]) -> None:
        self.agent = agent
        self.stages = stages
        self.short = False  # what was done last did not take long: a guess, and any thread's
        self._lock = threading.Lock()  # guards all below
        self._runs: dict[int, Run] = {}  # by batches
        self._early: dict[int, list[Onward | Back]] = {}  # what has come before its batch
        self._oldest = 0  # what comes for batches before this one comes too late

    def __repr__(self) -> str:
        return f"<Station of {', '.join(stage.name for stage in self.stages.values())}: {list(self._runs.values())}>"

    def run(self, job: Job, ends: Ends) -> Later:
        """Go through the plan for a batch; gives an `Outcome` in the end."""
        number = job.id[1]
        run = Run(self, job, ends, lambda: self._forget(number))
        with self._lock:
            self._oldest = max(self._oldest, job.oldest)
            for late in [each for each in self._early if each < self._oldest]:
                del self._early[late]
            self._runs[number] = run
            early = self._early.pop(number, ())
        run.begin(early)
        return Later(run.outcome, run)

    def stop(self, number: int) -> None:
        """A batch has failed elsewhere: do no more for it."""
        with self._lock:
            run = self._runs.get(number)
        if run is not None:
            run.stop()

    def take(self, message: Onward | Back) -> None:
        """Something has come for a batch."""
        number = message.batch[1]
        with self._lock:
            run = self._runs.get(number)
            if run is None and number >= self._oldest:
                self._early.setdefault(number, []).append(message)
        if run is not None:
            run.take(message)

    def lost(self, who: Identity, reason: PeerError) -> None:
        """A worker is lost, or a connection over which something may have been on its way."""
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            if (who.name, who.incarnation) in run.job.workers:
                run.fail(PeerLost(f"a batch cannot go through a Pipeline without worker {who.name!r}: {reason}"))

    def _forget(self, number: int) -> None:
        with self._lock:
            self._runs.pop(number, None)


class Stations:
    """All stations of one worker."""

    def __init__(self, agent: Agent) -> None:
        self._stations: WeakValueDictionary[str, Station] = WeakValueDictionary()  # by pipelines
        for kind in (Onward, Back):
            agent.on(kind, self._take)
        agent.lost.append(self._on_lost)

    def __repr__(self) -> str:
        return f"<Stations: {list(self._stations.values())}>"

    def add(self, pipeline: str, station: Station) -> None:
        self._stations[pipeline] = station

    def _take(self, _: Identity, message: Onward | Back) -> None:
        station = self._stations.get(message.batch[0])
        if station is not None:  # else the pipeline has gone
            station.take(message)

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        for station in list(self._stations.values()):
            station.lost(who, reason)


class Run:
    """One batch at one station. One thread at a time is at it."""

    def __init__(self, station: Station, job: Job, ends: Ends, ended: Callable[[], None]) -> None:
        self.job = job
        self.outcome: Future[Outcome | None] = Future()
        self._station = station
        self._ends = ends
        self._ended = ended
        self._context = current.conductor().current() if job.trains else None
        self._setting = _setting_here(self._context)
        self._here = next(at for stage, at in enumerate(job.stations) if stage in station.stages)
        self._backwards: dict[tuple[int, int], tuple[Backward, int]] = {}  # and how many of the gradients go back
        self._result = Outcome([], [], {}, {})
        self._doing = next(iter(station.stages.values())).name
        self._lock = threading.Lock()  # guards all below
        actions = plan(job.schedule, job.stations, job.batches, job.trains)[self._here]
        self._agenda = Agenda(actions, len(job.stations))
        self._busy = False  # a thread is at it
        self._over = False

    def __repr__(self) -> str:
        state = "over" if self._over else "a thread is at it" if self._busy else f"waits for {self._agenda.awaited()}"
        return f"<Run of batch {self.job.id[1]}: {self._agenda}, {state}>"

    @property
    def _telegrad_known_as(self) -> str:
        return self._doing

    def begin(self, early: Sequence[Onward | Back]) -> None:
        """Do what can be done; `early` came before."""
        with self._lock:
            for message in early:
                self._agenda.come(*_opened(message))
        self._start()

    def take(self, message: Onward | Back) -> None:
        arrival, what = _opened(message)
        with self._lock:
            self._agenda.come(arrival, what)
            waited = self._agenda.awaited() is None
        if waited:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._busy or self._over or self._agenda.awaited() is not None:
                return
            self._busy = True
        self._station.agent.run(self._work, None, self._station.short, by_who_waits=True)

    def _work(self, _: None) -> None:
        longest = 0.0
        with self._station.agent.streams.turn():
            try:
                while (upcoming := self._next()) is not None:
                    start = perf_counter()
                    self._do(*upcoming)
                    longest = max(longest, perf_counter() - start)
            except BaseException as error:
                self.fail(error)
        self._station.short = longest < SHORT

    def _next(self) -> tuple[Action, Any] | None:
        """What this thread shall do; None where it is at it no longer."""
        with self._lock:
            if not self._over and not self._agenda.done and self._agenda.awaited() is None:
                return self._agenda.begin()
            self._busy = False
            ends = self._agenda.done and not self._over
        if ends:
            self._end(lambda: self.outcome.set_result(self._result))
        return None

    def _do(self, action: Action, what: Any) -> None:
        self._doing = self._station.stages[action.stage].name
        if action.kind == FORWARD:
            given = self._ends.inputs[action.batch] if action.stage == 0 else what
            if self.job.trains:
                self._train(action, given)
            else:
                self._infer(action, given)
        elif action.kind == WEIGHTS:
            self._backwards.pop((action.stage, action.batch))[0].run_weights()
        else:
            self._backward(action, what)

    # Forward

    def _infer(self, action: Action, given: Parcel) -> None:
        with self._setting():
            output = self._station.stages[action.stage].run(given.value(given.trained))
        if self._is_last(action):
            self._result.outputs.append(output)
        else:
            self._send_on(action, output)

    def _train(self, action: Action, given: Parcel) -> None:
        stage, targets = self._station.stages[action.stage], None
        came = given.trained
        if self._is_last(action):
            targets = self._ends.targets[action.batch]
            came = came + targets.trained
        entry = Entry(came) if came else None
        tensors = entry.tensors if entry is not None else ()
        with self._setting():
            output = stage.run(given.value(tensors[: len(given.places)]))
            if targets is not None:
                near = stage.near(targets.value(tensors[len(given.places) :]))
                loss = self._loss_of(output, near, self._ends.weights[action.batch])
        if targets is not None:
            self._result.losses.append(loss.detach())
            trained = [loss]
        else:
            trained = self._send_on(action, output)
        assert self._context is not None
        general = partial(backward, self._context.id)
        made = Backward(self._context.gradients, trained, entry, general)
        self._backwards[action.stage, action.batch] = made, len(given.places)

    def _loss_of(self, output: Any, targets: Any, weight: float) -> Tensor:
        assert self._ends.loss is not None
        loss = check_scalar(self._ends.loss(output, targets), self._ends.loss) * weight
        check_root(loss)
        return loss

    def _is_last(self, action: Action) -> bool:
        return action.stage == len(self.job.stations) - 1

    def _send_on(self, action: Action, output: Any) -> list[Tensor]:
        """Pass on what a stage gave; the tensors whose gradients come back."""
        following = action.stage + 1
        name, _ = self.job.workers[self.job.stations[following]]
        made = parcel(output, self._station.agent.shares_program(name))
        body, tensors, places = made.detached()
        message = Onward(self.job.id, following, action.batch, body, places)
        self._send(message, tensors)
        if self.job.trains and not places:
            with self._lock:
                self._agenda.come((False, action.stage, action.batch), [])
        return made.trained

    def _send(self, message: Onward | Back, tensors: Sequence[Tensor]) -> None:
        station = self.job.stations[message.stage]
        if station == self._here:
            with self._lock:
                self._agenda.come(*_opened(message._replace(tensors=tensors)))
        else:
            name, incarnation = self.job.workers[station]
            onward = type(message) is Onward
            self._station.agent.notify(name, message, incarnation, tensors, as_arguments=onward)

    # Backward

    def _backward(self, action: Action, gradients: Sequence[Tensor | None] | None) -> None:
        made, given = self._backwards[action.stage, action.batch]
        if gradients is None:  # nobody gives any to the last stage
            gradients = list(map(torch.ones_like, made.outputs))
        assert self._context is not None
        with self._context.entered():
            found = made.run(gradients, in_steps=action.kind == INPUT)
        if action.kind != INPUT:
            del self._backwards[action.stage, action.batch]
        if action.stage == 0:
            self._result.gradients[action.batch] = found[:given]
        elif given:
            self._send_back(action, found[:given])
        if self._is_last(action):
            self._result.of_targets[action.batch] = found[given:]

    def _send_back(self, action: Action, gradients: Sequence[Tensor | None]) -> None:
        tensors = [gradient for gradient in gradients if gradient is not None]
        numbers = iter(range(len(tensors)))
        places = [NO_GRADIENT if gradient is None else next(numbers) for gradient in gradients]
        self._send(Back(self.job.id, action.stage - 1, action.batch, places), tensors)

    # The end

    def stop(self) -> None:
        """Do no more."""
        self._end(lambda: self.outcome.set_result(None))

    def fail(self, error: BaseException) -> None:
        self._end(lambda: self.outcome.set_exception(error))  # type: ignore[arg-type]

    def _end(self, tell: Callable[[], None]) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        self._ended()
        tell()


def _opened(message: Onward | Back) -> tuple[tuple[bool, int, int], Any]:
    """For the agenda."""
    if isinstance(message, Onward):
        return (True, message.stage, message.number), Parcel(message.body, message.tensors, message.places)
    gradients = [None if place == NO_GRADIENT else message.tensors[place] for place in message.places]
    return (False, message.stage, message.number), gradients


def _setting_here(context: AutogradContext | None) -> Callable[[], AbstractContextManager[None]]:
    """What this thread, which runs a call, got from its caller, for those that go on with it."""
    flags = 0 if torch.is_grad_enabled() else NO_GRAD | (INFERENCE if torch.is_inference_mode_enabled() else 0)
    described, _ = scene.described()
    return partial(scene.setting, flags, described, context)


# What runs on the workers of the stages


@known_as("Pipeline()")
def make_station(pipeline: str, modules: dict[int, RRef[nn.Module]], count: int) -> RRef[Station]:
    """For the modules of this worker, by their stages, of which there are so many."""
    worker = current.here()
    stages = {stage: Stage(module, f"stage {stage + 1} of {count}") for stage, module in modules.items()}
    station = Station(worker.agent, stages)
    worker.attached(Stations).add(pipeline, station)
    return RRef(station)


@known_as("Pipeline.forward")
def run_stage(station: RRef[Station], stage: int, value: Any) -> Any:
    """Where `value` is a reference, this worker fetches what it refers to."""
    return station.local_value().stages[stage].run(value.to_here() if isinstance(value, RRef) else value)


runs_as(run_stage, lambda station, stage, _: station.local_value().stages[stage].name)
