"""The stages of one pipeline on one worker, and their batches.

The driver calls each runner once per batch. Then the runners exchange values and gradients in one-way messages. A
runner runs the actions of its plan. Inputs of actions are stored when they arrive. When the input of the next action
arrives, a thread runs that action, and further ones while the next one has its input.

All runners make the same plan from the same specification, so a message needs no more than the key of the action that
waits for it, and the order of arrival changes nothing. A message may arrive before the driver's call of its batch, as
another runner got its call earlier; `StageRunner` keeps it until then. It may also arrive after the batch has failed:
the runner remembers stopped batches, until a call names a later one as the oldest.

One thread at a time runs the actions of a batch. Under the lock of the `BatchRun` it either takes the next action or
becomes idle, and a thread that brings an input either finds it busy or starts a new one. So an input that arrives just
as the running thread finds nothing to do is not overlooked. After the last action `_busy` stays True: the thread may
then run an optimizer's step, and a late message must not start a second thread that would run it again.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from telegrad.autograd import backward
from telegrad.errors import PeerError, PeerLost
from telegrad.ext.calls import Agent, Deferred, Future, call_context, known_as, runs_as
from telegrad.ext.events import events
from telegrad.ext.graphs import check_root
from telegrad.ext.values import INFERENCE, NO_GRAD, RRef
from telegrad.ext.workers import Identity, current
from telegrad.pipeline import pipeline_schedule as schedule
from telegrad.pipeline.microbatches import Loss, check_sum, evaluated, scalars_of
from telegrad.pipeline.pipeline_schedule import Action, InputKey, TiedWeight, input_of, plan, with_tied
from telegrad.pipeline.stage import Backward, PackedValue, Stage, StageInput, detach, pack_value
from telegrad.rpc.functions import must_finish

SHORT = 1e-3  # seconds of one action up to which the reader thread runs it

BatchId = tuple[str, int]  # the pipeline; and the number of the batch, ascending


class BatchSpec(NamedTuple):
    """The description of a batch, sent to all runners."""

    id: BatchId
    oldest: int  # oldest pending batch of that pipeline
    driver: tuple[str, str]  # name and incarnation
    schedule: str
    runners: tuple[int, ...]  # the runner of each stage
    workers: tuple[tuple[str, str], ...]  # name and incarnation for each runner
    tied: tuple[TiedWeight, ...]  # weights that stages on different workers share
    batches: int
    trains: bool
    step_id: int = 0  # the number of the object that gets the gradients of each worker; 0: none
    request: bytes = b""  # for that object


class BatchInputs(NamedTuple):
    """Inputs for the first runner, and targets, loss and weights for the last one, per micro-batch."""

    inputs: Sequence[tuple[bytes, Sequence[Tensor], list[int]]] = ()  # fields of a `PackedValue`
    targets: Sequence[tuple[bytes, Sequence[Tensor], list[int]]] = ()
    loss: Loss | None = None
    weights: Sequence[float] = ()
    is_unsure: bool = False  # the losses of the micro-batches may not sum up to that of the batch


class BatchResult(NamedTuple):
    losses: list[Tensor]
    outputs: list[Any]
    gradients: dict[int, Sequence[Tensor | None]]  # of inputs, by micro-batch
    of_targets: dict[int, Sequence[Tensor | None]]
    stepped: list[tuple[bool, Any]]  # empty, or of the fused step: True and its value, or False and its failure
    scalars: list[str]  # the paths of outputs that are one number for each of several micro-batches


class StageMessage(NamedTuple):
    """The input of an action: a value for a stage, or tensors, some of which may be missing."""

    batch: BatchId
    key: InputKey
    body: bytes
    # For a value: indices of the tensors that require gradients; else for each tensor, True if it is present.
    positions: list[int]
    tensors: Sequence[Tensor] = ()

    def opened(self) -> Any:
        """Return the value, packed, or the tensors, with None for each missing one."""
        if self.key[0] == schedule.FORWARD:
            return PackedValue(self.body, self.tensors, self.positions)
        given = iter(self.tensors)
        return [next(given) if is_there else None for is_there in self.positions]


class BatchRun:
    """The run of one batch at one runner. One thread at a time runs its actions."""

    def __init__(
        self, stages: Mapping[int, Stage], spec: BatchSpec, given: BatchInputs, short: bool, ended: Callable[[], None]
    ) -> None:
        """Must be created by the thread that runs the driver's call. `short`: the actions are expected to be short."""
        self.spec = spec
        self.outcome: Future[BatchResult | None] = Future()  # None: the batch was stopped
        self.short = short
        self._agent = current.agent()
        self._stages = stages
        self._given = given
        self._ended = ended
        self._here = spec.runners[next(iter(stages))]
        self._last = len(spec.runners) - 1  # the last stage
        self._shares_program = cache(self._agent.shares_program)
        for stage in stages.values():
            stage.begin()
        self._conductor = current.conductor()
        self._context = self._conductor.current() if spec.trains else None
        # Actions run on any thread: on a reader thread, or on one that waits for something else meanwhile and has modes
        # of its own. So the modes and the context of this call are described here, and set for each action:
        flags = 0 if torch.is_grad_enabled() else NO_GRAD | (INFERENCE if torch.is_inference_mode_enabled() else 0)
        description = call_context.described()[0]
        resumed = partial(call_context.resumed, flags, description, self._context)
        self._setting = resumed if flags or description or self._context is None else self._context.entered
        # Used only by the thread that runs the actions:
        self._backwards: dict[tuple[int, int], tuple[Backward, int]] = {}  # and the number of gradients to send back
        self._result = BatchResult([], [], {}, {}, [], [])
        self._outputs: list[Any] = []  # of the micro-batches, with their targets, if the loss must be checked
        self._targets: list[Any] = []
        self._telegrad_known_as = next(iter(stages.values())).name  # the name of the function in errors
        self._lock = threading.Lock()  # guards all fields below
        plans = plan(spec.schedule, spec.runners, spec.batches, spec.trains)
        if spec.tied:
            plans = with_tied(plans, spec.runners, spec.tied, spec.trains)
        self._steps = [(action, input_of(action, self._last)) for action in plans[self._here]]
        self._done = 0  # number of actions that have begun
        self._arrived: dict[InputKey, Any] = {}
        self._busy = False  # a thread runs the actions
        self._over = False

    # Inputs of actions

    def take(self, messages: Iterable[StageMessage]) -> None:
        """Store inputs, and start the actions that can begin."""
        with self._lock:
            for message in messages:
                self._arrived[message.key] = message.opened()
            if self._busy or self._over:
                return
            key = self._steps[self._done][1]
            self._busy = key is None or key in self._arrived
            if not self._busy:
                return
        # Outside of the lock, and by the reactor: this thread may be handling a message, and an action is user code.
        self._agent.run(self._work, None, self.short)

    def _work(self, _: None) -> None:
        longest = 0.0
        with self._agent.streams.turn():
            try:
                while (upcoming := self._next()) is not None:
                    start = perf_counter()
                    self._do(*upcoming)
                    end = perf_counter()
                    longest = max(longest, end - start)
                    if (note := events.note) is not None:
                        note((events.STAGED, start, end, "/".join(map(str, self.spec.id)), *upcoming[0]))
                    self.short = longest < SHORT
            except BaseException as error:
                self.fail(error)

    def _next(self) -> tuple[Action, Any] | None:
        """Return the next action with its input, or None if this thread must stop."""
        with self._lock:
            if self._over:
                return None
            if self._done < len(self._steps):
                action, key = self._steps[self._done]
                if key is not None and key not in self._arrived:
                    self._busy = False
                    return None
                self._done += 1
                return action, self._arrived.pop(key) if key is not None else None
        # All actions are done, and `_busy` is still True. The gradients of these stages are complete; the conductor
        # runs the fused step only if no sent tensor of the context may still get one.
        if self.spec.step_id and self._context is not None and not (self._over or self._context.ended):
            stepped = self._conductor.step_now(self._context, self.spec.step_id, self.spec.request)
            if stepped is not None:
                self._result.stepped.append(stepped)
        self._end(lambda: self.outcome.set_result(self._result))
        return None

    def _do(self, action: Action, given: Any) -> None:
        stage = self._stages[action.stage]
        self._telegrad_known_as = stage.name
        if action.kind == schedule.FORWARD:
            packed = PackedValue(*self._given.inputs[action.batch]) if action.stage == 0 else given
            (self._train if self.spec.trains else self._infer)(stage, action, packed)
        elif action.kind == schedule.WEIGHTS:
            self._backwards.pop((action.stage, action.batch))[0].run_weights()
        elif action.kind in (schedule.BACKWARD, schedule.INPUT):
            self._backward(action, given)
        else:
            self._keep_tied(stage, action, given)

    # Forward

    def _infer(self, stage: Stage, action: Action, given: PackedValue) -> None:
        with self._setting():
            output = stage.run(given.value(given.differentiable))
        if action.stage == self._last:
            self._result.outputs.append(output)
        else:
            self._send_on(action, output)

    def _train(self, stage: Stage, action: Action, given: PackedValue) -> None:
        targets = PackedValue(*self._given.targets[action.batch]) if action.stage == self._last else None
        came = [*given.differentiable, *(targets.differentiable if targets is not None else ())]
        inlet = StageInput(came) if came else None
        tensors, count = inlet.tensors if inlet is not None else (), len(given.positions)
        with self._setting():
            output = stage.run(given.value(tensors[:count]))
            if targets is not None:
                self._telegrad_known_as = f"the loss, after {stage.name}"
                wanted = stage.to_own_device(targets.value(tensors[count:]))
                loss = self._loss(output, wanted, self._given.weights[action.batch])
        trained = [loss] if targets is not None else self._send_on(action, output)
        assert self._context is not None
        made = Backward(self._context.gradients, trained, inlet, partial(backward, self._context.id))
        self._backwards[action.stage, action.batch] = made, count

    def _loss(self, output: Any, targets: Any, weight: float) -> Tensor:
        assert self._given.loss is not None
        loss = evaluated(self._given.loss, output, targets, self.spec.batches > 1) * weight
        check_root(loss)
        losses = self._result.losses
        losses.append(loss.detach())
        if len(losses) == 1 < self.spec.batches:
            self._result.scalars.extend(scalars_of(output))
        if self._given.is_unsure:
            for values, value in ((self._outputs, output), (self._targets, targets)):
                # Without their histories: a backward pass ends there.
                values.append(tree_map_only(Tensor, lambda it: it.detach().requires_grad_(it.requires_grad), value))
            # The loss of the last micro-batch comes before its backward, for which all stages still wait. So if the
            # check fails, no worker has stepped.
            if len(losses) == self.spec.batches:
                check_sum(self._given.loss, self._outputs, self._targets, losses, self._given.weights)
        return loss

    def _send_on(self, action: Action, output: Any) -> list[Tensor]:
        """Send an output to the next stage; return the tensors whose gradients come back."""
        name, _ = self.spec.workers[self.spec.runners[action.stage + 1]]
        made = pack_value(output, self._shares_program(name))
        # Detached: the graph between stages is made of `StageInput`s and messages, not of records of a context. An
        # output without gradients gets no answer, so the backward of this stage finds its empty input at once.
        key = schedule.FORWARD, action.stage + 1, action.batch
        self._send(key, list(map(detach, made.tensors)), made.positions, made.body)
        if not made.positions:
            with self._lock:
                self._arrived[schedule.BACKWARD, action.stage, action.batch] = []
        return made.differentiable

    def _send_tensors(self, key: InputKey, given: Sequence[Tensor | None]) -> None:
        self._send(key, [each for each in given if each is not None], [each is not None for each in given])

    def _send(self, key: InputKey, tensors: Sequence[Tensor], positions: list[Any], body: bytes = b"") -> None:
        kind, stage, _ = key
        runner = self.spec.runners[stage]
        message = StageMessage(self.spec.id, key, body, positions)
        # A stage of the same runner gets its input directly. No thread need be started for it: this one runs actions,
        # and looks for the next one after this.
        if runner == self._here:
            with self._lock:
                self._arrived[key] = message._replace(tensors=tensors).opened()
        else:
            name, incarnation = self.spec.workers[runner]
            self._agent.notify(name, message, incarnation, tensors, as_arguments=kind == schedule.FORWARD)

    # Backward

    def _backward(self, action: Action, gradients: Sequence[Tensor | None] | None) -> None:
        made, count = self._backwards[action.stage, action.batch]
        if gradients is None:  # the backward of the last stage
            gradients = list(map(torch.ones_like, made.outputs))
        assert self._context is not None
        with self._context.entered():
            found = made.run(gradients, in_steps=action.kind == schedule.INPUT)
        if action.kind != schedule.INPUT:
            del self._backwards[action.stage, action.batch]
        if action.stage == 0:
            self._result.gradients[action.batch] = found[:count]
        elif count:
            self._send_tensors((schedule.BACKWARD, action.stage - 1, action.batch), found[:count])
        if action.stage == self._last:
            self._result.of_targets[action.batch] = found[count:]

    # Weights of several stages

    def _keep_tied(self, stage: Stage, action: Action, given: Sequence[Any]) -> None:
        tie, number = self.spec.tied[action.batch], action.batch
        gradients: Any = self._context and self._context.gradients
        if action.kind == schedule.SEND_WEIGHT:
            weight, key = stage.weight(tie.name), (schedule.LOAD_WEIGHT, tie.replica, number)
            self._send_tensors(key, [weight.detach(), *[None] * (not weight.requires_grad)])
        elif action.kind == schedule.LOAD_WEIGHT:
            value, *frozen = given
            stage.set_weight(tie.name_there, value)
            if self.spec.trains:
                stage.follow(tie.name_there, not frozen, f"{tie.owner}.{tie.name}")
        elif action.kind == schedule.SEND_GRADIENT:
            gradient = gradients.take(stage.weight(tie.name_there))
            self._send_tensors((schedule.ADD_GRADIENT, tie.owner, number), [gradient])
        elif given[0] is not None and (weight := stage.weight(tie.name)).requires_grad:
            # Like the weight, the gradient comes by the host if no map connects the two workers.
            gradients.add(weight, given[0].to(weight.device), False)

    # The end

    def stop(self) -> None:
        """Run no further action."""
        self._end(lambda: self.outcome.set_result(None))

    def fail(self, error: BaseException) -> None:
        self._end(lambda: self.outcome.set_exception(error))  # type: ignore[arg-type]

    def _end(self, tell: Callable[[], None]) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        # The run is removed before the outcome is told: then the driver may begin the next batch, whose run here takes
        # over whether actions are short.
        self._ended()
        tell()


class StageRunner:
    """The stages of one pipeline on one worker; exists as long as the pipeline."""

    def __init__(self, stages: dict[int, Stage]) -> None:
        self.stages = stages
        self._lock = threading.Lock()  # guards all fields below
        self._runs: dict[int, BatchRun] = {}  # by batch number
        # Messages that came before their batch; None: the batch failed elsewhere, maybe before it began here.
        self._early: dict[int, list[StageMessage] | None] = {}
        self._oldest = 0  # messages of earlier batches are dropped
        self._short = False  # actions of the last batch did not take long

    def __repr__(self) -> str:
        return f"<StageRunner of {self._telegrad_runs('')}: {list(self._runs.values())}>"

    def _telegrad_runs(self, _: str) -> str:
        return ", ".join(stage.name for stage in self.stages.values())

    def run(self, spec: BatchSpec, **given: Any) -> Deferred:
        """Run a batch; `given` has the fields of `BatchInputs`. Return a `BatchResult`, or None if it was stopped."""
        # A message for this batch that arrives while this method runs is either in `_early` when the lock is taken, or
        # finds the run in `_runs`. A batch that was stopped, or is older than the oldest one, ends at once.
        number = spec.id[1]
        run = BatchRun(self.stages, spec, BatchInputs(**given), self._short, lambda: self._end(number))
        with self._lock:
            self._oldest = max(self._oldest, spec.oldest)
            late = [self._early.pop(each) for each in [*self._early] if each < self._oldest]
            early = self._early.get(number, []) if number >= self._oldest else None
            if early is not None:
                self._early.pop(number, None)
            self._runs[number] = run
        del late  # not under the lock, as in `stop`
        if early is None:
            run.stop()
        else:
            run.take(early)
        return Deferred(run.outcome, run)

    @must_finish
    def stop(self, number: int) -> None:
        """Stop a batch that has failed on another worker."""
        with self._lock:
            # The mark also stops a batch whose call has not arrived yet, and drops messages that come later.
            run = self._runs.get(number)
            early, self._early[number] = self._early.get(number), None
        del early  # not under the lock: these may hold the last reference to tensors
        if run is not None:
            run.stop()

    def take(self, message: StageMessage) -> None:
        """Pass a message to its batch, or keep it until the batch begins."""
        number = message.batch[1]
        with self._lock:
            run = self._runs.get(number)
            if run is None and number >= self._oldest:
                early = self._early.setdefault(number, [])
                if early is not None:
                    early.append(message)
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


class StageRunners:
    """The runners of all pipelines on one worker."""

    def __init__(self, agent: Agent) -> None:
        # By pipeline. The driver's references keep the runners alive; without them a pipeline that is dropped would
        # leave its stages on the workers.
        self.runners: WeakValueDictionary[str, StageRunner] = WeakValueDictionary()
        agent.on(StageMessage, self._take)
        agent.lost.append(self._on_lost)

    def _take(self, _: Identity, message: StageMessage) -> None:
        runner = self.runners.get(message.batch[0])
        if runner is not None:  # else the pipeline no longer exists
            runner.take(message)

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        # `valuerefs` copies at once: another thread may add a runner meanwhile.
        for runner in [reference() for reference in self.runners.valuerefs()]:
            if runner is not None:
                runner.lost(who, reason)


# Functions that the driver calls on the workers of the stages


@known_as("Pipeline()")
def make_runner(
    pipeline: str, modules: Mapping[int, RRef[nn.Module]], count: int, tied: Sequence[TiedWeight]
) -> RRef[StageRunner]:
    """Create a runner for the modules of this worker, by their stages, of which there are `count` in all."""
    stages = {stage: Stage(module, f"stage {stage + 1} of {count}") for stage, module in modules.items()}
    for tie in tied:
        if tie.replica in stages:
            weight = stages[tie.owner].weight(tie.name) if tie.owner in stages else None
            stages[tie.replica].tie(tie.name_there, weight)
    runner = StageRunner(stages)
    current.here().attached(StageRunners).runners[pipeline] = runner
    return RRef(runner)


@known_as("Pipeline.forward")
def run_stage(runner: RRef[StageRunner], stage: int, value: Any) -> Any:
    """Run a stage; fetch the value if it is a reference."""
    there = runner.local_value().stages[stage]
    there.begin()
    return there.run(value.to_here() if isinstance(value, RRef) else value)


runs_as(run_stage, lambda runner, stage, _: runner.local_value().stages[stage].name)


@known_as("Pipeline.state_dict")
def weight_of(runner: RRef[StageRunner], stage: int, name: str) -> Tensor:
    """Return a tied weight, on its owner."""
    return runner.local_value().stages[stage].weight(name).detach()


@known_as("Pipeline.state_dict")
def set_weight(runner: RRef[StageRunner], stage: int, name: str, value: Tensor) -> None:
    """Set a tied weight, on its replica."""
    runner.local_value().stages[stage].set_weight(name, value)
