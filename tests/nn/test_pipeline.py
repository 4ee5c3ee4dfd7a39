"""Pipelines compute what the whole model computes."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss

import telegrad.autograd as autograd
from telegrad.errors import PeerError, TelegradWarning, UsageError
from telegrad.nn import Pipeline, RemoteModule
from telegrad.pipeline.microbatches import check_sum
from telegrad.pipeline.pipeline_schedule import SCHEDULES
from telegrad.rpc import RRef, remote, rpc_sync
from tests.cluster import agents_here
from tests.nn.training import backward, filled, train_both

pytestmark = pytest.mark.usefixtures("here")

SIZES = [(5, 7), (7, 7), (7, 3)]


def make_stage(number: int) -> nn.Sequential:
    return nn.Sequential(filled(nn.Linear(*SIZES[number]), number), nn.Tanh())


def whole() -> nn.Sequential:
    return nn.Sequential(*map(make_stage, range(3)))


def spread(**options: Any) -> Pipeline:
    """Make a pipeline of three stages: two on other workers, in different forms, and a local one."""
    stages: list[Any] = [RemoteModule("w1", make_stage, (0,)), remote("w2", make_stage, (1,)), make_stage(2)]
    return Pipeline(stages, **options)


def batch(size: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 5, dtype=torch.float64), torch.randn(size, 3, dtype=torch.float64)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunks", [1, 4, 40])
def test_training_gives_the_numbers_of_the_whole_model(schedule: str, chunks: int) -> None:
    pipeline, model = spread(chunks=chunks, schedule=schedule), whole()
    train_both(pipeline, model, torch.optim.SGD, (batch() for _ in range(4)), lr=0.1, momentum=0.9)
    for one, other in zip(pipeline.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9)


def test_outputs_with_a_custom_loss() -> None:
    pipeline, model = spread(), whole()
    inputs = batch()[0].requires_grad_()
    wanted = model(inputs)
    with autograd.context() as context:
        outputs = pipeline(inputs)
        assert torch.allclose(outputs, wanted)
        autograd.backward(context, outputs.square().sum())
        found = autograd.get_gradients(context)[inputs]
    assert torch.allclose(found, torch.autograd.grad(wanted.square().sum(), inputs)[0])


class Several(nn.Module):
    def forward(self, value: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return value["a"] + value["b"], value["factor"]


class Product(nn.Module):
    def forward(self, value: tuple[torch.Tensor, int]) -> torch.Tensor:
        return value[0] * value[1]


def test_values_between_stages_may_be_nested() -> None:
    pipeline = Pipeline([RemoteModule("w1", Several), RemoteModule("w2", Product)], chunks=2)
    ones = torch.ones(4, 2)
    assert torch.equal(pipeline({"a": ones, "b": ones, "factor": 3}), ones * 6)


class Exclusive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.most = 0
        self.order: list[float] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.inside += 1
        self.most = max(self.most, self.inside)
        rpc_sync("w2", torch.add, (value, 1))  # lets the thread run other tasks
        self.order.append(value[0].item())
        self.inside -= 1
        return value


def seen(module: RRef[Exclusive]) -> tuple[int, list[float]]:
    return module.local_value().most, module.local_value().order


def test_micro_batches_run_in_a_stage_one_at_a_time() -> None:
    stage = RemoteModule("w1", Exclusive)
    inputs = torch.arange(40.0)
    assert torch.equal(Pipeline([stage], chunks=20)(inputs), inputs)
    most, order = rpc_sync("w1", seen, (stage.module_rref,))
    assert most == 1
    assert sorted(order) == [float(each) for each in range(0, 40, 2)]


def fails(outputs: torch.Tensor, targets: torch.Tensor) -> NoReturn:
    raise ArithmeticError("no loss today")


def test_an_error_names_its_worker_and_the_next_step_works() -> None:
    pipeline = Pipeline([make_stage(0), RemoteModule("w1", make_stage, (1,)), RemoteModule("w2", make_stage, (2,))])
    inputs, targets = batch()
    with pytest.raises(ArithmeticError, match=r"no loss today[\s\S]*On worker 'w2'"):
        backward(pipeline, inputs, targets, fails)
    backward(pipeline, inputs, targets, mse_loss)


def classes(size: int) -> torch.Tensor:
    return torch.randint(0, 3, (size,))


def some_ignored(size: int) -> torch.Tensor:
    found = classes(size)
    found[: size // 2] = -100
    return found


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
REDUCTIONS: dict[str, tuple[Callable[..., torch.Tensor], str | None, Callable[[int], torch.Tensor]]] = {
    "a mean": (nn.CrossEntropyLoss(), None, classes),
    "a sum": (nn.CrossEntropyLoss(reduction="sum"), None, classes),
    "a sum, said twice": (nn.CrossEntropyLoss(reduction="sum"), "sum", classes),
    "a sum that is a function": (partial(cross_entropy, reduction="sum"), None, classes),
    "a sum of one's own": (lambda found, wanted: (found - wanted).square().sum(), "sum", lambda size: batch(size)[1]),
    "a mean of the batch": (nn.KLDivLoss(reduction="batchmean"), None, lambda size: batch(size)[1].softmax(1)),
    "a weighted mean": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), None, classes),
    "a weighted mean by a function": (partial(cross_entropy, weight=CLASS_WEIGHTS), None, classes),
    "a mean of what is not ignored": (cross_entropy, None, some_ignored),
    "a smoothed, weighted mean of what is not ignored": (
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1),
        None,
        some_ignored,
    ),
}


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("what", REDUCTIONS)
def test_mean_and_sum_losses_give_the_numbers_of_the_whole_model(what: str, chunks: int) -> None:
    loss, reduction, make_targets = REDUCTIONS[what]
    last = make_stage(2)
    pipeline, model = Pipeline([RemoteModule("w1", make_stage, (0,)), make_stage(1), last], chunks=chunks), whole()
    inputs, targets = batch(10)[0], make_targets(10)  # micro-batches of three and of two samples
    wanted = loss(model(inputs), targets)
    wanted.backward()
    with autograd.context() as context:
        found = pipeline.forward_backward(context, inputs, targets, loss, reduction)
        gradients = autograd.get_gradients(context)
        for mine, theirs in zip(last.parameters(), model[2].parameters(), strict=True):
            assert theirs.grad is not None
            assert torch.allclose(gradients[mine], theirs.grad, rtol=1e-9)
    assert torch.allclose(found.double(), wanted.detach(), rtol=1e-6)


REFUSED: dict[str, tuple[Any, str | None, str]] = {
    "an unknown reduction": (mse_loss, "max", "one of 'mean', 'sum', not 'max'"),
    "a value": (torch.zeros(()), None, "loss must be a function of outputs and targets"),
    "no scalar": (partial(mse_loss, reduction="none"), None, "gives a loss for each sample"),
    "no scalar, and a function": (lambda outputs, targets: outputs - targets, None, r"shape \(2, 3\)\. End it"),
    "no tensor": (lambda outputs, targets: mse_loss(outputs, targets).item(), None, "returned float"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unusable_losses_are_refused(what: str) -> None:
    loss, reduction, said = REFUSED[what]
    inputs, targets = batch(8)
    with pytest.raises(UsageError, match=said):
        backward(spread(chunks=4), inputs, targets, loss, reduction)


class Scaled(nn.Module):
    """A loss of which only the gradients at its parameter are not the mean over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, _: object) -> torch.Tensor:
        return outputs.mean() + outputs.detach().abs().max() * (self.scale - self.scale.detach())


class OwnCrossEntropy(nn.CrossEntropyLoss):
    """A loss whose code the pipeline does not know."""


@pytest.mark.parametrize(
    "loss",
    [
        OwnCrossEntropy(),
        lambda outputs, targets: cross_entropy(outputs, targets),
        lambda outputs, _: ((outputs - 1) ** 2).sum(),
        lambda outputs, _: (outputs**2).mean().sqrt(),
        lambda outputs, _: outputs.flatten().logsumexp(0),
        partial(cross_entropy, size_average=False),
        lambda outputs, _: (outputs**2).mean() / (outputs**2).mean().detach(),  # only its gradients differ
        Scaled(),
        lambda outputs, _: outputs.mean() + (math.nan if len(outputs) == 8 else 0),
    ],
)
def test_a_loss_that_is_no_mean_over_samples_needs_a_reduction(loss: Any) -> None:
    pipeline, inputs = spread(chunks=4), batch(8)[0]
    targets = torch.tensor([-100, -100, -100, 1, 2, 0, 1, 2])
    with pytest.raises(UsageError, match="not the mean over their samples"):
        backward(pipeline, inputs, targets, loss)
    backward(pipeline, inputs, targets, loss, "mean")


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, _: (outputs - outputs.detach()).mean(),  # 0, with gradients
        lambda outputs, _: outputs.softmax(1).sum(1).mean(),  # whose gradients are 0
        lambda outputs, _: outputs.detach().mean() + 0 * outputs.mean(),
        lambda outputs, _: (outputs * 1).mul_(2).bfloat16().mean(),
    ],
)
def test_a_mean_over_samples_needs_no_reduction(loss: Any) -> None:
    inputs, targets = batch(7)
    backward(spread(chunks=3), inputs, targets, loss)


def test_an_output_of_each_micro_batch_causes_one_warning() -> None:
    pipeline, (inputs, targets) = Pipeline([whole(), WithAux()], chunks=4), batch(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            backward(pipeline, inputs, targets, lambda outputs, to: mse_loss(outputs[0], to))
    assert [str(each.message)[:52] for each in caught] == ["the output[1] of the last stage is one number for ea"]


class WithAux(nn.Module):
    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return value, value.mean(0).square().sum()


def test_a_random_loss_is_said_to_be_random() -> None:
    pipeline, (inputs, targets), loss = spread(chunks=4), batch(8), lambda outputs, to: mse_loss(dropout(outputs), to)
    with pytest.raises(UsageError, match=r"is random, as with dropout: .*reduction='mean'"):
        backward(pipeline, inputs, targets, loss)
    backward(pipeline, inputs, targets, loss, "mean")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_of_samples_in_losses_of_torch_are_refused(reduction: str) -> None:
    pipeline, inputs = spread(chunks=4), batch(4)[0]
    targets = torch.ones(4, 3, dtype=inputs.dtype)
    weight = torch.tensor([[1.0], [9], [0], [3]])
    function = partial(nn.functional.multilabel_soft_margin_loss, weight=weight, reduction=reduction)
    for loss in (function, nn.MultiLabelSoftMarginLoss(weight, reduction=reduction)):
        with pytest.raises(UsageError, match="but its micro-batches give"):
            backward(pipeline, inputs, targets, loss)
        with pytest.raises(RuntimeError, match=r"(?s)must match.* a part of the targets"):
            backward(spread(chunks=2), inputs, targets, loss)
    with autograd.context() as context:
        of_classes = nn.MultiLabelSoftMarginLoss(weight[:3].t(), reduction=reduction)
        pipeline.forward_backward(context, inputs, targets, of_classes)


def test_a_loss_of_frozen_stages_may_have_parameters_that_are_not_known() -> None:
    scale, batches = nn.Parameter(torch.ones(())), [torch.ones(2), torch.ones(2)]
    half = torch.tensor(0.5)
    check_sum(lambda outputs, _: (outputs * scale).mean(), batches, batches, [half, half], [0.5, 0.5])


def test_the_id_of_the_context_is_the_first_argument() -> None:
    inputs, targets = batch(8)
    with pytest.raises(UsageError, match=r"takes the id of a context \(context_id\) first, not Tensor"):
        spread().forward_backward(inputs, targets, mse_loss, 1)  # type: ignore[arg-type]


def test_batches_of_other_layouts_are_refused_before_anything_is_sent() -> None:
    inputs, targets = batch(8)
    for other in (inputs.to_sparse(), inputs.to_sparse_csr(), torch.nested.nested_tensor([inputs[:3], inputs[3:]])):
        for given, wanted in ((other, targets), (inputs, {"targets": other})):
            with pytest.raises(ValueError, match="cannot be split into micro-batches: give dense"):
                spread().forward_backward(1, given, wanted, mse_loss)
        with pytest.raises(ValueError, match="cannot be split"), torch.no_grad():
            spread()((inputs, other))


def test_a_pipeline_of_meta_tensors_computes_shapes() -> None:
    inputs = torch.ones(8, 4, device="meta")
    pipeline = Pipeline([nn.Linear(4, 2, device="meta"), remote("w1", partial(nn.Linear, 2, 3, device="meta"))])
    with autograd.context() as context:
        assert pipeline.forward_backward(context, inputs, torch.ones(8, 3, device="meta"), nn.MSELoss()).is_meta
        assert pipeline(inputs).shape == (8, 3)


def test_inputs_and_targets_must_have_equal_lengths() -> None:
    pipeline, (inputs, targets) = spread(chunks=4), batch(8)
    for some, others in ((inputs, targets[:6]), (inputs, targets[:3]), (inputs[:0], targets[:0])):
        with pytest.raises(UsageError, match="give a target for each input"):
            backward(pipeline, some, others, mse_loss)


def test_several_targets_for_each_input_are_split_evenly() -> None:
    pipeline, inputs = spread(chunks=4), batch(8)[0]
    ones = torch.ones(24, dtype=inputs.dtype)
    with autograd.context() as context:
        found = pipeline.forward_backward(context, inputs, ones, lambda out, to: mse_loss(out.flatten(), to))
    assert torch.allclose(found, mse_loss(whole()(inputs).flatten(), ones))


def test_a_worker_that_dies_ends_the_step() -> None:
    with agents_here(3) as workers:
        pipeline = Pipeline([RemoteModule("w1", make_stage, (0,)), RemoteModule("w2", make_stage, (1,)), make_stage(2)])
        inputs, targets = batch()
        workers[1].agent.close()
        with pytest.raises(PeerError, match="w1"):
            backward(pipeline, inputs, targets, mse_loss)


def test_wrong_stages_and_inputs() -> None:
    with pytest.raises(UsageError, match="samples along their first dimension"):
        Pipeline([make_stage(0)])((torch.ones(3, 5), torch.ones(4, 5)))
    with pytest.raises(UsageError, match=r"chunks must be .*Pipeline\(\[first, second\], chunks=8\)"):
        Pipeline(make_stage(0), make_stage(1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="stages must be a list"):
        Pipeline(RemoteModule("w1", make_stage, (0,)))  # type: ignore[arg-type]


def test_the_text_of_a_pipeline_shows_its_stages() -> None:
    assert "RemoteModule(Sequential on w2/cpu)" in repr(spread())


def test_parameters_warns_of_missing_ones_on_other_workers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TelegradWarning, match=r"others are on w1, w2: .*DistributedOptimizer"):
            torch.optim.SGD(spread().parameters(), lr=0.1)
        assert list(Pipeline([nn.Linear(1, 1)]).parameters())


def test_calls_outside_of_a_context_warn_of_missing_gradients() -> None:
    pipeline = spread()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            pipeline(batch()[0])
        with pytest.raises(TelegradWarning, match="a pipeline was called outside of an autograd context"):
            pipeline(batch()[0])
