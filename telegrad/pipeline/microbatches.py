"""Split a batch into micro-batches, join their outputs, and scale their losses to sum up to the loss of the batch."""

import contextlib
import copy
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

from telegrad.errors import InvalidArgument, UsageError

Loss = Callable[[Any, Any], Tensor]

_AS = {"mean": "mean", "batchmean": "mean", "sum": "sum", "none": "none"}  # names in torch's losses
_COUNTING_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_NO_MEAN = (
    "it is not the mean over their samples. If it is a sum, give reduction='sum'; if it divides by something else, "
    "return the sum, divided by that number for the whole batch, and give reduction='sum'. With reduction='mean', the "
    "loss is the mean of the micro-batches' losses"
)
_IGNORED = -100  # the target that these functions ignore by default


def parts_of(batch: Any, chunks: int) -> list[Any]:
    """Split the tensors in `batch` into parts of about equal size. Other values are repeated in each part."""
    parts = len(_sizes(batch, chunks))
    if type(batch) is Tensor:
        return list(batch.tensor_split(parts))
    leaves, form = tree_flatten(batch)
    cut = [leaf.tensor_split(parts) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves]
    return [tree_unflatten(list(part), form) for part in zip(*cut, strict=True)]


def _sizes(batch: Any, chunks: int) -> list[int]:
    """Return the number of samples in each micro-batch."""
    leaves = [batch] if type(batch) is Tensor else tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else f"{tensor.layout}"
            raise InvalidArgument(
                f"a batch has a {kind} tensor, which cannot be split into micro-batches: give dense tensors, such as "
                "its to_dense() or to_padded_tensor(0.0)"
            )
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise UsageError(
            "a batch must consist of tensors with the samples along their first dimension, the same number in each; "
            f"these have the shapes {shapes}"
        )
    size = shapes[0][0]
    parts = max(min(chunks, size), 1)
    return [size // parts + (number < size % parts) for number in range(parts)]


def sizes_of(inputs: Any, targets: Any, chunks: int) -> list[int]:
    """Return the size of each micro-batch. Raise UsageError if inputs and targets cannot be split alike."""
    sizes, of_targets = _sizes(inputs, chunks), _sizes(targets, chunks)
    size, wanted = sum(sizes), sum(of_targets)
    if not size or [each * wanted for each in sizes] != [each * size for each in of_targets]:
        raise UsageError(
            f"{size} inputs and {wanted} targets cannot be cut into {chunks} matching micro-batches: give a "
            "target for each input, and at least one"
        )
    return sizes


def joined(parts: list[Any]) -> Any:
    """Join the outputs of all micro-batches."""
    leaves, form = [tree_leaves(part) for part in parts], tree_flatten(parts[0])[1]
    for path in scalars_of(parts[0]):
        raise UsageError(
            f"the output{path} of the model is one number for each micro-batch, with no dimension "
            "to join these along: return value[None], and combine the elements"
        )
    return tree_unflatten(
        [torch.cat(same) if isinstance(same[0], Tensor) else same[0] for same in zip(*leaves, strict=True)], form
    )


def are_parts(whole: Tensor, parts: Sequence[Tensor], weights: Sequence[float], allowed: float) -> bool:
    """Return True if an output of a batch equals those of its micro-batches: each, their mean, or all joined."""
    if all(is_close(whole, part, allowed) for part in parts):
        return True
    if not whole.dim():  # a mean over the samples, which may be added to a loss that is one
        return is_close(whole, sum(map(operator.mul, parts, weights), torch.zeros_like(whole)), allowed)
    for dimension in range(whole.dim()):
        with contextlib.suppress(RuntimeError):  # their other sizes differ
            if is_close(whole, torch.cat([*parts], dimension), allowed):
                return True
    return False


def is_close(one: Tensor, other: Tensor, allowed: float) -> bool:
    """Return True if the norm of the difference is at most this part of the norm."""
    if one.shape != other.shape:
        return False
    one, other = (each.float().nan_to_num(0.0, 0.0, 0.0) for each in (one, other))
    return bool((one - other).norm() <= allowed * max(one.norm(), other.norm()))


def scalars_of(output: Any) -> list[str]:
    """Return the paths of the tensors without dimensions."""
    leaves = tree_flatten_with_path(output)[0]
    return [keystr(path) for path, leaf in leaves if isinstance(leaf, Tensor) and not leaf.dim()]


def shares(loss: Loss, reduction: str | None, sizes: Sequence[int], targets: Any) -> tuple[Loss, list[float], bool]:
    """Return the loss for a micro-batch, and a factor for each; the sum of the products is the loss of the batch. The
    last value is True if `check_sum` must confirm that; it is False for one micro-batch, and torch's own losses. Raise
    UsageError if `loss` returns no scalar, or contradicts `reduction`."""
    # The reduction of an unknown loss is a guess ("mean", unless it has an attribute), which `check_sum` confirms after
    # the last micro-batch. A program that gives `reduction` says that it is right.
    unsure = reduction is None and len(sizes) > 1 and not _is_of_torch(loss)
    if _reduction_of(loss, reduction) == "sum":
        return loss, [1.0] * len(sizes), unsure
    counted = _by_count(loss, targets)
    if counted is not None:
        summed, count = counted
        return summed, [1 / count if count else float("nan")] * len(sizes), unsure
    return loss, [size / sum(sizes) for size in sizes], unsure


def _is_of_torch(loss: Any) -> bool:
    """Return True for torch's own losses without options that replace `reduction`, or could be weights of samples."""
    function, options = (loss.func, loss.keywords) if isinstance(loss, partial) and not loss.args else (loss, {})
    home = type(function).__module__ if isinstance(function, nn.Module) else getattr(function, "__module__", None)
    values = [*options.values(), *(function.buffers() if isinstance(function, nn.Module) else ())]
    has_weights = any(isinstance(each, Tensor) and each.dim() > 1 for each in values)  # those of classes have one
    if has_weights or {"size_average", "reduce"} & options.keys():
        return False
    return home in ("torch.nn.modules.loss", "torch.nn.functional")


def check_sum(
    loss: Loss, outputs: Sequence[Any], targets: Sequence[Any], losses: Sequence[Tensor], weights: Sequence[float]
) -> None:
    """Raise UsageError if the weighted losses of all micro-batches, or their gradients, differ from the batch's."""
    leaves = [leaf for leaf in tree_leaves([*outputs, *targets]) if isinstance(leaf, Tensor)]
    if not all(leaf.dim() for leaf in leaves):
        return  # such a value is of one micro-batch, so the batch has none
    with torch.enable_grad():
        value = loss(joined([*outputs]), joined([*targets]))
    coarsest = max(torch.finfo(each.dtype).eps for each in (value, *leaves) if each.is_floating_point())
    whole, parts = value.item(), [each.item() for each in losses]
    name = getattr(loss, "__qualname__", type(loss).__name__)
    allowed = math.sqrt(coarsest) * sum(map(abs, parts))

    def differs(value: float) -> bool:
        both_nan = math.isnan(whole) and math.isnan(value)
        return not (whole == value or abs(whole - value) <= allowed or both_nan)

    if differs(sum(parts)):
        if differs(again := loss(joined([*outputs]), joined([*targets])).item()):
            raise UsageError(
                f"the loss {name} is random, as with dropout: for the same outputs, it is {whole:.6g} and {again:.6g}. "
                "So a pipeline cannot find out if it is the mean or the sum over the samples: give reduction='mean' or "
                "reduction='sum', or do what is random in the last stage"
            )
        raise UsageError(
            f"the loss {name} of this batch is {whole:.6g}, but its micro-batches give {sum(parts):.6g}: {_NO_MEAN}"
        )
    parameters = loss.parameters() if isinstance(loss, nn.Module) else ()
    inputs = [each for each in (*leaves, *parameters) if each.requires_grad]
    if value.requires_grad and inputs and _gradients_differ(loss, outputs, targets, weights, value, inputs, coarsest):
        raise UsageError(
            f"the loss {name} of this batch, {whole:.6g}, is about the sum over its micro-batches, but its gradients "
            "are not the sum of theirs. It may mix samples a little, or detach something that it computes from all "
            f"samples: {_NO_MEAN}"
        )


def _gradients_differ(
    loss: Loss,
    outputs: Sequence[Any],
    targets: Sequence[Any],
    weights: Sequence[float],
    value: Tensor,
    inputs: list[Tensor],
    coarsest: float,
) -> bool:
    """Return True if the batch's loss `value` has other gradients at `inputs` than the sum over the micro-batches."""
    with torch.enable_grad():
        batches = zip(outputs, targets, weights, strict=True)
        # copies, since a loss may change these in place, and leaves cannot be changed
        several = (loss(*tree_map_only(Tensor, torch.clone, both)) * weight for *both, weight in batches)
        total = sum(several, torch.zeros_like(value))
    found = (torch.autograd.grad(root, inputs, allow_unused=True, materialize_grads=True) for root in (value, total))
    for whole, parts in zip(*(map(Tensor.to_dense, gradients) for gradients in found), strict=True):
        # A gradient that should be 0 is about as large as rounding: an element of a mean's gradient is 1 / numel().
        least = 8 * coarsest / math.sqrt(max(whole.numel(), 1))
        allowed = max(math.sqrt(coarsest) * max(whole.norm().item(), parts.norm().item()), least)
        if (whole - parts).norm().item() > allowed:  # False for NaN
            return True
    return False


def _reduction_of(loss: Any, said: str | None) -> str:
    """Return "mean" or "sum": the caller's value, else that of the loss, else "mean"."""
    if isinstance(loss, type):
        raise UsageError(
            f"the loss of a pipeline is called with outputs and targets: pass an instance, {loss.__name__}(), "
            f"not {loss!r}"
        )
    inner = loss
    while isinstance(inner, partial) and not inner.keywords.get("reduction"):
        inner = inner.func
    given = inner.keywords["reduction"] if isinstance(inner, partial) else getattr(inner, "reduction", None)
    own = _AS.get(str(given))
    if own == "none":
        raise UsageError(
            f"{loss!r} gives a loss for each sample, and a pipeline needs a scalar: "
            "create it with reduction='mean' or 'sum'"
        )
    if said and own and said != own:
        raise UsageError(
            f"forward_backward got reduction={said!r}, but {loss!r} has reduction={own!r}: leave out the argument"
        )
    return said or own or "mean"


def evaluated(loss: Loss, output: Any, targets: Any, is_part: bool) -> Tensor:
    """Return the loss of a batch, or if `is_part`, a micro-batch. Raise UsageError if it is no scalar tensor."""
    try:
        value = loss(output, targets)
    except Exception as error:
        if is_part:
            error.add_note(
                "A pipeline's loss gets one micro-batch: make a value for each sample a part of the targets."
            )
        raise
    if isinstance(value, Tensor) and not value.dim():
        return value
    name = getattr(loss, "__qualname__", type(loss).__name__)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UsageError(
        f"the loss of a pipeline must be a scalar tensor, but {name} returned {kind}. End it with .mean(), or with "
        ".sum() and pass reduction='sum' to forward_backward"
    )


def _by_count(loss: Any, targets: Any) -> tuple[Loss, float] | None:
    """Return a sum instead of a mean that does not divide by the sample count, and the divisor for the whole batch: for
    cross entropy the number of targets that are not ignored, or the sum of their class weights."""
    summed: Any
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        ignored, weight = loss.ignore_index, loss.weight
        summed = copy.copy(loss)
        summed.reduction = "sum"
    else:
        function, options = (loss.func, loss.keywords) if isinstance(loss, partial) and not loss.args else (loss, {})
        if function not in _COUNTING_FUNCTIONS:
            return None
        ignored, weight = options.get("ignore_index", _IGNORED), options.get("weight")
        summed = partial(loss, reduction="sum")
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    counting = targets[targets != ignored]
    # If all targets count, their mean is an ordinary mean over the samples.
    if weight is None:
        return None if len(counting) == targets.numel() else (summed, len(counting))
    return summed, weight.to(counting.device)[counting].sum().item()
