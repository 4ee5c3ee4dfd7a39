"""The stages of one pipeline on one worker.

The driver calls each station once per batch. Then the stations exchange values and gradients in one-way messages.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from telegrad.errors import PeerError, PeerLost
from telegrad.ext.calls import Agent, Deferred, known_as, runs_as
from telegrad.ext.references import RRef
from telegrad.ext.workers import Identity, current
from telegrad.pipeline.batches import BatchInputs, BatchSpec, StageMessage
from telegrad.pipeline.pipeline_schedule import TiedWeight
from telegrad.pipeline.run import BatchRun
from telegrad.pipeline.stage import Stage
from telegrad.rpc.functions import must_finish


class StageWorker:
    """The stages of one pipeline on one worker; exists as long as the pipeline."""

    def __init__(self, agent: Agent, stages: dict[int, Stage]) -> None:
        self.stages = stages
        self._agent = agent
        self._lock = threading.Lock()  # guards all fields below
        self._runs: dict[int, BatchRun] = {}  # by batch number
        self._early: dict[int, list[StageMessage]] = {}  # messages that came before their batch
        self._stopped: set[int] = set()  # batches that failed elsewhere, maybe before they began here
        self._oldest = 0  # messages of earlier batches are dropped
        self._short = False  # actions of the last batch did not take long

    def __repr__(self) -> str:
        return f"<StageWorker of {self._telegrad_runs('')}: {list(self._runs.values())}>"

    def _telegrad_runs(self, _: str) -> str:
        return ", ".join(stage.name for stage in self.stages.values())

    def run(self, spec: BatchSpec, given: BatchInputs) -> Deferred:
        """Run a batch. The result is a `BatchResult`, or None if the batch was stopped."""
        number = spec.id[1]
        run = BatchRun(self._agent, self.stages, spec, given, self._short, lambda: self._end(number))
        with self._lock:
            self._oldest = max(self._oldest, spec.oldest)
            late = [self._early.pop(each) for each in [*self._early] if each < self._oldest]
            is_stopped = number in self._stopped or number < self._oldest
            self._stopped = {each for each in self._stopped if each >= self._oldest}
            self._runs[number] = run
            early = self._early.pop(number, ())
        del late  # not under the lock, as in `stop`
        if is_stopped:
            run.stop()
        else:
            run.take(early)
        return Deferred(run.outcome, run)

    @must_finish
    def stop(self, number: int) -> None:
        """Stop a batch that has failed on another worker."""
        with self._lock:
            run = self._runs.get(number)
            self._stopped.add(number)
            early = self._early.pop(number, ())
        del early  # not under the lock: these may hold the last reference to tensors
        if run is not None:
            run.stop()

    def take(self, message: StageMessage) -> None:
        """Pass a message to its batch, or keep it until the batch begins."""
        number = message.batch[1]
        with self._lock:
            run = self._runs.get(number)
            if run is None and number >= self._oldest and number not in self._stopped:
                self._early.setdefault(number, []).append(message)
        if run is not None:
            run.take([message])

    def lost(self, who: Identity, reason: PeerError) -> None:
        """Fail the batches that use a lost worker. If only its connection was lost, a message may be lost, too."""
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            if (who.name, who.incarnation) in (run.spec.driver, *run.spec.workers):
                run.fail(PeerLost(f"a batch cannot go through a Pipeline without worker {who.name!r}: {reason}"))

    def _end(self, number: int) -> None:
        with self._lock:
            self._short = self._runs.pop(number).short


class StageWorkerRegistry:
    """The stations of all pipelines on one worker."""

    def __init__(self, agent: Agent) -> None:
        self._stations: WeakValueDictionary[str, StageWorker] = WeakValueDictionary()  # by pipeline
        agent.on(StageMessage, self._take)
        agent.lost.append(self._on_lost)

    def add(self, pipeline: str, station: StageWorker) -> None:
        self._stations[pipeline] = station

    def _take(self, _: Identity, message: StageMessage) -> None:
        station = self._stations.get(message.batch[0])
        if station is not None:  # else the pipeline no longer exists
            station.take(message)

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        for station in list(self._stations.values()):
            station.lost(who, reason)


# Functions that the driver calls on the workers of the stages


@known_as("Pipeline()")
def make_station(
    pipeline: str, modules: Mapping[int, RRef[nn.Module]], count: int, tied: Sequence[TiedWeight]
) -> RRef[StageWorker]:
    """Create a station for the modules of this worker, by their stages, of which there are `count` in all."""
    worker = current.here()
    stages = {stage: Stage(module, f"stage {stage + 1} of {count}") for stage, module in modules.items()}
    for tie in tied:
        if tie.replica in stages:
            weight = stages[tie.owner].weight(tie.name) if tie.owner in stages else None
            stages[tie.replica].tie(tie.name_there, weight)
    station = StageWorker(worker.agent, stages)
    worker.attached(StageWorkerRegistry).add(pipeline, station)
    return RRef(station)


@known_as("Pipeline.forward")
def run_stage(station: RRef[StageWorker], stage: int, value: Any) -> Any:
    """Run a stage; fetch the value if it is a reference."""
    return station.local_value().stages[stage].run(value.to_here() if isinstance(value, RRef) else value)


runs_as(run_stage, lambda station, stage, _: station.local_value().stages[stage].name)


@known_as("Pipeline.state_dict")
def weight_of(station: RRef[StageWorker], stage: int, name: str) -> Tensor:
    """Return a tied weight, on its owner."""
    return station.local_value().stages[stage].weight(name).detach()


@known_as("Pipeline.state_dict")
def set_weight(station: RRef[StageWorker], stage: int, name: str, value: Tensor) -> None:
    """Set a tied weight, on its replica."""
    station.local_value().stages[stage].set_weight(name, value)
