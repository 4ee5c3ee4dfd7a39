"""One batch at one station: it goes through the station's plan, and passes on what it makes.

Whatever comes is put into the agenda; whoever puts in what is next finds a thread for it, which goes on as long as
there is something to do.
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

from telegrad import instruments
from telegrad.agent import scene
from telegrad.agent.agent import Agent
from telegrad.agent.futures import Future
from telegrad.autograd import backward
from telegrad.autograd.api import check_root
from telegrad.autograd.record import AutogradContext
from telegrad.nn.agenda import Agenda
from telegrad.nn.backward import Backward, Inlet
from telegrad.nn.batches import Delivery, Ends, Job, Product, with_tensors, with_value
from telegrad.nn.losses import check_scalar
from telegrad.nn.schedule import (
    ADD_GRADIENT,
    BACKWARD,
    FORWARD,
    INPUT,
    LOAD_WEIGHT,
    SEND_GRADIENT,
    SEND_WEIGHT,
    WEIGHTS,
    Action,
    plan,
    with_tied,
)
from telegrad.nn.stage import Bundle, Stage, bundled
from telegrad.rpc import current
from telegrad.wire.messages import INFERENCE, NO_GRAD

SHORT = 1e-3  # seconds of one action, up to which the thread that reads does it


class Run:
    """One thread at a time is at it."""

    def __init__(
        self, agent: Agent, stages: Mapping[int, Stage], job: Job, ends: Ends, short: bool, ended: Callable[[], None]
    ) -> None:
        """Made by the thread that runs the driver's call. `short`: actions are expected not to take long."""
        self.job = job
        self.outcome: Future[Product | None] = Future()  # None: it was stopped
        self.short = short
        self._agent = agent
        self._stages = stages
        self._ends = ends
        self._ended = ended
        self._here = job.stations[next(iter(stages))]
        self._batch = f"{job.id[0]}/{job.id[1]}"
        self._conductor = current.conductor()
        self._context = self._conductor.current() if job.trains else None
        self._setting = _setting_here(self._context)
        # Of the thread that is at it:
        self._backwards: dict[tuple[int, int], tuple[Backward, int]] = {}  # and how many of the gradients go back
        self._result = Product([], [], {}, {}, [])
        self._doing = next(iter(stages.values())).name
        self._lock = threading.Lock()  # guards all below
        plans = plan(job.schedule, job.stations, job.batches, job.trains)
        if job.ties:
            plans = with_tied(plans, job.stations, job.ties, job.trains)
        self._agenda = Agenda(plans[self._here], len(job.stations))
        self._busy = False  # a thread is at it
        self._over = False

    def __repr__(self) -> str:
        state = "over" if self._over else "a thread is at it" if self._busy else f"waits for {self._agenda.awaited()}"
        return f"<Run of batch {self.job.id[1]}: {self._agenda}, {state}>"

    @property
    def _telegrad_known_as(self) -> str:
        return self._doing

    # What comes

    def take(self, deliveries: Iterable[Delivery]) -> None:
        """These have come: do what can be done."""
        with self._lock:
            for delivery in deliveries:
                self._agenda.come(delivery.need, delivery.opened())
        self._go_on()

    def _go_on(self) -> None:
        with self._lock:
            if self._busy or self._over or self._agenda.awaited() is not None:
                return
            self._busy = True
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
                    if (note := instruments.note) is not None:
                        note((instruments.STAGED, start, end, self._batch, *upcoming[0]))
                    self.short = longest < SHORT
            except BaseException as error:
                self.fail(error)

    def _next(self) -> tuple[Action, Any] | None:
        """What this thread shall do; None where it is at it no longer."""
        with self._lock:
            if not self._over and not self._agenda.done and self._agenda.awaited() is None:
                return self._agenda.begin()
            is_through = self._agenda.done and not self._over
            self._busy = is_through  # to the end
        if is_through:
            self._let_ride()
            self._end(lambda: self.outcome.set_result(self._result))
        return None

    def _do(self, action: Action, what: Any) -> None:
        stage = self._stages[action.stage]
        self._doing = stage.name
        if action.kind == FORWARD:
            given = self._ends.inputs[action.batch] if action.stage == 0 else what
            (self._train if self.job.trains else self._infer)(stage, action, given)
        elif action.kind == WEIGHTS:
            self._backwards.pop((action.stage, action.batch))[0].run_weights()
        elif action.kind in (BACKWARD, INPUT):
            self._backward(action, what)
        else:
            self._keep_tie(stage, action, what)

    # Forward

    def _infer(self, stage: Stage, action: Action, given: Bundle) -> None:
        with self._setting():
            output = stage.run(given.value(given.trained))
        if self._is_last(action):
            self._result.outputs.append(output)
        else:
            self._send_on(action, output)

    def _train(self, stage: Stage, action: Action, given: Bundle) -> None:
        targets = self._ends.targets[action.batch] if self._is_last(action) else None
        came = [*given.trained, *(targets.trained if targets is not None else ())]
        inlet = Inlet(came) if came else None
        tensors = inlet.tensors if inlet is not None else ()
        count = len(given.places)
        with self._setting():
            output = stage.run(given.value(tensors[:count]))
            if targets is not None:
                self._doing = f"the loss, after {stage.name}"
                loss = self._loss(output, stage.near(targets.value(tensors[count:])), self._ends.weights[action.batch])
        trained = [loss] if targets is not None else self._send_on(action, output)
        assert self._context is not None
        made = Backward(self._context.gradients, trained, inlet, partial(backward, self._context.id))
        self._backwards[action.stage, action.batch] = made, count

    def _loss(self, output: Any, targets: Any, weight: float) -> Tensor:
        assert self._ends.loss is not None
        loss = check_scalar(self._ends.loss(output, targets), self._ends.loss) * weight
        check_root(loss)
        self._result.losses.append(loss.detach())
        return loss

    def _is_last(self, action: Action) -> bool:
        return action.stage == len(self.job.stations) - 1

    def _send_on(self, action: Action, output: Any) -> list[Tensor]:
        """Pass on what a stage gave; the tensors whose gradients come back."""
        name, _ = self.job.workers[self.job.stations[action.stage + 1]]
        made = bundled(output, self._agent.shares_program(name))
        self._send(with_value(self.job.id, (FORWARD, action.stage + 1, action.batch), made))
        if not made.places:
            with self._lock:
                self._agenda.come((BACKWARD, action.stage, action.batch), [])
        return made.trained

    def _send(self, delivery: Delivery) -> None:
        kind, stage, _ = delivery.need
        station = self.job.stations[stage]
        if station == self._here:
            with self._lock:
                self._agenda.come(delivery.need, delivery.opened())
        else:
            name, incarnation = self.job.workers[station]
            message, tensors = delivery._replace(tensors=()), delivery.tensors
            self._agent.notify(name, message, incarnation, tensors, as_arguments=kind == FORWARD)

    # Backward

    def _backward(self, action: Action, gradients: Sequence[Tensor | None] | None) -> None:
        made, count = self._backwards[action.stage, action.batch]
        if gradients is None:  # nobody gives any to the last stage
            gradients = list(map(torch.ones_like, made.outputs))
        assert self._context is not None
        with self._context.entered():
            found = made.run(gradients, in_steps=action.kind == INPUT)
        if action.kind != INPUT:
            del self._backwards[action.stage, action.batch]
        if action.stage == 0:
            self._result.gradients[action.batch] = found[:count]
        elif count:
            self._send(with_tensors(self.job.id, (BACKWARD, action.stage - 1, action.batch), found[:count]))
        if self._is_last(action):
            self._result.of_targets[action.batch] = found[count:]

    # Weights of several stages

    def _keep_tie(self, stage: Stage, action: Action, what: Sequence[Tensor | None]) -> None:
        tie, number = self.job.ties[action.batch], action.batch
        if action.kind == SEND_WEIGHT:
            value = stage.weight(tie.name).detach()
            self._send(with_tensors(self.job.id, (LOAD_WEIGHT, tie.replica, number), [value]))
            return
        if action.kind == LOAD_WEIGHT:
            assert what[0] is not None
            stage.set_weight(tie.name_there, what[0])
            return
        assert self._context is not None
        gradients = self._context.gradients
        if action.kind == SEND_GRADIENT:
            gradient = gradients.take(stage.weight(tie.name_there))
            self._send(with_tensors(self.job.id, (ADD_GRADIENT, tie.owner, number), [gradient]))
        elif what[0] is not None and stage.weight(tie.name).requires_grad:
            gradients.add(stage.weight(tie.name), what[0], False)

    # The end

    def _let_ride(self) -> None:
        if self.job.rider and self._context is not None and not (self._over or self._context.ended):
            rode = self._conductor.let_ride(self._context, self.job.rider, self.job.request)
            if rode is not None:
                self._result.rode.append(rode)

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


def _setting_here(context: AutogradContext | None) -> Callable[[], AbstractContextManager[None]]:
    """What this thread, which runs a call, got from its caller, for those that go on with it."""
    flags = 0 if torch.is_grad_enabled() else NO_GRAD | (INFERENCE if torch.is_inference_mode_enabled() else 0)
    described, _ = scene.described()
    return partial(scene.resumed, flags, described, context)
