"""A model in stages on several workers, fed with micro-batches."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from telegrad.agent.agent import DEFAULT
from telegrad.agent.compiling import not_compiled
from telegrad.agent.futures import Future
from telegrad.agent.naming import known_as, runs_as
from telegrad.autograd import backward_async
from telegrad.errors import UsageError
from telegrad.nn.checks import gradients_are_lost, hint_at_context
from telegrad.nn.losses import Loss, check_scalar, shares
from telegrad.nn.remote_module import RemoteModule, device_of, moved
from telegrad.nn.schedule import Forward, Schedule, Step
from telegrad.rpc import RRef, current, functions, remote, rpc_async, rpc_sync
from telegrad.rpc.turns import Turns

SCHEDULES = ("1f1b", "gpipe")


class Stage:
    """A stage on its worker. Micro-batches go through it one by one, as its module may keep state."""

    def __init__(self, module: RRef[nn.Module], following: RRef[Stage] | None, name: str) -> None:
        self._module = module.local_value()
        self._name = f"{name} of a Pipeline ({type(self._module).__name__})"
        self._device = device_of(self._module)
        self._following = following
        self._turns = Turns()
        self._batches: dict[str, Batch] = {}

    def _telegrad_runs(self, method: str) -> str:
        return self._name

    def run(self, value: Any) -> Any:
        with self._turns.taken():
            return self._module(self._near(value))

    def _near(self, value: Any) -> Any:
        """On the module's accelerator, if it has one: devices of workers need not lead to one another as stages do."""
        return value if self._device is None or self._device.type in ("cpu", "meta") else moved(self._device, value)

    @functions.async_execution
    def advance(self, batch: str, number: int, value: Any) -> torch.futures.Future[Tensor]:
        """Send a micro-batch on, through this stage and all that follow; what its loss is."""
        value = self.run(value)
        if self._following is not None:
            return self._following._call_async(
                "advance", DEFAULT, (batch, number, value), {}, "the next stage of a Pipeline"
            )
        found: Future[Tensor] = Future()
        found.set_result(self._batches[batch].finish(number, value))
        return found

    # The last stage

    def open(self, batch: str, targets: list[Any], loss: Loss, weights: list[float]) -> None:
        """A batch is going to come, of which these are the targets of the micro-batches."""
        self._batches[batch] = Batch(self._near(targets), loss, weights)

    def root(self, batch: str, numbers: Sequence[int]) -> Tensor:
        """Where backward begins for some micro-batches."""
        roots = self._batches[batch].roots
        return torch.stack([roots.pop(number) for number in numbers]).sum()

    def close(self, batch: str) -> None:
        """Forget a batch."""
        self._batches.pop(batch, None)


class Batch:
    """What the last stage knows of a batch."""

    def __init__(self, targets: list[Any], loss: Loss, weights: list[float]) -> None:
        self.roots: dict[int, Tensor] = {}  # losses whose backward has not begun
        self._targets = targets
        self._loss = loss
        self._weights = weights

    def finish(self, number: int, outputs: Any) -> Tensor:
        value = self._loss(outputs, self._targets[number])
        loss = self.roots[number] = check_scalar(value, self._loss) * self._weights[number]
        return loss.detach()


class Pipeline(nn.Module):
    """A model whose stages, one after the other, live on several workers.

    A stage is a `RemoteModule`, a reference to a module, or a module of this worker; it takes what the one before it
    gives. A batch is split along its first dimension into `chunks` micro-batches, so that all stages work at once.
    What passes between two stages goes straight from worker to worker; between stages on accelerators along the device
    map of the one for the other. There, what did not arrive on the device of a stage is moved to it.

    `pipeline(inputs)` gives the outputs, for a loss and a backward pass of one's own. `forward_backward` does all of a
    training step but the optimizer's, in the order of `schedule`: "1f1b", which keeps the activations of as many
    micro-batches as there are stages, or "gpipe", which keeps those of all.

    The numbers are those of the model in one piece, but for modules that look across the batch: batch normalisation
    sees one micro-batch at a time.
    """

    def __init__(
        self,
        stages: Sequence[RemoteModule | RRef[nn.Module] | nn.Module],
        chunks: int = 8,
        schedule: str = "1f1b",
    ) -> None:
        super().__init__()
        if isinstance(stages, RemoteModule | RRef) or not isinstance(chunks, int):
            raise UsageError(
                "the stages of a pipeline are a list, and chunks a number: Pipeline([first, second], chunks=8)"
            )
        if not stages or chunks < 1:
            raise UsageError("a pipeline needs at least one stage, and one chunk")
        if schedule not in SCHEDULES:
            raise UsageError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, not {schedule!r}")
        self.chunks = chunks
        self.schedule = schedule
        self.stages = nn.ModuleList(map(_as_module, stages))
        places = [(each.module_rref if isinstance(each, RemoteModule) else RRef(each)) for each in self.stages]
        self._ways: list[RRef[Stage]] = []
        for place in reversed(places):
            following = self._ways[0] if self._ways else None
            name = f"stage {len(places) - len(self._ways)} of {len(places)}"
            self._ways.insert(0, rpc_sync(place.owner(), _make_stage, (place, following, name)))

    @not_compiled
    def forward(self, inputs: Any) -> Any:
        """The outputs of the whole batch."""
        if gradients_are_lost(self.training and any(map(_trains, self.stages)), inputs):
            hint_at_context("a pipeline")
        coming = []
        for part in _split(inputs, self.chunks):
            last = self._ways[-1]
            coming.append(rpc_async(last.owner(), _run, (last, self._up_to_last(part))))
        return _joined([each.wait() for each in coming])

    def _up_to_last(self, value: Any) -> Any:
        """Send a micro-batch through all stages but the last; a reference to what comes out."""
        for stage in self._ways[:-1]:
            value = remote(stage.owner(), _run, (stage, value))
        return value

    @not_compiled
    def forward_backward(
        self, context_id: int, inputs: Any, targets: Any, loss: Loss, reduction: str | None = None
    ) -> Tensor:
        """Forward and backward for a batch; the gradients are in the context. What the loss was.

        `loss(outputs, targets)` gives a scalar; it runs on the worker of the last stage. `reduction` says whether that
        is the "mean" over the samples that it gets, or their "sum"; without it, torch's own losses are asked, and
        all others are taken for means.

        Raises:
            UsageError: inputs and targets do not fit each other; the loss is no scalar, or not what `reduction` says.
            What a stage or the loss raised, with the worker's name.
        """
        sizes = _sizes(inputs, targets, self.chunks)
        loss, weights = shares(loss, reduction, sizes, targets)
        parts, targets = _split(inputs, self.chunks), _split(targets, self.chunks)
        first, last = self._ways[0], self._ways[-1]
        batch = secrets.token_hex(8)
        schedule = Schedule(self.schedule, len(parts), len(self._ways))
        arrivals = Arrivals()
        total = torch.zeros(())
        last.rpc_sync().open(batch, targets, loss, weights)
        steps = schedule.begin()
        try:
            while not schedule.done:
                for step in steps:
                    future: Future[Any]
                    if isinstance(step, Forward):
                        args = batch, step.batch, parts[step.batch]
                        future = first._call_async("advance", DEFAULT, args, {}, "Pipeline.forward_backward")
                    else:
                        future = backward_async(context_id, last.remote().root(batch, step.batches))
                    arrivals.expect(step, future)
                step, result = arrivals.next()
                if isinstance(step, Forward):
                    total = total + result
                steps = schedule.ended(step)
        finally:
            last.rpc_async().close(batch).heed()
        return total


class Arrivals:
    """Hands out what has ended, in the order in which it does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows; `next` loads _wanted without, since only it changes that
        self._ended: deque[tuple[Step, Future[Any]]] = deque()
        self._wanted: Future[None] = Future()  # done once something has ended

    def expect(self, step: Step, future: Future[Any]) -> None:
        future.add_done_callback(lambda _: self._arrived(step, future))

    def _arrived(self, step: Step, future: Future[Any]) -> None:
        with self._lock:
            self._ended.append((step, future))
            if not self._wanted.done():
                self._wanted.set_result(None)

    def next(self) -> tuple[Step, Any]:
        """What has ended, and its value; waits for that."""
        current.agent().wait_for(self._wanted)
        with self._lock:
            step, future = self._ended.popleft()
            if not self._ended:
                self._wanted = Future()
        return step, future.wait()


def _as_module(stage: RemoteModule | RRef[nn.Module] | nn.Module) -> nn.Module:
    if isinstance(stage, RRef):
        return RemoteModule.init_from_module_rref(stage.owner_name(), stage)
    if not isinstance(stage, nn.Module):
        raise UsageError(
            "a stage is a RemoteModule, a reference to a module or a module of this worker, not "
            f"{stage!r}: write Pipeline([RemoteModule('worker1', First), Second()])"
        )
    return stage


def _trains(stage: nn.Module) -> bool:
    return stage._trains if isinstance(stage, RemoteModule) else any(each.requires_grad for each in stage.parameters())


# Parts of a batch


def _split(batch: Any, chunks: int) -> list[Any]:
    """The tensors in `batch` in parts of about the same size; what else is in it goes with each."""
    leaves, form = tree_flatten(batch)
    parts = min(chunks, max(_size(batch), 1))
    cut = [leaf.tensor_split(parts) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves]
    return [tree_unflatten(list(part), form) for part in zip(*cut, strict=True)]


def _size(batch: Any) -> int:
    """How many samples there are."""
    shapes = [tuple(leaf.shape) for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise UsageError(
            "a batch consists of tensors with the samples along their first dimension, as many in each of them; "
            f"these have the shapes {shapes}"
        )
    return shapes[0][0]


def _sizes(inputs: Any, targets: Any, chunks: int) -> list[int]:
    """How many samples there are in each micro-batch."""
    size, wanted = _size(inputs), _size(targets)
    sizes, of_targets = _cut(size, chunks), _cut(wanted, chunks)
    fit = len(sizes) == len(of_targets) and all(
        each * wanted == other * size for each, other in zip(sizes, of_targets, strict=True)
    )
    if not fit or not size:
        raise UsageError(
            f"{size} inputs and {wanted} targets cannot be cut into {chunks} micro-batches that belong together: "
            "give a target for each input, and at least one"
        )
    return sizes


def _cut(size: int, chunks: int) -> list[int]:
    parts = max(min(chunks, size), 1)
    return [size // parts + (number < size % parts) for number in range(parts)]


def _joined(parts: list[Any]) -> Any:
    leaves = [tree_flatten(part)[0] for part in parts]
    form = tree_flatten(parts[0])[1]
    return tree_unflatten(
        [torch.cat(same) if isinstance(same[0], Tensor) else same[0] for same in zip(*leaves, strict=True)], form
    )


# What runs on the workers of the stages. Where `value` is a reference, the worker fetches what it refers to.


@known_as("Pipeline()")
def _make_stage(module: RRef[nn.Module], following: RRef[Stage] | None, name: str) -> RRef[Stage]:
    return RRef(Stage(module, following, name))


@known_as("Pipeline.forward")
def _run(stage: RRef[Stage], value: Tensor) -> Any:
    return stage.local_value().run(value)


runs_as(_run, lambda stage, *_: stage.local_value()._telegrad_runs("run"))
