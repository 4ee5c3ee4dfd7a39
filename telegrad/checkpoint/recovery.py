"""`telegrad.recover`: continue from the last checkpoint after workers have died and were restarted."""

from __future__ import annotations

import time
from math import inf
from typing import Any

from torch import nn

from telegrad import checkpoint, errors
from telegrad.checkpoint.folders import Path
from telegrad.checkpoint.state import folder_of
from telegrad.ext.arguments import checks
from telegrad.ext.modules import restore_model
from telegrad.ext.texts import Wait
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef, get_worker_info

PAUSE = 0.05  # seconds before the next attempt
LEAST = 1.0  # minimum seconds for an attempt

_OF_A_LOSS = (
    *(errors.PeerError, errors.RRefError, errors.UnknownWorker),
    *(errors.CallTimeout, errors.CallCancelled, errors.ContextEnded),
)


def recover(
    state: dict[str, Any], checkpoint_id: Path | None, timeout: float = 60.0, after: BaseException | None = None
) -> None:
    """See `telegrad.recover`."""
    checks.seconds("timeout", timeout)
    if after is not None and not isinstance(after, BaseException):
        checks.raise_invalid("after", "the exception that ended a step", after)
    if after is not None and not _may_end(after):
        raise after
    if checkpoint_id is None:
        told = "recover: there is no checkpoint to continue from; save one before the first step"
        raise errors.UsageError(told) from after
    folder_of("load", state, checkpoint_id)
    until = time.monotonic() + timeout if timeout else inf
    text = "recover: restoring all parts"
    with Wait("recover", lambda: text, worker=get_worker_info().name) as wait:
        while True:
            left = max(until - time.monotonic(), LEAST) if timeout else 0
            try:
                for value in state.values():
                    if isinstance(value, nn.Module | RRef):
                        restore_model(value, left)
                for value in state.values():
                    if isinstance(value, DistributedOptimizer):
                        value.recover(left)
                checkpoint.load(state, checkpoint_id)
                return
            except (*_OF_A_LOSS, errors.WorkersFailed) as error:
                if time.monotonic() > until or not _may_end(error):
                    raise
                text = f"recover: {error}"
            wait.look()
            time.sleep(PAUSE)


def _may_end(error: BaseException) -> bool:
    """Return True if only workers were lost, and these may come back."""
    if isinstance(error, errors.CheckpointFailed) and error.__cause__ is not None:
        return _may_end(error.__cause__)
    several = error.errors.values() if isinstance(error, errors.WorkersFailed) else [error]
    return all(isinstance(each, _OF_A_LOSS) and not isinstance(each, errors.CannotRestore) for each in several)
