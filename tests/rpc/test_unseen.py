"""Tests of failures that the program never retrieves: they are logged as errors, others are not."""

import asyncio
import contextlib
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad._core.calls import profiling, unretrieved
from telegrad._core.rpc import cluster
from telegrad._core.worker.current import Worker
from telegrad.errors import ShutDown, WorkersFailed
from telegrad.rpc import Future, RRef, remote, rpc_async, rpc_sync
from tests.agent.test_following import Notes
from tests.cluster import PATIENCE, agents_here, wait_until

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the failures of other tests, after which similar ones are not logged."""
    for name, empty in (("_logged", {}), ("_retrieved", {}), ("_held", set())):
        monkeypatch.setattr(unretrieved, name, empty)
    yield
    gc.collect()
    # The thread that completed a future may still hold it, and would log its failure during the next test.
    wait_until(lambda: all(held() is None or held().seen for held in unretrieved._held.copy()))


class Heard(logging.Handler):
    """The errors of the log, and an event for the first."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []
        self.told = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.told.set()


@pytest.fixture
def log() -> Iterator[Heard]:
    heard = Heard()
    logging.getLogger("telegrad").addHandler(heard)
    yield heard
    logging.getLogger("telegrad").removeHandler(heard)


def fail(text: str = "boom") -> Any:
    raise ValueError(text)


def failed(*args: str) -> Future[Any]:
    """Return a future that has failed, and whose error was not retrieved."""
    future = rpc_async("w1", fail, [*args])
    wait_until(future.done)
    return future


def test_an_unretrieved_failure_is_logged_with_worker_function_and_error(log: Heard) -> None:
    future = failed()
    assert not log.said
    del future
    assert log.told.wait(PATIENCE)
    (said,) = log.said
    assert f"{__name__}.fail on worker 'w1' failed" in said
    assert "ValueError: boom" in said
    assert "raise ValueError(text)" in said


def test_an_unretrieved_failure_is_logged_while_calls_are_followed(log: Heard) -> None:
    profiling.follow(Notes())
    try:
        future = failed()
        assert not log.said
        del future
        assert log.told.wait(PATIENCE)
    finally:
        profiling.follow(None)


def test_the_failure_of_a_callback_is_logged(log: Heard) -> None:
    rpc_async("w1", min, ((1, 2),)).then(lambda _: fail()).done()
    assert log.told.wait(PATIENCE)
    assert "a callback passed to `then` failed" in log.said[0]


@pytest.mark.parametrize("ending", [fail, sys.exit])
def test_the_error_of_a_done_callback_is_logged_and_others_run(ending: Callable[[], Any], log: Heard) -> None:
    future, called = rpc_async("w1", min, ((1, 2),)), threading.Event()
    future.add_done_callback(lambda _: ending())
    future.add_done_callback(lambda _: called.set())
    assert called.wait(PATIENCE)
    assert log.said == ["telegrad: a callback passed to `add_done_callback` failed"]


def called_back(future: Future[Any]) -> None:
    future.add_done_callback(lambda _: None)
    wait_until(future.done)


async def awaited(future: Future[Any]) -> Any:
    return await future


@pytest.mark.parametrize("way", ["failed before", "fails meanwhile"])
def test_a_retrieved_failure_is_not_logged(way: str, log: Heard) -> None:
    see: dict[str, Callable[[Future[Any]], Any]] = {
        "wait": lambda future: future.wait(),
        "value": lambda future: future.value() if future.done() else future.wait(),
        "callback": called_back,
        "then": lambda future: future.then(lambda done: done.wait()).wait(),
        "collect_all": lambda future: torch.futures.collect_all([future, rpc_async("w2", fail)]).wait(),
        "wait_all": lambda future: torch.futures.wait_all([future, rpc_async("w2", fail)]),
        "await": lambda future: asyncio.run(awaited(future)),
    }
    for name, act in see.items():
        future = failed(name) if way == "failed before" else rpc_async("w1", fail, (name,))
        with contextlib.nullcontext() if act is called_back else pytest.raises(ValueError, match=name):
            act(future)
        del future
    gc.collect()
    failed("another").heed()
    assert not log.said


@pytest.mark.parametrize("handled", [lambda: rpc_async("w1", fail).wait(), lambda: remote("w1", fail).to_here()])
@pytest.mark.parametrize("dropped", [rpc_async, remote])
def test_a_failure_after_a_similar_one_was_handled_is_logged(handled: Any, dropped: Any, log: Heard) -> None:
    with pytest.raises(ValueError, match="boom"):
        handled()
    dropped("w1", fail, ("later",))
    assert log.told.wait(PATIENCE)
    (said,) = log.said
    assert f"{__name__}.fail on worker 'w1' failed" in said
    assert "ValueError: later" in said


def test_failures_are_logged_again_after_a_while(monkeypatch: pytest.MonkeyPatch, log: Heard) -> None:
    """Also if some that were not logged came in between."""
    now = 1e9
    monkeypatch.setattr(unretrieved, "perf_counter", lambda: now)
    for _ in range(9):
        unretrieved.UnretrievedError("f on worker 'w1'", ValueError("boom"), now)
        now += unretrieved.QUIET * 0.4
    assert len(log.said) == 3


def test_failures_that_the_program_holds_are_logged_once_at_its_end(log: Heard) -> None:
    held = [failed(), failed("another")]
    cluster._leave_at_exit()
    (said,) = log.said
    assert f"{__name__}.fail on worker 'w1' failed" in said
    log.said.clear()
    cluster._leave_at_exit()
    del held
    assert not log.said


@pytest.mark.parametrize("end", [lambda _: cluster._leave_at_exit(), list.clear])
def test_held_failures_are_not_logged_long_after_a_similar_one_was_handled(
    end: Callable[..., None], monkeypatch: pytest.MonkeyPatch, log: Heard
) -> None:
    held = [failed(), failed()]
    with pytest.raises(ValueError, match="boom"):
        held[0].wait()
    later = time.perf_counter() + 10 * unretrieved.QUIET
    monkeypatch.setattr(unretrieved, "perf_counter", lambda: later)
    end(held)
    assert not log.said


def test_calls_that_end_with_their_group_are_not_logged(log: Heard) -> None:
    error = WorkersFailed("1 of 1 workers failed", {"w1": ShutDown("worker 'w0' shut down")})
    held = unretrieved.UnretrievedError("f on two workers", error, 0.0)
    cluster._leave_at_exit()
    del held
    assert not log.said


@pytest.mark.parametrize("handled", [False, True])
def test_the_failed_creation_of_a_held_reference_is_logged_at_the_end_of_its_worker(handled: bool, log: Heard) -> None:
    with agents_here(2) as workers:
        held = [remote("w1", fail), remote("w1", fail)]
        wait_until(lambda: not workers[0].references.counts()["pending_creations"])
        if handled:
            with pytest.raises(ValueError, match="boom"):
                held[0].to_here()
        workers[0].end("")
        assert len(log.said) == (not handled)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.parametrize("begin", [rpc_async, remote])
def test_a_forked_child_leaves_the_failures_of_its_parent_to_that(begin: Callable[..., Any], log: Heard) -> None:
    with agents_here(2) as workers:
        held = [begin("w1", fail)]
        wait_until(lambda: unretrieved._held)
        child = os.fork()
        if not child:
            held.clear()
            gc.collect()
            os._exit(len(log.said))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held.clear()
        workers[0].references.flush()
        assert log.told.wait(PATIENCE)


def test_the_failure_of_an_own_future_with_a_callback_is_not_logged(log: Heard) -> None:
    future: Future[Any] = Future()
    future.add_done_callback(lambda _: None)
    future.set_exception(ValueError("boom"))
    del future
    assert not log.said


def use(reference: object) -> bool:
    return isinstance(reference, RRef)


@pytest.mark.parametrize(
    "see",
    [
        lambda reference: reference.to_here(),
        lambda reference: reference.future().wait(),
        lambda reference: rpc_sync("w2", use, (reference,)),
        lambda reference: reference.rpc_sync().anything(),
    ],
    ids=["to_here", "future", "sent", "proxy"],
)
def test_the_failed_creation_of_a_used_reference_is_not_logged(
    see: Callable[[RRef[Any]], object], log: Heard, five: list[Worker]
) -> None:
    reference = remote("w1", fail)
    with contextlib.suppress(ValueError):  # it may have failed before it could be sent
        see(reference)
    del reference
    five[0].references.flush()
    five[0].references.flush()
    assert not log.said
