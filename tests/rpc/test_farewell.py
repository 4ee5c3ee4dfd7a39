"""How a worker waits in shutdown: asleep, until there is something to see."""

from __future__ import annotations

import operator
import queue
import threading
from collections.abc import Iterator

import pytest

from telegrad.progress import FIRST
from telegrad.rpc.worker import Worker
from tests.cluster import PATIENCE, agents

begun, may_end = threading.Event(), threading.Event()


class Slept(threading.Event):
    """Tells for how long each one who waits for it would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.times: queue.SimpleQueue[float] = queue.SimpleQueue()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.times.put(timeout)
        return super().wait(timeout)


@pytest.fixture
def group() -> Iterator[list[Worker]]:
    with agents(2) as made:
        for worker in made:
            worker.parting._changed = Slept()
        yield made


def times(worker: Worker) -> queue.SimpleQueue[float]:
    """For how long a worker would sleep, each time that it waits."""
    changed = worker.parting._changed
    assert isinstance(changed, Slept)
    return changed.times


def leaving(worker: Worker) -> threading.Thread:
    thread = threading.Thread(target=worker.shutdown, args=(True, 0))
    thread.start()
    return thread


def assert_ends(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("server", [0, 1], ids=["leads", "is led"])
def test_a_server_that_waits_in_shutdown_sleeps_while_it_serves(group: list[Worker], server: int) -> None:
    waits, other = leaving(group[server]), group[1 - server]
    slept = times(group[server])
    assert slept.get(timeout=PATIENCE) == pytest.approx(FIRST, abs=1)  # when it says for whom it waits
    for _ in range(100):
        assert other.agent.call(server, operator.add, (1, 2), None) == 3
    assert slept.empty()
    other.shutdown(True, PATIENCE)
    assert_ends(waits)


def work() -> None:
    begun.set()
    assert may_end.wait(PATIENCE)


def test_a_worker_that_was_asked_too_early_looks_again(group: list[Worker]) -> None:
    begun.clear()
    may_end.clear()
    call = group[1].agent.call_async(0, work, None, None)
    assert begun.wait(PATIENCE)
    both = [leaving(worker) for worker in group]
    for worker in group:
        while times(worker).get(timeout=PATIENCE) > 1:
            pass  # it was not asked yet
    may_end.set()
    for each in both:
        assert_ends(each)
    call.wait()
