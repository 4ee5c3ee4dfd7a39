"""Optimizer steps that are fused with a backward pass, and need no calls of their own.

The pass carries a request to the optimizer's part on each owner that it reaches: to step, or to return the norm of its
gradients for clipping. `step` then calls only the owners that the pass has not reached.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_pre_hooks

from telegrad._core.calls.futures import Future
from telegrad._core.pickling.exceptions import rebuild
from telegrad._core.rpc.joint_calls import call_all
from telegrad._core.rpc.rref import RRef
from telegrad.autograd.entry_points import look_at_step
from telegrad.optim.norms import limited
from telegrad.optim.owner import Changes, LocalOptimizer, ask

PLAIN = (int, float, bool, str, type(None))  # types of hyperparameters that a pass can carry, and tuples of them


class Done(NamedTuple):
    """The work that a pass has already done for a step."""

    counts: Mapping[str, Future[int | None]] = {}  # of owners that have stepped
    changes: Changes | None = None  # that these owners have applied
    factor: float = 1.0  # for the gradients


class Whole(NamedTuple):
    """The state of a distributed optimizer that fused steps need."""

    rider: int  # the number by which passes find the owners' parts
    locals: Mapping[str, RRef[LocalOptimizer]]
    finish: Callable[[int, Done], None]  # takes the remaining step of a context
    rides: WeakSet[StepRide]  # pending; after a failed pass, until garbage collection


class StepRide:
    """A step fused with a pass; without `changes`, a step after the end of the pass."""

    def __init__(self, whole: Whole, context_id: int, changes: Changes | None) -> None:
        self._whole = whole
        self._context_id = context_id
        self._changes = changes
        self.rider = 0 if changes is None else whole.rider
        self.request = b"" if changes is None else pickle.dumps(("step", changes), 5)
        if changes is not None:
            whole.rides.add(self)

    def end(self, rode: Mapping[str, tuple[bool, Any]]) -> None:
        """Make the other owners step, too."""
        try:
            self._whole.finish(self._context_id, Done(_futures(rode), self._changes))
        finally:
            self._whole.rides.discard(self)


class Clipped:
    """An optimizer's step with clipped gradients, for `backward(..., step=...)`."""

    def __init__(self, whole: Callable[[], Whole], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
        """`whole` is called for each step, since `recover` replaces the owners' parts."""
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.error_if_nonfinite = error_if_nonfinite
        self.norm: Tensor | None = None  # of the last pass, before clipping
        self._whole = whole

    def __repr__(self) -> str:
        return f"<Clipped: to a norm of {self.max_norm:g}; the last was {self.norm}>"

    def _telegrad_ride(self, context_id: int) -> ClippedRide:
        return ClippedRide(self._whole(), context_id, self)


class ClippedRide:
    """A step with clipping: the pass collects norms of gradients, then all owners step with the resulting factor."""

    def __init__(self, whole: Whole, context_id: int, clipped: Clipped) -> None:
        self._whole = whole
        self._context_id = context_id
        self._clipped = clipped
        self.rider = whole.rider
        self.request = pickle.dumps(("norm", clipped.norm_type), 5)

    def end(self, rode: Mapping[str, tuple[bool, Any]]) -> None:
        """Get the norms of the other owners, and make all owners step."""
        there, how = _futures(rode), self._clipped
        told = call_all(
            self._whole.locals,
            lambda worker, local: there.get(worker) or ask(local, "norm", self._context_id, how.norm_type),
        )
        norms = [torch.tensor(norm, dtype=torch.float64) for norm in told.values() if norm is not None]
        how.norm, factor = limited(norms, how.max_norm, how.norm_type, how.error_if_nonfinite, self._context_id)
        self._whole.finish(self._context_id, Done(factor=factor))


def has_hooks_before(optimizer: Optimizer) -> bool:
    """Return True if the program has registered a hook that runs before a step: of this optimizer, or of all."""
    own = optimizer._optimizer_step_pre_hooks
    return bool(own) or any(hook is not look_at_step for hook in _global_optimizer_pre_hooks.copy().values())


def may_ride(changes: Changes) -> bool:
    """Return True if a pass can carry these changes."""
    return all(_is_plain(value) for changed in changes.values() for value in changed.values())


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in PLAIN


def _futures(rode: Mapping[str, tuple[bool, Any]]) -> dict[str, Future[Any]]:
    """Return completed futures for the results of owners that stepped during the pass."""
    futures: dict[str, Future[Any]] = {}
    for worker, (worked, value) in rode.items():
        future = futures[worker] = Future()
        if worked:
            future.set_result(value)
        else:
            future.set_exception(rebuild(value))
    return futures
