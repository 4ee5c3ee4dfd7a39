"""Norms of gradients, and the factor that limits them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from telegrad._core import checks
from telegrad.errors import UsageError


def norm_of(gradients: Iterable[Tensor], norm_type: float) -> Tensor | None:
    """Return the norm of one worker's gradients, or None without gradients.

    The norm is on the CPU, so the host waits for the device only once.
    """
    values = [_plain(gradient) for gradient in gradients]
    return nn.utils.get_total_norm([each.detach() for each in values], norm_type).cpu() if values else None


def _plain(gradient: Any) -> Tensor:
    mesh = getattr(gradient, "device_mesh", None)
    if mesh is None:
        values: Tensor = gradient.coalesce().values() if gradient.is_sparse else gradient
        return values
    if mesh.size() > 1:
        raise UsageError(
            f"gradients that are shared out over {mesh.size()} processes (DTensor) would count several times in a norm "
            "over all workers: clip them on these with torch.nn.utils.clip_grad_norm_, before the step"
        )
    local: Tensor = gradient.to_local()
    return local


def check_norms(max_norm: Any, norm_type: Any, error_if_nonfinite: Any) -> None:
    """Raise InvalidArgument for invalid clipping arguments."""
    checks.number("max_norm", max_norm, 0)
    checks.number("norm_type", norm_type, 0)
    checks.flag("error_if_nonfinite", error_if_nonfinite)


def scale(gradients: Iterable[Tensor], factor: float) -> None:
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor)


def limited(
    norms: Iterable[Tensor | None], max_norm: float, norm_type: float, error_if_nonfinite: bool, context_id: int
) -> tuple[Tensor, float]:
    """Return the norm over all workers, and the factor, at most 1, that limits it to `max_norm`.

    Raises:
        RuntimeError: the norm is infinite or not a number, and `error_if_nonfinite` is set.
    """
    there = [norm.cpu() for norm in norms if norm is not None]  # a device map may have put them on other devices
    # In torch the norm of order 0 is the number of nonzero gradients, so the workers' norms are summed.
    total = torch.linalg.vector_norm(torch.stack(there), norm_type or 1.0) if there else torch.tensor(0.0)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type:g} of the gradients of context {context_id} is {total.item()}, "
            "so they cannot be clipped. Give error_if_nonfinite=False to scale them all the same"
        )
    factor = max_norm / (total.item() + 1e-6)
    return total, 1.0 if factor >= 1 else factor
