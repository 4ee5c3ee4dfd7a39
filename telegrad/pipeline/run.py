"""One batch at one station: run the actions of the station's plan, and send the results to other stations.

Inputs of actions are stored when they arrive. When the input of the next action arrives, a thread runs that action, and
further ones while the next one has its input.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from telegrad.autograd import backward
from telegrad.ext.calls import Agent, Future, call_context
from telegrad.ext.events import events
from telegrad.ext.graphs import AutogradContext, check_root
from telegrad.ext.values import INFERENCE, NO_GRAD
from telegrad.ext.workers import current
from telegrad.pipeline import pipeline_schedule as schedule
from telegrad.pipeline.batches import BatchInputs, BatchResult, BatchSpec, StageMessage
from telegrad.pipeline.microbatches import check_scalar, check_sum
from telegrad.pipeline.pipeline_schedule import Action, InputKey, input_of, plan, with_tied
from telegrad.pipeline.stage import PackedValue, Stage, pack_value
from telegrad.pipeline.stage_backward import Backward, StageInput

SHORT = 1e-3  # seconds of one action up to which the reader thread runs it


class BatchRun:
    """The run of one batch at one station. One thread at a time runs its actions."""

    def __init__(
        self,
        agent: Agent,
        stages: Mapping[int, Stage],
        spec: BatchSpec,
        given: BatchInputs,
        short: bool,
        ended: Callable[[], None],
    ) -> None:
        """Must be created by the thread that runs the driver's call. `short`: the actions are expected to be short."""
        self.spec = spec
        self.outcome: Future[BatchResult | None] = Future()  # None: the batch was stopped
        self.short = short
        self._agent = agent
        self._stages = stages
        self._given = given
        self._ended = ended
        self._here = spec.stations[next(iter(stages))]
        self._last = len(spec.stations) - 1  # the last stage
        self._conductor = current.conductor()
        self._context = self._conductor.current() if spec.trains else None
        self._setting = _setting_here(self._context)
        # Used only by the thread that runs the actions:
        self._backwards: dict[tuple[int, int], tuple[Backward, int]] = {}  # and the number of gradients to send back
        self._result = BatchResult([], [], {}, {}, [])
        self._outputs: list[Any] = []  # of the micro-batches, with their targets, if the loss must be checked
        self._targets: list[Any] = []
        self._doing = next(iter(stages.values())).name
        self._lock = threading.Lock()  # guards all fields below
        plans = plan(spec.schedule, spec.stations, spec.batches, spec.trains)
        if spec.tied:
            plans = with_tied(plans, spec.stations, spec.tied, spec.trains)
        self._plan = plans[self._here]
        self._done = 0  # number of actions that have begun
        self._arrived: dict[InputKey, Any] = {}
        self._busy = False  # a thread runs the actions
        self._over = False

    def __repr__(self) -> str:
        following = self._plan[self._done : self._done + 1]
        state = "over" if self._over else "working" if self._busy else f"waits for the input of {following}"
        return f"<BatchRun {self.spec.id[1]}: {self._done} of {len(self._plan)} actions have begun, {state}>"

    @property
    def _telegrad_known_as(self) -> str:
        return self._doing

    # Inputs of actions

    def take(self, messages: Iterable[StageMessage]) -> None:
        """Store inputs, and start the actions that can begin."""
        with self._lock:
            for message in messages:
                self._arrived[message.key] = message.opened()
        self._go_on()

    def _go_on(self) -> None:
        with self._lock:
            if self._busy or self._over or not self._is_ready():
                return
            self._busy = True
        self._agent.run(self._work, None, self.short)

    def _is_ready(self) -> bool:
        """Return True if the next action has its input. The caller holds the lock."""
        key = input_of(self._plan[self._done], self._last)
        return key is None or key in self._arrived

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
            if self._done < len(self._plan):
                if not self._is_ready():
                    self._busy = False
                    return None
                action = self._plan[self._done]
                self._done += 1
                key = input_of(action, self._last)
                return action, self._arrived.pop(key) if key is not None else None
        self._let_ride()
        self._end(lambda: self.outcome.set_result(self._result))
        return None

    def _do(self, action: Action, given: Any) -> None:
        stage = self._stages[action.stage]
        self._doing = stage.name
        if action.kind == schedule.FORWARD:
            packed = self._given.inputs[action.batch] if action.stage == 0 else given
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
        if self._is_last(action):
            self._result.outputs.append(output)
        else:
            self._send_on(action, output)

    def _train(self, stage: Stage, action: Action, given: PackedValue) -> None:
        targets = self._given.targets[action.batch] if self._is_last(action) else None
        came = [*given.differentiable, *(targets.differentiable if targets is not None else ())]
        inlet = StageInput(came) if came else None
        tensors = inlet.tensors if inlet is not None else ()
        count = len(given.positions)
        with self._setting():
            output = stage.run(given.value(tensors[:count]))
            if targets is not None:
                self._doing = f"the loss, after {stage.name}"
                wanted = stage.to_own_device(targets.value(tensors[count:]))
                loss = self._loss(output, wanted, self._given.weights[action.batch])
        trained = [loss] if targets is not None else self._send_on(action, output)
        assert self._context is not None
        made = Backward(self._context.gradients, trained, inlet, partial(backward, self._context.id))
        self._backwards[action.stage, action.batch] = made, count

    def _loss(self, output: Any, targets: Any, weight: float) -> Tensor:
        assert self._given.loss is not None
        loss = check_scalar(self._given.loss(output, targets), self._given.loss) * weight
        check_root(loss)
        losses = self._result.losses
        losses.append(loss.detach())
        if self._given.is_unsure:
            for values, value in ((self._outputs, output), (self._targets, targets)):
                values.append(tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value))
            if len(losses) == self.spec.batches:  # before the last backward pass, so no worker has stepped
                check_sum(self._given.loss, self._outputs, self._targets, losses)
        return loss

    def _is_last(self, action: Action) -> bool:
        return action.stage == self._last

    def _send_on(self, action: Action, output: Any) -> list[Tensor]:
        """Send an output to the next stage; return the tensors whose gradients come back."""
        name, _ = self.spec.workers[self.spec.stations[action.stage + 1]]
        made = pack_value(output, self._agent.shares_program(name))
        body, tensors, positions = made.detached()
        self._send((schedule.FORWARD, action.stage + 1, action.batch), tensors, positions, body)
        if not made.positions:
            with self._lock:
                self._arrived[schedule.BACKWARD, action.stage, action.batch] = []
        return made.differentiable

    def _send_tensors(self, key: InputKey, given: Sequence[Tensor | None]) -> None:
        self._send(key, [each for each in given if each is not None], [each is not None for each in given])

    def _send(self, key: InputKey, tensors: Sequence[Tensor], positions: list[Any], body: bytes = b"") -> None:
        kind, stage, _ = key
        station = self.spec.stations[stage]
        message = StageMessage(self.spec.id, key, body, positions)
        if station == self._here:
            with self._lock:
                self._arrived[key] = message._replace(tensors=tensors).opened()
        else:
            name, incarnation = self.spec.workers[station]
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
        if self._is_last(action):
            self._result.of_targets[action.batch] = found[count:]

    # Weights of several stages

    def _keep_tied(self, stage: Stage, action: Action, given: Sequence[Tensor | None]) -> None:
        tie, number = self.spec.tied[action.batch], action.batch
        if action.kind == schedule.SEND_WEIGHT:
            value = stage.weight(tie.name).detach()
            self._send_tensors((schedule.LOAD_WEIGHT, tie.replica, number), [value])
            return
        if action.kind == schedule.LOAD_WEIGHT:
            assert given[0] is not None
            stage.set_weight(tie.name_there, given[0])
            return
        assert self._context is not None
        gradients = self._context.gradients
        if action.kind == schedule.SEND_GRADIENT:
            gradient = gradients.take(stage.weight(tie.name_there))
            self._send_tensors((schedule.ADD_GRADIENT, tie.owner, number), [gradient])
        elif given[0] is not None and stage.weight(tie.name).requires_grad:
            gradients.add(stage.weight(tie.name), given[0], False)

    # The end

    def _let_ride(self) -> None:
        if self.spec.rider and self._context is not None and not (self._over or self._context.ended):
            rode = self._conductor.let_ride(self._context, self.spec.rider, self.spec.request)
            if rode is not None:
                self._result.rode.append(rode)

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
        self._ended()
        tell()


def _setting_here(context: AutogradContext | None) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that restores the modes and the context of this call on other threads."""
    flags = 0 if torch.is_grad_enabled() else NO_GRAD | (INFERENCE if torch.is_inference_mode_enabled() else 0)
    described, _ = call_context.described()
    return partial(call_context.resumed, flags, described, context)
