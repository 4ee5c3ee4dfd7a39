"""The API of elastic groups, besides `init_rpc`."""

from __future__ import annotations

from telegrad._core.calls.deadlines import DEFAULT, check_timeout, limit_of
from telegrad._core.start.elastic import Elastic, Generation
from telegrad._core.start.life import check_may_wait, show
from telegrad._core.worker import current
from telegrad._core.worker.worker import Worker
from telegrad.errors import UsageError


def rendezvous_again(timeout: float = DEFAULT) -> Generation:
    """Let an elastic group change between two steps of its program: all workers call this before each step.

    Return once all workers have called this, except those in `serve`. If no worker has died, left, or waits to join,
    the generation and its objects stay as they are. Otherwise this worker is in the next generation, and may have
    another rank there; calls, references and contexts of the last one end with `GenerationOver`.

    The first call after `init_rpc` returns at once: the new worker is then at the same point as the others.

    Args:
        timeout: seconds until workers that have not called this are left out; then wait as long again for
            `min_workers`.
            0 for no limit. The default is in the options.

    Returns:
        The current `Generation` of this worker.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: the group is not elastic; a remote call, or a callback of one, calls this; or two threads do.
        GroupIncomplete: too few workers came; this worker is in no group any more.

    Example:
        >>> rpc.init_rpc("trainer", min_workers=1)
        >>> for step in range(2):
        ...     generation = rpc.rendezvous_again()  # then the step, by its rank and size
        >>> generation.rank, generation.size
        (0, 1)
        >>> rpc.shutdown()
    """
    worker = current.joined()
    check_timeout(timeout)
    check_may_wait(worker, "rendezvous_again")
    elastic = _elastic(worker)
    limit = limit_of(timeout, elastic.options.rpc_timeout)
    made = elastic.again(worker, limit)
    if made is not worker and elastic.options.dashboard is not None:
        show(made, elastic.options.dashboard)
    return elastic.generation_of(made)


def generation() -> Generation:
    """Return the current generation of this worker's elastic group.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: the group is not elastic.

    Example:
        >>> rpc.init_rpc("trainer", min_workers=1)
        >>> rpc.generation().size
        1
        >>> rpc.shutdown()
    """
    worker = current.joined()
    return _elastic(worker).generation_of(worker)


def _elastic(worker: Worker) -> Elastic:
    elastic: Elastic | None = worker.elastic
    if elastic is None:
        raise UsageError(
            f"worker {worker.agent.name!r} is in a group that has no generations: give min_workers or max_workers to "
            "init_rpc, in place of world_size"
        )
    return elastic
