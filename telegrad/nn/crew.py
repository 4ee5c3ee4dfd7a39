"""The stations of a pipeline, as its driver has them: it makes them, and has them go through batches."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from telegrad.agent.deadlines import DEFAULT
from telegrad.agent.futures import Future
from telegrad.errors import TelegradError, UsageError
from telegrad.nn.batches import Ends, Job, Product
from telegrad.nn.schedule import INTERLEAVED, TiedWeight
from telegrad.nn.stage import Bundle, bundled
from telegrad.nn.station import Station, lent_weight, make_station, run_stage, set_weight
from telegrad.rpc import RRef, current, remote, rpc_async, rpc_sync
from telegrad.rpc.together import together


class Crew(NamedTuple):
    """One station for each worker that has stages."""

    pipeline: str  # a name that no other has
    stations: list[RRef[Station]]
    stations_of: tuple[int, ...]  # the stages
    driver: tuple[str, str]  # its name, and which incarnation
    workers: tuple[tuple[str, str], ...]  # of each station, likewise
    ties: list[TiedWeight]  # across workers

    def bundled(self, stage: int, value: Any) -> Bundle:
        """A value for a stage."""
        worker, _ = self.workers[self.stations_of[stage]]
        return bundled(value, current.agent().shares_program(worker))

    def through(self, value: Any) -> Future[Any]:
        """Send a micro-batch through all stages, so that what comes out has a history that crosses workers."""
        *before, last = enumerate(self.stations[station] for station in self.stations_of)
        for stage, station in before:
            value = remote(station.owner(), run_stage, (station, stage, value))
        return rpc_async(last[1].owner(), run_stage, (last[1], last[0], value))

    def lend(self) -> None:
        """Send the weights that stages of other workers borrow, as before a batch."""
        for tie in self.ties:
            owner, borrower = (self.stations[self.stations_of[stage]] for stage in (tie.owner, tie.replica))
            with torch.no_grad():
                value = rpc_sync(owner.owner(), lent_weight, (owner, tie.owner, tie.name))
                rpc_sync(borrower.owner(), set_weight, (borrower, tie.replica, tie.name_there, value))

    def play(self, job: Job, ends: Ends) -> list[Product]:
        """Have all go through a batch; what each gives back, or the error of the first that fails."""
        agent = current.agent()
        errors: list[Exception] = []

        def look(future: torch.futures.Future[Any]) -> None:
            try:
                future.wait()
            except Exception as error:
                errors.append(error)
                if errors[0] is error:
                    self._stop(job)

        try:
            calls = [self._begin(job, ends, at) for at in range(len(self.stations))]
            for future in calls:
                future.add_done_callback(look)
            with contextlib.ExitStack() as stack:
                for future in calls:  # a method of an actor waits for all of them at once
                    if (in_turn := getattr(future.call, "in_turn", None)) is not None:
                        stack.enter_context(in_turn.waited_for())
                for future in calls:
                    if not future.done():
                        agent.wait_for(future)
        except BaseException:
            self._stop(job)
            raise
        if errors:
            raise errors[0]
        return [future.wait() for future in calls]

    def _begin(self, job: Job, ends: Ends, at: int) -> Future[Product]:
        inputs = ends.inputs if at == self.stations_of[0] else ()
        own = ends._replace(inputs=inputs) if at == self.stations_of[-1] else Ends(inputs)
        limit = current.agent().timeout * job.batches * (1 + job.trains)
        asked = "Pipeline.forward_backward" if job.trains else "Pipeline.forward"
        return self.stations[at]._call_async("run", limit, (job, own), {}, asked)

    def _stop(self, job: Job) -> None:
        """Somebody cannot go on: the others need not."""
        for station in self.stations:
            with contextlib.suppress(TelegradError):  # its worker may be the one that has died
                station._call_async("stop", DEFAULT, (job.id[1],), {}, "Pipeline.forward_backward").heed()


def gather(places: Sequence[RRef[nn.Module]], schedule: str, ties: Sequence[TiedWeight]) -> Crew:
    """Make the stations for the modules of all stages.

    Raises:
        UsageError: they are not where the schedule wants them, or what is tied cannot be.
    """
    owners = [place.owner() for place in places]
    names = list(dict.fromkeys(owner.name for owner in owners))
    stations_of = tuple(names.index(owner.name) for owner in owners)
    around = tuple(range(len(names))) * (len(places) // len(names))
    if schedule == INTERLEAVED and stations_of != around:
        raise UsageError(
            "an interleaved schedule wants the stages to go around all workers in turn, as many on each, "
            f"such as w1, w2, w1, w2; these are on {', '.join(owner.name for owner in owners)}"
        )
    pipeline = secrets.token_hex(8)
    modules: dict[str, dict[int, RRef[nn.Module]]] = {name: {} for name in names}
    for stage, (owner, place) in enumerate(zip(owners, places, strict=True)):
        modules[owner.name][stage] = place
    made = together(
        modules,
        lambda name, own: rpc_async(name, make_station, (pipeline, own, len(places), [*ties])),
        "Pipeline: looking at its stages",
    )
    agent = current.agent()
    workers = tuple((name, agent.identify(name).incarnation) for name in names)
    across = [tie for tie in ties if stations_of[tie.owner] != stations_of[tie.replica]]
    driver = agent.name, agent.incarnation
    return Crew(pipeline, [made[name] for name in names], stations_of, driver, workers, across)
