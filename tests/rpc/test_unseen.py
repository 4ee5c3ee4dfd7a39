"""Tests of failures that the program never retrieves: they are logged as errors, others are not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad._core.calls import futures, profiling
from telegrad._core.worker.worker import Worker
from telegrad.rpc import Future, RRef, remote, rpc_async, rpc_sync
from tests.agent.test_following import Notes
from tests.cluster import PATIENCE

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the failures of other tests, after which similar ones are not logged."""
    monkeypatch.setattr(futures, "_seen", {})


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
    told = threading.Event()
    torch._C.Future.add_done_callback(future, lambda _: told.set())  # as torch's own code does: no retrieval
    assert told.wait(PATIENCE)
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


def test_the_error_of_a_done_callback_is_logged_and_others_run(log: Heard) -> None:
    future, called = rpc_async("w1", min, ((1, 2),)), threading.Event()
    future.add_done_callback(lambda _: fail())
    future.add_done_callback(lambda _: called.set())
    assert called.wait(PATIENCE)
    assert log.said == ["telegrad: a callback passed to `add_done_callback` failed"]


def waited(future: Future[Any]) -> None:
    with pytest.raises(ValueError, match="boom"):
        future.wait()


def asked(future: Future[Any]) -> None:
    with pytest.raises(ValueError, match="boom"):
        future.value()


def called_back(future: Future[Any]) -> None:
    told = threading.Event()
    future.add_done_callback(lambda _: told.set())
    assert told.wait(PATIENCE)


def gone_on_with(future: Future[Any]) -> None:
    with pytest.raises(ValueError, match="boom"):
        future.then(lambda done: done.wait()).wait()


def collected(future: Future[Any]) -> None:
    with pytest.raises(ValueError, match="boom"):
        torch.futures.collect_all([future, rpc_async("w2", fail)]).wait()


def all_waited_for(future: Future[Any]) -> None:
    with pytest.raises(ValueError, match="boom"):
        torch.futures.wait_all([future, rpc_async("w2", fail)])


def awaited(future: Future[Any]) -> None:
    async def wait() -> Any:
        return await future

    with pytest.raises(ValueError, match="boom"):
        asyncio.run(wait())


@pytest.mark.parametrize("begin", [failed, lambda: rpc_async("w1", fail)], ids=["failed before", "fails meanwhile"])
@pytest.mark.parametrize("see", [waited, asked, called_back, gone_on_with, collected, all_waited_for, awaited])
def test_a_retrieved_failure_is_not_logged(
    see: Callable[[Future[Any]], None], begin: Callable[[], Future[Any]], log: Heard
) -> None:
    future = begin()
    if see is asked and begin is not failed:
        waited(future)
    see(future)
    del future
    gc.collect()
    failed("another").heed()
    assert not log.said


def test_the_failure_of_an_own_future_with_a_callback_is_not_logged(log: Heard) -> None:
    future: Future[Any] = Future()
    future.add_done_callback(lambda _: None)
    future.set_exception(ValueError("boom"))
    del future
    assert not log.said


def test_the_failed_creation_of_an_unused_reference_is_logged(log: Heard) -> None:
    remote("w1", fail)
    assert log.told.wait(PATIENCE)
    (said,) = log.said
    assert f"{__name__}.fail on worker 'w1' failed" in said


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


def test_the_failure_of_a_call_with_a_dropped_future_is_logged(log: Heard) -> None:
    rpc_async("w1", fail)
    assert log.told.wait(PATIENCE)
