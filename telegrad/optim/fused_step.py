"""Optimizer steps that are fused with a backward pass, and need no calls of their own.

The pass carries a request to the optimizer's part on each owner that it reaches: to step, or to return the norm of its
gradients for clipping. `step` then calls only the owners that the pass has not reached.
"""

import pickle
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_pre_hooks

from telegrad._core import checks
from telegrad._core.rpc.joint_calls import call_owners
from telegrad.autograd import look_at_step
from telegrad.autograd.passes import FusedStep, StepResults
from telegrad.errors import UsageError
from telegrad.optim.owner import Changes, user_name

PLAIN = (int, float, bool, str, type(None))  # types of hyperparameters that a pass can carry, and tuples of them


class Done(NamedTuple):
    """The work that a pass has already done for a step."""

    stepped: Mapping[str, tuple[bool, Any]] = {}  # `StepResults` of owners that have stepped
    changes: Changes | None = None  # that these owners have applied
    factor: float = 1.0  # for the gradients


NOTHING = Done()  # of a step without a pass


def already_stepped() -> UsageError:
    return UsageError(
        "backward(..., step=optimizer) has already stepped with the gradients of this context, so step(context_id) "
        "would apply them twice: leave out one of the two"
    )


class Clipped:
    """An optimizer's step with clipped gradients, for `backward(..., step=...)`.

    The pass collects norms of gradients, then all owners step with the resulting factor.
    """

    def __init__(self, optimizer: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.error_if_nonfinite = error_if_nonfinite
        self.norm: Tensor | None = None  # of the last pass, before clipping
        self._optimizer = optimizer

    def __repr__(self) -> str:
        return f"<Clipped: to a norm of {self.max_norm:g}; the last was {self.norm}>"

    def _telegrad_fused(self, context_id: int) -> FusedStep:
        request = pickle.dumps(("norm", self.norm_type), 5)
        return FusedStep(self._optimizer._step_id, request, partial(self._end, context_id))

    def _end(self, context_id: int, stepped: StepResults) -> None:
        """Get the norms of the other owners, and make all owners step."""
        given = context_id, self.norm_type
        told = call_owners(self._optimizer.locals, "norm", given, user_name("norm"), stepped)
        norms = [torch.tensor(norm, dtype=torch.float64, device="cpu") for norm in told.values() if norm is not None]
        self.norm, factor = limited(norms, self.max_norm, self.norm_type, self.error_if_nonfinite, context_id)
        self._optimizer._finish(context_id, Done(factor=factor))


def has_hooks_before(optimizer: Optimizer) -> bool:
    """Return True if the program has registered a hook that runs before a step: of this optimizer, or of all."""
    own = optimizer._optimizer_step_pre_hooks
    return bool(own) or any(hook is not look_at_step for hook in _global_optimizer_pre_hooks.copy().values())


def is_plain(value: Any) -> bool:
    """Return True if a pass can carry a value, or dictionaries of such values."""
    if type(value) is dict:
        return all(map(is_plain, value.values()))
    return all(map(is_plain, value)) if type(value) is tuple else type(value) in PLAIN


def check_norms(max_norm: Any, norm_type: Any, error_if_nonfinite: Any) -> None:
    """Raise InvalidArgument for invalid clipping arguments."""
    checks.number("max_norm", max_norm, 0)
    checks.number("norm_type", norm_type, 0)
    checks.flag("error_if_nonfinite", error_if_nonfinite)


def limited(
    norms: Iterable[Tensor | None], max_norm: float, norm_type: float, error_if_nonfinite: bool, context_id: int
) -> tuple[Tensor, float]:
    """Return the norm over all workers, and the factor, at most 1, that limits it to `max_norm`; raise RuntimeError if
    the norm is infinite or not a number, and `error_if_nonfinite` is set."""
    there = [norm.cpu() for norm in norms if norm is not None]  # a device map may have put them on other devices
    # In torch the norm of order 0 is the number of nonzero gradients, so the workers' norms are summed.
    total = torch.linalg.vector_norm(torch.stack(there), norm_type or 1.0) if there else torch.tensor(0.0, device="cpu")
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type:g} of the gradients of context {context_id} is {total.item()}, "
            "so they cannot be clipped. Give error_if_nonfinite=False to scale them anyway"
        )
    # As in torch's clip_grad_norm_, so that a model gives the same result with and without remote parts.
    factor = max_norm / (total.item() + 1e-6)
    return total, 1.0 if factor >= 1 else factor
