"""How the losses of micro-batches make up that of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from telegrad.errors import UsageError

Loss = Callable[[Any, Any], Tensor]

MEAN, SUM = "mean", "sum"
_AS = {"mean": MEAN, "batchmean": MEAN, "sum": SUM, "none": "none"}  # what torch's losses call it
_COUNTING_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_COUNTING_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_IGNORED = -100  # what these ignore by default


def shares(loss: Loss, reduction: str | None, sizes: Sequence[int], targets: Any) -> tuple[Loss, list[float]]:
    """What to compute for each micro-batch of so many samples, and by what to multiply it.

    Added up, that is the loss of the whole batch.

    Raises:
        UsageError: `loss` is none, or does not do what `reduction` says.
    """
    if reduction_of(loss, reduction) == SUM:
        return loss, [1.0] * len(sizes)
    counted = _by_count(loss, targets)
    if counted is not None:
        summed, count = counted
        return summed, [1 / count if count else float("nan")] * len(sizes)
    return loss, [size / sum(sizes) for size in sizes]


def reduction_of(loss: Loss, said: str | None) -> str:
    """Whether a loss averages over samples or sums: what its caller says, what it says itself, or else "mean"."""
    if said not in (None, MEAN, SUM):
        raise UsageError(
            f"reduction must be 'mean' or 'sum', not {said!r}: it says what the loss does with its samples"
        )
    if not callable(loss) or isinstance(loss, type):
        instance = f"an instance of it, {loss.__name__}()" if isinstance(loss, type) else "a function or a module"
        raise UsageError(f"the loss of a pipeline is called with outputs and targets: give {instance}, not {loss!r}")
    own = _AS.get(str(_own_reduction(loss)))
    if own == "none":
        raise UsageError(
            f"{loss!r} gives a loss for each sample, and a pipeline needs a scalar: "
            "make it with reduction='mean' or 'sum'"
        )
    if said and own and said != own:
        raise UsageError(
            f"forward_backward was told reduction={said!r}, but {loss!r} has reduction={own!r}: leave the former out"
        )
    return said or own or MEAN


def check_scalar(value: Any, loss: Loss) -> Tensor:
    """What a loss gave, if a backward pass can begin there.

    Raises:
        UsageError: it cannot.
    """
    if isinstance(value, Tensor) and not value.dim():
        return value
    name = getattr(loss, "__qualname__", type(loss).__name__)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UsageError(
        f"the loss of a pipeline must be a scalar tensor, but {name} gave {kind}. Let it end with .mean(); or with "
        ".sum(), and tell forward_backward so: reduction='sum'"
    )


def _own_reduction(loss: Any) -> Any:
    if isinstance(loss, partial):
        return loss.keywords.get("reduction") or _own_reduction(loss.func)
    return getattr(loss, "reduction", None)


def _by_count(loss: Any, targets: Any) -> tuple[Loss, float] | None:
    """The sum in the place of a mean, and by what to divide it, where that mean is not one over samples.

    Cross entropy averages over the targets that are not ignored, and by the weights of their classes.
    """
    if type(loss) in _COUNTING_MODULES:
        ignored, weight = loss.ignore_index, loss.weight
        summed = copy.copy(loss)
        summed.reduction = SUM
    elif loss in _COUNTING_FUNCTIONS:
        ignored, weight, summed = _IGNORED, None, partial(loss, reduction=SUM)
    elif isinstance(loss, partial) and loss.func in _COUNTING_FUNCTIONS and not loss.args:
        ignored, weight = loss.keywords.get("ignore_index", _IGNORED), loss.keywords.get("weight")
        summed = partial(loss, reduction=SUM)
    else:
        return None
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    counting = targets[targets != ignored]
    if weight is None:
        return None if len(counting) == targets.numel() else (summed, len(counting))
    return summed, weight.to(counting.device)[counting].sum().item()
