"""Pipelines: a model divided into stages on several workers, which process micro-batches. An extension."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, nn

from telegrad.autograd import backward
from telegrad.errors import UsageError
from telegrad.ext.calls import DEFAULT, check_timeout, folded, known_as, not_compiled, remote
from telegrad.ext.feedback import Wait, checks, hint, report_in_background
from telegrad.ext.graphs import Inside, Step, check_step, entered_id
from telegrad.ext.modules import Recoverable, RemoteModule, gradients_are_lost, hint_at_context, parse_place
from telegrad.ext.values import Restore, RRef, check_restore
from telegrad.ext.workers import WorkerInfo, current, listed
from telegrad.pipeline.driver import PipelineDriver
from telegrad.pipeline.exported import Inputs
from telegrad.pipeline.microbatches import Loss, joined, parts_of, shares, sizes_of
from telegrad.pipeline.pipeline_schedule import SCHEDULES, parse_tied
from telegrad.pipeline.stage import detach, root_of
from telegrad.pipeline.stage_runner import BatchInputs

_STAGES = "a list with a module, a RemoteModule or a reference to a module for each stage: Pipeline([first, second])"
_CHUNKS = "a number of parts of a batch, as in Pipeline([first, second], chunks=8)"
_TIED = "a list of lists of names, such as [('0.embedding.weight', '2.head.weight')]"


@folded
class Pipeline(nn.Module, Recoverable):
    """A model whose consecutive stages are on several workers.

    A batch is split along its first dimension into micro-batches, which lets all stages work at once. Values between
    stages go directly from worker to worker, and between accelerators along the sender's device map. A stage moves
    tensors that arrive on another device to its own.

    `pipeline(inputs)` returns the outputs, for a separate loss and backward pass. `forward_backward` does a training
    step except for the optimizer's step, in the order of `schedule`.

    The results are those of the undivided model, except for modules that mix samples, such as batch normalization: each
    stage sees one micro-batch at a time.

    Args:
        stages: each a `RemoteModule`, a reference to a module, or a module of this worker; its input is the output of
            the stage before it.
        chunks: the number of micro-batches per batch.
        schedule: "1f1b" keeps the activations of as many micro-batches as there are stages; "gpipe" keeps those of all;
            "interleaved" is for several stages on each worker, in turn; in "zero-bubble", idle workers compute the
            gradients of weights.
        tied: parameters that are shared, by stages and names: `[("0.embedding.weight", "2.head.weight")]`. The first
            one is trained. The others get its value before each batch, and their gradients are added to its gradient.

    Raises:
        UsageError: there is no stage, or an argument is invalid.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipeline = telegrad.nn.Pipeline.split(model, ["worker0", "worker1"], chunks=2)
        >>> with telegrad.autograd.context() as context_id:
        ...     loss = pipeline.forward_backward(context_id, torch.ones(6, 4), torch.ones(6, 2), nn.MSELoss())
        >>> loss.shape
        torch.Size([])
    """

    def __init__(
        self,
        stages: Sequence[RemoteModule | RRef[nn.Module] | nn.Module],
        chunks: int = 8,
        schedule: str = "1f1b",
        tied: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__()
        if isinstance(stages, RemoteModule | RRef):
            checks.raise_invalid("stages", _STAGES, stages)
        parts = checks.several("stages", stages, _STAGES)
        if not parts:
            raise UsageError("a pipeline needs at least one stage, and `stages` is an empty list")
        self.chunks: int = checks.count("chunks", chunks, what=_CHUNKS)
        self.schedule: str = checks.one_of("schedule", schedule, SCHEDULES)
        self.stages: nn.ModuleList = nn.ModuleList(map(_as_module, parts))
        groups = [checks.several("tied", names, _TIED) for names in checks.several("tied", tied, _TIED)]
        self._tied = [tie for names in groups for tie in parse_tied(names, len(self.stages))]
        self._driver: PipelineDriver | None = None
        self._inputs: Inputs | None = None  # of a model whose forward was recorded
        self.register_state_dict_pre_hook(Pipeline._telegrad_update_replicas)  # type: ignore[no-untyped-call]
        self._drive()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters of the stages on this worker. Log a hint if there are stages on other workers."""
        elsewhere = sorted({stage.on for stage in self.stages if isinstance(stage, RemoteModule)})
        if elsewhere:
            hint(
                "parameters elsewhere",
                "parameters() of a pipeline returns only the parameters of this worker's stages, and others are on "
                f"{listed(elsewhere)}: to train all of them, use telegrad.optim.DistributedOptimizer.for_module(...)",
            )
        return super().parameters(recurse)

    def replace(self, stage: int, module: RemoteModule | RRef[nn.Module] | nn.Module) -> None:
        """Replace the module of a stage from the next batch on, for example after a worker has died.

        Optimizers have parameters of the old module: make new ones, and load both states from a checkpoint.

        Args:
            stage: its index.
            module: a module as for `Pipeline`.

        Raises:
            UsageError: there is no such stage.
        """
        checks.count("stage", stage, 0, len(self.stages) - 1, "the number of a stage")
        made, old = _as_module(module), self.stages[stage]
        if isinstance(made, RemoteModule) and isinstance(old, RemoteModule):
            made._surplus, made._order = old._surplus, old._order
        self.stages[stage] = made
        self._driver = None

    def recover(self, timeout: float = DEFAULT) -> None:
        """Make lost stages again, once their workers are back.

        They have their original parameters: load those of a checkpoint, as `telegrad.recover` does.

        Args:
            timeout: seconds for each stage; 0 for no limit, default: the timeout in the options.

        Raises:
            CannotRestore: a lost stage was made without `restore`; use `replace`.
            OwnerLost: its worker did not come back in time.
        """
        check_timeout(timeout)
        for stage in self.stages:
            if isinstance(stage, RemoteModule):
                stage.recover(timeout)
        self._driver = None
        self._drive()  # now, since new stages contain parameters that must be tied again

    def _telegrad_update_replicas(self, *_: Any) -> None:
        """Update the replicas of tied weights, also before `state_dict`: they have the values of the last batch."""
        self._drive().send_tied_weights()

    def _drive(self) -> PipelineDriver:
        if self._driver is None:
            places = [stage.module_rref if isinstance(stage, RemoteModule) else RRef(stage) for stage in self.stages]
            self._driver = PipelineDriver(places, self.schedule, self._tied)
        return self._driver

    @classmethod
    def split(
        cls,
        model: nn.Module,
        workers: Sequence[str | WorkerInfo],
        at: Sequence[str] | None = None,
        balance: Sequence[int] | None = None,
        chunks: int = 8,
        schedule: str = "1f1b",
        *,
        example: Any = None,
        check: bool = True,
        restore: Restore = False,
    ) -> Self:
        """Create a pipeline from copies of the parts of a model, one stage per worker entry.

        Without `at` and `balance`, all stages get about the same number of parameters.

        An `nn.Sequential` is cut between its children. For any other model, `torch.export` records the forward pass
        with `example`, in training and in evaluation mode; `train` and `eval` select the recording. The stages are
        copies: they run beside the model, also on this worker. A model with one argument gets the inputs unchanged. For
        several arguments, pass a tuple, which is spread over them in order, or a dictionary by argument names.

        States, optimizers and checkpoints use the names of the model: `pipeline.load_state_dict(model.state_dict())`
        works, and the reverse.

        Args:
            model: a module of this worker.
            workers: as for a `RemoteModule`: "w1", "w1/cuda:0". A worker that is listed several times gets several
                stages.
            at: the names of the modules at which the stages begin, except the first: `["layers.4", "layers.8"]` makes
                three.
            balance: the number of children of an `nn.Sequential` in each stage.
            chunks: as for `Pipeline`.
            schedule: as for `Pipeline`.
            example: a few samples of the inputs; required unless the model is an `nn.Sequential` that is cut between
                its children.
            check: with an example, compare outputs, gradients, buffers and random numbers of the stages with those of
                the model, and outputs for a batch with those for its micro-batches. This needs memory for copies of the
                model.
            restore: make the stages recoverable, as for `RemoteModule`: this worker keeps the current parts of the
                model, and sends them again.

        Returns:
            The pipeline.

        Raises:
            UsageError: the model cannot be cut this way, the stages differ from it, or it mixes samples; the message
                suggests a remedy.
        """
        from telegrad.pipeline.split import split_model  # torch.export imports sympy: 35 MB in each process

        if not isinstance(workers, list | tuple) or isinstance(workers, WorkerInfo) or not workers:
            raise UsageError(
                '`workers` must be a list with a worker for each stage: Pipeline.split(model, ["w1", "w2"])'
            )
        check_restore(restore)
        checks.count("chunks", chunks, what=_CHUNKS)
        checks.one_of("schedule", schedule, SCHEDULES)
        places = [(worker, parse_place(worker)[0]) for worker in workers]
        checks.flag("check", check)
        found = split_model(model, len(workers), at, balance, example, check, chunks)
        stages = _sent(found.stages, places, restore)
        tied = [(f"{early}.{name}", f"{late}.{other}") for early, name, late, other in found.ties]
        pipeline = cls(stages, chunks, schedule, tied)
        pipeline.training = model.training
        pipeline._inputs = found.inputs
        # A pipeline that was split from a model uses the model's names and order in its state.
        positions = {parameter: at for at, parameter in enumerate(model.parameters())}
        order = {name: positions[own] for name, own in model.named_parameters(remove_duplicate=False)}
        for number, stage in enumerate(stages):
            stage._order = number, order
        as_whole = partial(_name_as_whole, {name: at for at, name in enumerate(model.state_dict())})
        pipeline.register_state_dict_post_hook(as_whole)  # type: ignore[no-untyped-call]
        by_stages = partial(_name_by_stages, found.parts)
        pipeline.register_load_state_dict_pre_hook(by_stages)  # type: ignore[no-untyped-call]
        return pipeline

    def _parts_of(self, inputs: Any) -> list[Any]:
        if self._inputs is None:
            return parts_of(inputs, self.chunks)
        parts = parts_of(self._inputs(inputs), self.chunks)
        for part in parts:
            self._inputs.check(part, self.training)
        return parts

    @not_compiled
    def forward(self, inputs: Any) -> Any:
        """Return the outputs of the whole batch."""
        if gradients_are_lost(self.training and any(map(_trains, self.stages)), inputs):
            hint_at_context("a pipeline")
        parts = self._parts_of(inputs)
        driver = self._drive()
        if torch.is_grad_enabled() and entered_id() is not None:
            if driver.tied:
                raise UsageError(
                    "gradients of weights that are tied across workers are only summed in forward_backward: use "
                    "it, or call the pipeline inside torch.no_grad()"
                )
            return joined([each.wait() for each in [driver.call_chain(part) for part in parts]])
        given = BatchInputs(driver.pack(0, parts))
        return joined(driver.run_batch(self.schedule, given, len(parts), False)[driver.runner_of[-1]].outputs)

    @not_compiled
    def forward_backward(
        self,
        context_id: int,
        inputs: Any,
        targets: Any,
        loss: Loss,
        reduction: str | None = None,
        *,
        step: Step | None = None,
    ) -> Tensor:
        """Run forward and backward for a batch; store the gradients in the context.

        Args:
            context_id: the id from `with context() as context_id`.
            inputs: inputs of the first stage, for the whole batch.
            targets: second argument of the loss, for the whole batch.
            loss: `loss(outputs, targets)` returns a scalar; it runs on the worker of the last stage.
            reduction: "mean" if the loss is the mean over the samples of its arguments, "sum" if it is their sum.
                Default: torch's own losses have this attribute; any other loss counts as a mean.
            step: an optimizer. Each worker steps as soon as its stages have finished, instead of in
                `optimizer.step(context_id)` after this call. If the batch fails, some workers may have stepped.

        Returns:
            The loss of the whole batch.

        Raises:
            UsageError: inputs and targets do not match; the loss is no scalar, or contradicts `reduction`.
            Exception: the error of a stage or the loss, with the worker's name.
        """
        checks.context_id(context_id, "forward_backward")
        check_step(step)
        checks.function("loss", loss, "a function of outputs and targets")
        if reduction is not None:
            checks.one_of("reduction", reduction, ("mean", "sum"))
        sizes = sizes_of(inputs, targets, self.chunks)
        loss, weights, is_unsure = shares(loss, reduction, sizes, targets)
        driver = self._drive()
        # The parts are sent detached, and their gradients come back with the results of the runners. The graph on this
        # worker runs once at the end, for all micro-batches: its parts are views of the same batch.
        own = driver.pack(0, self._parts_of(inputs))
        wanted = driver.pack(-1, parts_of(targets, self.chunks))
        packed_inputs, packed_targets = (
            [(each.body, list(map(detach, each.tensors)), each.positions) for each in packed]
            for packed in (own, wanted)
        )
        given = BatchInputs(packed_inputs, packed_targets, loss, weights, is_unsure)
        context = current.conductor().contexts.find(context_id)
        fused = step._telegrad_fused(context_id) if step is not None else None
        with context.entered():
            # If inputs or targets have a graph here, this worker gets more gradients after the batch, and a step during
            # the batch would miss them. So no worker steps then, and `fused.end` makes all of them step.
            leads_on = any(map(attrgetter("positions"), (*own, *wanted)))
            results = driver.run_batch(self.schedule, given, len(sizes), True, fused if not leads_on else None)
        context.accumulated = True
        first, last = results[driver.runner_of[0]], results[driver.runner_of[-1]]
        if last.scalars:
            hint(
                f"scalars of pipeline {driver.pipeline}",
                f"the output{last.scalars[0]} of the last stage is one number for each micro-batch, not for the batch, "
                "and the loss gets that of its micro-batch. If it is not a mean over the samples, such as an auxiliary "
                "loss that balances experts, the loss of the batch differs from that of the undivided model. To have "
                "that of the batch, return a value for each sample, or use chunks=1",
            )
        got = [
            (tensor, gradient)
            for packed, gradients in (((own, first.gradients), (wanted, last.of_targets)) if leads_on else ())
            for number, each in enumerate(packed)
            for tensor, gradient in zip(each.differentiable, gradients[number], strict=True)
            if gradient is not None
        ]
        if got:  # one pass, since inputs and targets may share parts of their graphs
            backward(context_id, root_of([tensor for tensor, _ in got], [gradient for _, gradient in got]))
        if fused is not None:
            outcomes = zip(driver.workers, results, strict=True)
            fused.end({name: stepped for (name, _), result in outcomes for stepped in result.stepped})
        return torch.stack(last.losses).sum()


def _sent(
    parts: Sequence[nn.Module], places: Sequence[tuple[str | WorkerInfo, str | int]], restore: Restore
) -> list[RemoteModule]:
    stages: list[RemoteModule] = []
    owners = [f"rank {owner}" if isinstance(owner, int) else owner for _, owner in places]

    def text() -> str:
        return (
            f"Pipeline.split: {len(stages)} of {len(parts)} stages are on their workers; "
            f"missing on {listed([repr(owner) for owner in dict.fromkeys(missing())])}"
        )

    def missing() -> list[str]:
        return owners[len(stages) :]

    with report_in_background(Wait("Pipeline.split", text, missing)):
        with Inside(None):  # in a context, the parameters would not arrive as leaves
            made = [remote(on, _arrived, (part,), restore=restore) for (_, on), part in zip(places, parts, strict=True)]
        for number, ((place, _), each) in enumerate(zip(places, made, strict=True)):
            stage = RemoteModule.init_from_module_rref(place, each)
            stage._surplus = f"stages.{number}"
            stages.append(stage)
    return stages


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


def _name_as_whole(order: Mapping[str, int], _: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    """Rename stages.1.layers.4.weight to layers.4.weight; restore the model's order."""
    start = f"{prefix}stages."
    for names in (state, state._metadata):
        found = {name: names.pop(name) for name in list(names) if name.startswith(start)}
        own = {name.removeprefix(start).partition(".")[2]: value for name, value in found.items()}
        names.update({prefix + name: own[name] for name in sorted(own, key=lambda name: order.get(name, 0)) if name})


def _name_by_stages(parts: Sequence[Sequence[str]], _: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    """Rename in reverse. A value that several stages use is copied to each of them."""
    found = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    for name, value in found.items():
        holders = [
            number for number, part in enumerate(parts) if any(f"{name}.".startswith(f"{each}.") for each in part)
        ]
        starts = [f"stages.{number}." for number in holders] or [""]
        state.update({f"{prefix}{start}{name}": value for start in starts})
