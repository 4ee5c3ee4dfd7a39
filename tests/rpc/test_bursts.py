"""Many calls at once, for whose values nobody waits in place: some leave together, and all leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad._core.agent.peer import BATCH
from telegrad._core.worker import current
from telegrad._core.worker.worker import Worker
from telegrad.rpc import Future, functions, remote, rpc_async
from tests.cluster import PATIENCE, agents

MANY = 3 * BATCH - 1  # so that the last ones have no company

there: list[torch.futures.Future[int]] = []
lock = threading.Lock()  # guards there


@functions.async_execution
def meet(number: int) -> torch.futures.Future[int]:
    """Done once all have come, in whatever order; then with their number."""
    own: torch.futures.Future[int] = torch.futures.Future()
    with lock:
        there.append(own)
        complete = len(there) == MANY
    if complete:
        for future in there:
            future.set_result(len(there))
    return own


@pytest.fixture
def caller() -> Iterator[Worker]:
    there.clear()
    with agents(2) as (a, _):
        current.enter(a)
        yield a
        current.enter(None)


@pytest.mark.parametrize("begin", [rpc_async, lambda *call: remote(*call).future()], ids=["rpc_async", "remote"])
def test_the_last_of_many_calls_leaves_though_no_answer_comes(
    caller: Worker, begin: Callable[..., Future[Any]]
) -> None:
    ended = threading.Semaphore(0)
    futures = [begin("w1", meet, (number,)) for number in range(MANY)]
    for future in futures:
        future.add_done_callback(lambda _: ended.release())
    for _ in futures:
        assert ended.acquire(timeout=PATIENCE)


def test_a_call_that_is_waited_for_takes_those_before_it_along(caller: Worker) -> None:
    futures = [rpc_async("w1", meet, (number,)) for number in range(MANY - 1)]
    last = rpc_async("w1", meet, (MANY - 1,))
    assert last.wait() == MANY
    assert {future.wait() for future in futures} == {MANY}
