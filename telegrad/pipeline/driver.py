"""The driver's side of a pipeline: it creates a runner on each worker with stages, and makes them run batches.

A batch is one call to each runner. The calls end at about the same time, since each runner waits for values of the
others. If one fails, the others would wait until their timeout. So the first error makes the driver stop the batch at
all runners, and their calls return None. Calls may overtake each other: the stop of a batch may reach a runner before
the batch, and values of the next batch may reach it before the driver's call. Batches are numbered in ascending order
for that, and each call names the oldest one that is under way, so that runners can drop what belongs to earlier ones.
"""

import contextlib
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from telegrad.errors import TelegradError, UsageError
from telegrad.ext.calls import DEFAULT, Future, call_all, remote, rpc_async, rpc_sync
from telegrad.ext.graphs import FusedStep
from telegrad.ext.values import RRef
from telegrad.ext.workers import current
from telegrad.pipeline.pipeline_schedule import INTERLEAVED, TiedWeight
from telegrad.pipeline.stage import PackedValue, pack_value
from telegrad.pipeline.stage_runner import (
    BatchInputs,
    BatchResult,
    BatchSpec,
    make_runner,
    run_stage,
    set_weight,
    weight_of,
)


class PipelineDriver:
    """The runners of a pipeline, and its pending batches."""

    def __init__(self, places: Sequence[RRef[nn.Module]], schedule: str, tied: Sequence[TiedWeight]) -> None:
        """Create the runners for the modules of all stages; raise UsageError if the schedule does not allow this
        placement on workers, or a tied weight does not fit."""
        owners = [place.owner() for place in places]
        names = list(dict.fromkeys(owner.name for owner in owners))
        self.runner_of = tuple(names.index(owner.name) for owner in owners)  # runner of each stage
        if schedule == INTERLEAVED and self.runner_of != (*range(len(names)),) * (len(places) // len(names)):
            raise UsageError(
                "an interleaved schedule needs stages that go around all workers in turn, the same number on each, "
                f"such as w1, w2, w1, w2; these are on {', '.join(owner.name for owner in owners)}"
            )
        self.pipeline = secrets.token_hex(8)
        modules: dict[str, dict[int, RRef[nn.Module]]] = {name: {} for name in names}
        for stage, (owner, place) in enumerate(zip(owners, places, strict=True)):
            modules[owner.name][stage] = place
        made = call_all(
            modules,
            lambda name, own: rpc_async(name, make_runner, (self.pipeline, own, len(places), [*tied])),
            "Pipeline: checking its stages",
        )
        self.runners = [made[name] for name in names]
        # With incarnations, so that a restarted worker of the same name, which has no runner, gets no messages.
        agent = current.agent()
        self.workers = tuple((name, agent.identify(name).incarnation) for name in names)
        # Stages of one worker share the parameter itself (`make_runner`), so only the others need messages.
        self.tied = tuple(tie for tie in tied if self.runner_of[tie.owner] != self.runner_of[tie.replica])
        self._lock = threading.Lock()  # guards all fields below
        self._last = 0  # number of the last batch
        self._under_way: list[int] = []

    def pack(self, stage: int, values: Sequence[Any]) -> list[PackedValue]:
        worker, _ = self.workers[self.runner_of[stage]]
        same_program = current.agent().shares_program(worker)
        return [pack_value(value, same_program) for value in values]

    def call_chain(self, value: Any) -> Future[Any]:
        """Send a micro-batch through all stages. The output has a history across workers."""
        # Each stage gets a reference to the output of the stage before, and fetches it itself: values do not pass
        # through this worker, and a micro-batch goes on while the next one is sent.
        *before, last = enumerate(self.runners[runner] for runner in self.runner_of)
        for stage, runner in before:
            value = remote(runner.owner(), run_stage, (runner, stage, value))
        return rpc_async(last[1].owner(), run_stage, (last[1], last[0], value))

    def send_tied_weights(self) -> None:
        """Send tied weights to stages on other workers, as before a batch."""
        for tie in self.tied:
            owner, replica = (self.runners[self.runner_of[stage]] for stage in (tie.owner, tie.replica))
            with torch.no_grad():
                value = rpc_sync(owner.owner(), weight_of, (owner, tie.owner, tie.name))
                rpc_sync(replica.owner(), set_weight, (replica, tie.replica, tie.name_there, value))

    def run_batch(
        self, schedule: str, given: BatchInputs, batches: int, trains: bool, fused: FusedStep | None = None
    ) -> list[BatchResult]:
        """Run a batch on all runners. Return their results, or raise the first error."""
        agent = current.agent()
        with self._lock:
            self._last += 1
            self._under_way.append(self._last)
            number, oldest = self._last, self._under_way[0]
        spec = BatchSpec(
            *((self.pipeline, number), oldest, (agent.name, agent.incarnation), schedule, self.runner_of),
            *(self.workers, self.tied, batches, trains, *((fused.step_id, fused.request) if fused is not None else ())),
        )
        limit = agent.timeout * batches * (1 + trains)
        asked = "Pipeline.forward_backward" if trains else "Pipeline.forward"
        calls: list[Future[BatchResult]] = []
        errors: list[Exception] = []

        def look(future: torch.futures.Future[Any]) -> None:
            try:
                future.wait()
            except Exception as error:
                BaseException.__setattr__(error, "__context__", None)  # an error that the completing thread handles
                errors.append(error)
                if errors[0] is error:
                    self._stop(number)

        # The first error that arrives is raised, and stops the batch. Later ones are mostly its consequences.
        try:
            for at, runner in enumerate(self.runners):
                own = given if at == self.runner_of[-1] else BatchInputs()
                own = own._replace(inputs=given.inputs if at == self.runner_of[0] else ())
                calls.append(runner._call_async("run", limit, (spec,), own._asdict(), asked))
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
            self._stop(number)
            raise
        finally:
            with self._lock:
                self._under_way.remove(number)
        if errors:
            raise errors[0]
        return [future.wait() for future in calls]

    def _stop(self, number: int) -> None:
        """Stop a batch that one runner cannot finish."""
        for runner in self.runners:
            with contextlib.suppress(TelegradError):  # the worker may be dead
                runner._call_async("stop", DEFAULT, (number,), {}, "Pipeline.forward_backward").heed()
