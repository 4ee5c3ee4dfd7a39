"""What users call of elastic groups, besides `init_rpc`."""

from __future__ import annotations

from telegrad._core.calls.deadlines import DEFAULT, check_timeout, limit_of
from telegrad._core.start.elastic import Elastic, Generation
from telegrad._core.start.life import check_may_wait, show
from telegrad._core.worker import current
from telegrad._core.worker.worker import Worker
from telegrad.errors import UsageError


def rendezvous_again(timeout: float = DEFAULT) -> Generation:
    """Let an elastic group change between two steps of its program: all workers call this before each of them.

    Returns once all have, but for those that `serve`. As long as nobody has died, left, or waits to join, the
    generation is as it was, and so is what was made in it. Else this worker is in the next one, and may have another
    rank there; calls, references and contexts of the last end with `GenerationOver`.

    The first one after `init_rpc` returns at once: who has joined stands where the others do, whose call has returned.

    Args:
        timeout: seconds until who has not called it is left out; as long again is waited for `min_workers`. 0 for no
            limit, left out that of the options.

    Returns:
        The `Generation` that this worker is in now.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: the group is not elastic; a remote call, or a callback of one, calls this; or two threads do.
        GroupIncomplete: they did not come; this worker is in no group any more.

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
    """The generation of its elastic group that this worker is in.

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
