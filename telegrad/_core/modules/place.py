"""Parses the place of a module: `"trainer0/cpu"`, `"ps0/cuda:0"`, `"rank:1/cpu"`, `"trainer0"`."""

from __future__ import annotations

import contextlib

import torch

from telegrad._core.checks import short_repr
from telegrad._core.membership.members import WorkerInfo
from telegrad._core.rpc.conversion import target
from telegrad.errors import InvalidArgument, UsageError

RANK = "rank:"


def parse_place(given: str | WorkerInfo) -> tuple[str | int, torch.device | None]:
    """Return the worker, by its name or rank, and the device there, if one is named.

    Raises:
        UsageError: the text is no place.
    """

    def advice(why: object) -> str:
        return (
            f"remote_device: {short_repr(given)} is not a place for a module: {why}. Write 'worker' or "
            "'worker/device', such as 'trainer0/cpu'"
        )

    if isinstance(given, int):
        raise UsageError(advice(f"for the worker of that rank write '{RANK}{short_repr(given)}'"))
    if not isinstance(given, str | WorkerInfo):
        raise InvalidArgument(advice("it is neither a name nor a WorkerInfo"))
    worker, slash, device = (given if isinstance(given, str) else str(target(given, "remote_device"))).partition("/")
    if slash and worker and not device:
        raise UsageError(advice("no device follows the slash"))
    if not slash:
        with contextlib.suppress(RuntimeError):
            torch.device(worker)
            worker = ""  # `worker` is the name of a device
    if not worker:
        raise UsageError(advice("it does not name a worker"))
    try:
        number = int(worker.removeprefix(RANK)) if worker.startswith(RANK) else worker
        return number, torch.device(device) if device else None
    except (RuntimeError, ValueError) as error:
        raise UsageError(advice(error)) from error
