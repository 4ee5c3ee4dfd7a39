"""A model in stages on several workers, fed with micro-batches."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from telegrad.agent.agent import DEFAULT
from telegrad.agent.compiling import not_compiled
from telegrad.agent.futures import Future
from telegrad.agent.naming import known_as
from telegrad.autograd import backward
from telegrad.autograd.record import entered_id
from telegrad.errors import UsageError
from telegrad.nn.backward import root_of
from telegrad.nn.checks import gradients_are_lost, hint_at_context
from telegrad.nn.cutting import STAGES, cut, keep_names
from telegrad.nn.losses import Loss, shares
from telegrad.nn.place import parse_place
from telegrad.nn.remote_module import RemoteModule
from telegrad.nn.schedule import INTERLEAVED, SCHEDULES, takes_turns
from telegrad.nn.stage import Parcel, parcel
from telegrad.nn.station import Ends, Job, Outcome, make_station, run_stage
from telegrad.rpc import RRef, WorkerInfo, current, remote, rpc_async
from telegrad.rpc.together import together

if TYPE_CHECKING:
    from typing_extensions import Self


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
        self._batches = Batches()
        self._connect()

    def _connect(self) -> None:
        """Make the stations, one on each worker that has stages."""
        owners = [_place_of(stage).owner() for stage in self.stages]
        workers = list(dict.fromkeys(owner.name for owner in owners))
        self._stations_of = tuple(workers.index(owner.name) for owner in owners)
        if self.schedule == INTERLEAVED and not takes_turns(self._stations_of):
            raise UsageError(
                "an interleaved schedule wants the stages to go around all workers in turn, each with as many: "
                f"w1, w2, w1, w2; these are on {', '.join(owner.name for owner in owners)}"
            )
        self._token = secrets.token_hex(8)
        modules: dict[str, dict[int, RRef[nn.Module]]] = {worker: {} for worker in workers}
        for number, (stage, owner) in enumerate(zip(self.stages, owners, strict=True)):
            modules[owner.name][number] = _place_of(stage)
        made = together(modules, lambda worker, own: rpc_async(worker, make_station, (self._token, own, len(owners))))
        self._stations = [made[worker] for worker in workers]
        self._workers = tuple((name, current.agent().identify(name).incarnation) for name in workers)

    @classmethod
    def split(
        cls,
        model: nn.Module,
        workers: Sequence[str | WorkerInfo],
        at: Sequence[str] | None = None,
        balance: Sequence[int] | None = None,
        chunks: int = 8,
        schedule: str = "1f1b",
    ) -> Self:
        """A pipeline of copies of the parts of `model`, one stage on each of `workers`.

        A worker is written as for a `RemoteModule`: "w1", "w1/cuda:0". Who is named several times gets several stages.
        `at` names the modules with which the stages begin, but for the first: at=["layers.4", "layers.8"] makes three
        stages. `balance` says how many of the children of an `nn.Sequential` each stage gets. Without either, stages
        get about as many parameters each.

        Only the modules inside of which a stage begins are taken apart. They may be `nn.Sequential`s; of any others
        the forward pass is recorded as it runs now, without choices that depend on tensors: training mode and the
        arguments that have defaults stay as they are. What remains whole, such as `nn.Dropout`, follows `train` and
        `eval`. A model with one argument takes the inputs as they are; to others they are given as a tuple, or as
        a dictionary by the arguments' names.

        Its state, optimizers and checkpoints have the names of the model:
        `pipeline.load_state_dict(model.state_dict())`, and the other way.

        Raises:
            UsageError: the model cannot be cut so; it says why, and what can be done.
        """
        if not isinstance(workers, list | tuple) or isinstance(workers, WorkerInfo) or not workers:
            raise UsageError('`workers` is a list, with a worker for each stage: Pipeline.split(model, ["w1", "w2"])')
        places = [(worker, parse_place(worker)[0]) for worker in workers]
        found = cut(model, len(workers), at, balance)
        if found.ties:
            early, name, late, other = found.ties[0]
            raise UsageError(
                f"stage {early + 1} and stage {late + 1} share a parameter ({name!r}, {other!r}), and so could only be "
                "trained as one: choose `at` such that one stage has all modules that share it"
            )
        made = [remote(on, _arrived, (stage,)) for (_, on), stage in zip(places, found.stages, strict=True)]
        stages = [
            RemoteModule.init_from_module_rref(place, each) for (place, _), each in zip(places, made, strict=True)
        ]
        for number, stage in enumerate(stages):
            stage._surplus = f"{STAGES}.{number}"
        pipeline = cls(stages, chunks, schedule)
        keep_names(pipeline, found.parts)
        return pipeline

    @not_compiled
    def forward(self, inputs: Any) -> Any:
        """The outputs of the whole batch."""
        if gradients_are_lost(self.training and any(map(_trains, self.stages)), inputs):
            hint_at_context("a pipeline")
        parts = _split(inputs, self.chunks)
        if not torch.is_grad_enabled() or entered_id() is None:
            outcomes = self._play(Ends([self._parcel(0, part) for part in parts]), len(parts), trains=False)
            return _joined(outcomes[self._stations_of[-1]].outputs)
        return _joined([each.wait() for each in map(self._through, parts)])

    def _through(self, value: Any) -> Future[Any]:
        """Send a micro-batch through all stages, so that what comes out has a history that crosses workers."""
        *before, last = enumerate(self._stations[station] for station in self._stations_of)
        for stage, station in before:
            value = remote(station.owner(), run_stage, (station, stage, value))
        return rpc_async(last[1].owner(), run_stage, (last[1], last[0], value))

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
        inputs_of, targets_of = [self._parcel(0, part) for part in parts], [self._parcel(-1, part) for part in targets]
        ends = Ends([each.detached() for each in inputs_of], [each.detached() for each in targets_of], loss, weights)
        context = current.conductor().contexts.find(context_id)
        with context.entered():
            outcomes = self._play(ends, len(parts), trains=True)
        first, last = outcomes[self._stations_of[0]], outcomes[self._stations_of[-1]]
        _lead_on(context_id, inputs_of, first.gradients)
        _lead_on(context_id, targets_of, last.of_targets)
        return torch.stack(last.losses).sum()

    def _parcel(self, stage: int, value: Any) -> Parcel:
        worker, _ = self._workers[self._stations_of[stage]]
        return parcel(value, current.agent().shares_program(worker))

    def _play(self, ends: Ends, batches: int, trains: bool) -> list[Outcome]:
        """Have all stations go through their plans, until all are through or one has failed."""
        agent = current.agent()
        with self._batches.begun() as (number, oldest):
            job = Job((self._token, number), oldest, self.schedule, self._stations_of, self._workers, batches, trains)
            limit = agent.timeout * batches * (1 + trains)
            calls: list[Future[Any]] = []
            errors: list[BaseException] = []

            def check(future: torch.futures.Future[Any]) -> None:
                try:
                    future.wait()
                except Exception as error:
                    errors.append(error)
                    if len(errors) == 1:
                        self._stop(number)

            for at, station in enumerate(self._stations):
                inputs = ends.inputs if at == self._stations_of[0] else ()
                own = ends._replace(inputs=inputs) if at == self._stations_of[-1] else Ends(inputs)
                asked = "Pipeline.forward_backward" if trains else "Pipeline.forward"
                calls.append(station._call_async("run", limit, (job, own), {}, asked))
                calls[-1].add_done_callback(check)
            senders = [name for name, _ in self._workers if name != agent.name]
            for future in calls:
                if not future.done():
                    agent.wait_for(future, senders=senders)
            if errors:
                raise errors[0]
            return [future.wait() for future in calls]

    def _stop(self, number: int) -> None:
        """A station has failed: the others need not go on."""
        for station in self._stations:
            station._call_async("stop", DEFAULT, (number,), {}, "Pipeline").heed()


class Batches:
    """The numbers of the batches that are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._last = 0
        self._under_way: list[int] = []

    @contextlib.contextmanager
    def begun(self) -> Iterator[tuple[int, int]]:
        """Inside, a batch is under way; its number, and that of the oldest one."""
        with self._lock:
            self._last += 1
            number = self._last
            self._under_way.append(number)
            oldest = self._under_way[0]
        try:
            yield number, oldest
        finally:
            with self._lock:
                self._under_way.remove(number)


def _lead_on(context_id: int, parcels: Sequence[Parcel], gradients: dict[int, Sequence[Tensor | None]]) -> None:
    """Run backward on this worker, from what it has given to the pipeline."""
    got = [
        (tensor, gradient)
        for number, parcel in enumerate(parcels)
        for tensor, gradient in zip(parcel.trained, gradients[number], strict=True)
        if gradient is not None
    ]
    if got:
        backward(context_id, root_of([tensor for tensor, _ in got], [gradient for _, gradient in got]))


def _place_of(stage: nn.Module) -> RRef[nn.Module]:
    return stage.module_rref if isinstance(stage, RemoteModule) else RRef(stage)


def _as_module(stage: RemoteModule | RRef[nn.Module] | nn.Module) -> nn.Module:
    if isinstance(stage, RRef):
        return RemoteModule.init_from_module_rref(stage.owner_name(), stage)
    if not isinstance(stage, nn.Module):
        raise UsageError(
            "a stage is a RemoteModule, a reference to a module or a module of this worker, not "
            f"{stage!r}: write Pipeline([RemoteModule('worker1', First), Second()])"
        )
    return stage


@known_as("Pipeline.split")
def _arrived(stage: nn.Module) -> nn.Module:
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
