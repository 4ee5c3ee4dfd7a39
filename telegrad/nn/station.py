"""The stages of one pipeline on one worker.

The driver calls each station once for a batch. From then on values and gradients go from station to station in one-way
messages.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from telegrad.agent.agent import Agent
from telegrad.agent.naming import known_as, runs_as
from telegrad.agent.server import Later
from telegrad.errors import PeerError, PeerLost
from telegrad.group.members import Identity
from telegrad.nn.batches import Delivery, Ends, Job
from telegrad.nn.run import Run
from telegrad.nn.schedule import TiedWeight
from telegrad.nn.stage import Stage
from telegrad.rpc import RRef, current
from telegrad.rpc.functions import must_finish


class Station:
    """Lives as long as its pipeline."""

    def __init__(self, agent: Agent, stages: dict[int, Stage]) -> None:
        self.stages = stages
        self._agent = agent
        self._lock = threading.Lock()  # guards all below
        self._runs: dict[int, Run] = {}  # by batches
        self._early: dict[int, list[Delivery]] = {}  # what has come before its batch
        self._stopped: set[int] = set()  # batches that have failed elsewhere, maybe before they came here
        self._oldest = 0  # what comes for batches before this one comes too late
        self._short = False  # actions of the last batch did not take long

    def __repr__(self) -> str:
        return f"<Station of {', '.join(stage.name for stage in self.stages.values())}: {list(self._runs.values())}>"

    def _telegrad_runs(self, _: str) -> str:
        return ", ".join(stage.name for stage in self.stages.values())

    def run(self, job: Job, ends: Ends) -> Later:
        """Go through the plan for a batch; gives a `Product` in the end."""
        number = job.id[1]
        run = Run(self._agent, self.stages, job, ends, self._short, lambda: self._end(number))
        with self._lock:
            self._oldest = max(self._oldest, job.oldest)
            late = [self._early.pop(each) for each in [*self._early] if each < self._oldest]
            is_stopped = number in self._stopped or number < self._oldest
            self._stopped = {each for each in self._stopped if each >= self._oldest}
            self._runs[number] = run
            early = self._early.pop(number, ())
        del late  # not under the lock, as below
        if is_stopped:
            run.stop()
        else:
            run.take(early)
        return Later(run.outcome, run)

    @must_finish
    def stop(self, number: int) -> None:
        """A batch has failed elsewhere: do no more for it."""
        with self._lock:
            run = self._runs.get(number)
            self._stopped.add(number)
            early = self._early.pop(number, ())
        del early  # not under the lock: these may be the last to hold what has come
        if run is not None:
            run.stop()

    def take(self, delivery: Delivery) -> None:
        """Something has come for a batch."""
        number = delivery.batch[1]
        with self._lock:
            run = self._runs.get(number)
            if run is None and number >= self._oldest and number not in self._stopped:
                self._early.setdefault(number, []).append(delivery)
        if run is not None:
            run.take([delivery])

    def lost(self, who: Identity, reason: PeerError) -> None:
        """A worker is lost, or a connection over which something may have been on its way."""
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            if (who.name, who.incarnation) in (run.job.driver, *run.job.workers):
                run.fail(PeerLost(f"a batch cannot go through a Pipeline without worker {who.name!r}: {reason}"))

    def _end(self, number: int) -> None:
        with self._lock:
            self._short = self._runs.pop(number).short


class Stations:
    """All stations of one worker."""

    def __init__(self, agent: Agent) -> None:
        self._stations: WeakValueDictionary[str, Station] = WeakValueDictionary()  # by pipelines
        agent.on(Delivery, self._take)
        agent.lost.append(self._on_lost)

    def __repr__(self) -> str:
        return f"<Stations: {list(self._stations.values())}>"

    def add(self, pipeline: str, station: Station) -> None:
        self._stations[pipeline] = station

    def _take(self, _: Identity, delivery: Delivery) -> None:
        station = self._stations.get(delivery.batch[0])
        if station is not None:  # else the pipeline has gone
            station.take(delivery)

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        for station in list(self._stations.values()):
            station.lost(who, reason)


# What runs on the workers of the stages


@known_as("Pipeline()")
def make_station(
    pipeline: str, modules: Mapping[int, RRef[nn.Module]], count: int, ties: Sequence[TiedWeight]
) -> RRef[Station]:
    """For the modules of this worker, by their stages, of which there are `count` in all."""
    worker = current.here()
    stages = {stage: Stage(module, f"stage {stage + 1} of {count}") for stage, module in modules.items()}
    for tie in ties:
        if tie.owner in stages and tie.replica in stages:
            stages[tie.replica].share_weight(tie.name_there, stages[tie.owner].weight(tie.name))
        elif tie.replica in stages:
            stages[tie.replica].borrow_weight(tie.name_there)
    station = Station(worker.agent, stages)
    worker.attached(Stations).add(pipeline, station)
    return RRef(station)


@known_as("Pipeline.forward")
def run_stage(station: RRef[Station], stage: int, value: Any) -> Any:
    """Where `value` is a reference, this worker fetches what it refers to."""
    return station.local_value().stages[stage].run(value.to_here() if isinstance(value, RRef) else value)


runs_as(run_stage, lambda station, stage, _: station.local_value().stages[stage].name)


@known_as("checkpoint.save")
def lent_weight(station: RRef[Station], stage: int, name: str) -> Tensor:
    """At the owner of a weight that is tied."""
    return station.local_value().stages[stage].weight(name).detach()


@known_as("checkpoint.save")
def set_weight(station: RRef[Station], stage: int, name: str, value: Tensor) -> None:
    """At a borrower of that."""
    station.local_value().stages[stage].set_weight(name, value)
