"""Where a module shall live: `"trainer0/cpu"`, `"ps0/cuda:0"`, `"rank:1/cpu"`, `"trainer0"`."""

from __future__ import annotations

import torch

from telegrad.checks import shown
from telegrad.errors import InvalidArgument, UsageError
from telegrad.rpc import WorkerInfo
from telegrad.rpc.targets import target

RANK = "rank:"


def parse_place(given: str | WorkerInfo) -> tuple[str | int, torch.device | None]:
    """The worker, by its name or rank, and the device there, if one is named.

    Raises:
        UsageError: that is no place.
    """
    if isinstance(given, int):
        raise UsageError(_advice(given, f"for the worker of that rank write '{RANK}{shown(given)}'"))
    if not isinstance(given, str | WorkerInfo):
        raise InvalidArgument(_advice(given, "it is neither a name nor a WorkerInfo"))
    text = str(target(given, "remote_device")) if isinstance(given, WorkerInfo) else given
    worker, _, device = text.partition("/")
    if not worker or (not device and _is_device(worker)):
        raise UsageError(_advice(text, "it names no worker"))
    if not device and text.endswith("/"):
        raise UsageError(_advice(text, "no device stands behind the slash"))
    try:
        return _rank(worker), torch.device(device) if device else None
    except (RuntimeError, ValueError) as error:
        raise UsageError(_advice(text, str(error))) from error


def _advice(text: object, why: str) -> str:
    return (
        f"remote_device: {shown(text)} is no place for a module: {why}. Write 'worker' or 'worker/device', such as "
        "'trainer0/cpu'"
    )


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _rank(worker: str) -> str | int:
    return int(worker.removeprefix(RANK)) if worker.startswith(RANK) else worker
