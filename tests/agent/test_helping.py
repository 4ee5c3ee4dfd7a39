"""Tests of the work that a waiting thread does itself, and of the work that it leaves to others."""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from telegrad import rpc
from telegrad._core.calls.futures import Future
from telegrad._core.reactor import reactor as reactors
from telegrad._core.reactor.scheduler import Work
from telegrad._core.transport.reading import ReadOwner, ReadRight
from telegrad._core.worker import current
from tests.cluster import PATIENCE, agents_here, wait_until


class Reactor:
    """A reactor that only notes its work."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def submit(self, work: Work, queue: object = None) -> None:
        self.given.append(work.argument)


class Link:
    """A link that brings something at each read, until nothing is left."""

    def __init__(self, *reads: Callable[[], object]) -> None:
        self.watched = False
        reader: Any = SimpleNamespace(awaits_lanes=False)
        watch = partial(setattr, self, "watched")
        self.reading = ReadRight(threading.Lock(), watch, lambda: True, lambda: None, reader, bool)
        self.reading.watch()
        self._reads = list(reads)

    def read(self) -> None:
        if self._reads:
            self._reads.pop(0)()

    def stop_reading(self) -> None:
        self.reading.give_back()


@pytest.fixture
def reactor() -> Reactor:
    return Reactor()


# Stand-ins for the agent's own functions


def submit(reactor: Any, work: Work) -> None:
    reactors.submit_here(reactor, work)


def run_for(future: Future[None], links: Any, reactor: Any) -> None:
    reactors.run_for(future, links, reactor)


def errand(reactor: Reactor, done: list[str], name: str, then: Callable[[], None] = lambda: None) -> Callable[[], None]:
    def act(argument: str) -> None:
        done.append(argument)
        then()

    return lambda: submit(reactor, Work(act, name))


def test_a_waiting_thread_does_what_it_reads_and_what_follows(reactor: Reactor) -> None:
    done: list[str] = []
    future: Future[None] = Future()
    second = errand(reactor, done, "second", lambda: future.set_result(None))
    link = Link(errand(reactor, done, "first", second))
    run_for(future, [link], reactor)
    assert (done, reactor.given) == (["first", "second"], [])
    assert link.watched
    assert link.reading.owner is ReadOwner.LEADER


def test_a_waiting_thread_leaves_further_work_to_others(reactor: Reactor) -> None:
    done: list[str] = []
    future: Future[None] = Future()
    several = [errand(reactor, done, name) for name in "abc"]
    run_for(future, [Link(lambda: [each() for each in several])], reactor)
    assert (done, reactor.given) == (["a"], ["b", "c"])


def test_work_after_the_wait_is_left_to_others(reactor: Reactor) -> None:
    done: list[str] = []
    run_for(Future(), [Link()], reactor)
    errand(reactor, done, "later")()
    assert (done, reactor.given) == ([], ["later"])


def test_a_waiting_thread_takes_no_connection_from_its_reader(reactor: Reactor) -> None:
    link = Link(lambda: pytest.fail("read by two"))
    assert link.reading.take()
    run_for(Future(), [link], reactor)
    assert link.reading.owner is ReadOwner.WAITER


def test_a_connection_that_ends_during_a_wait_is_forgotten(reactor: Reactor) -> None:
    link: Link = Link(lambda: link.reading.end())
    run_for(Future(), [link], reactor)
    assert not link.watched


def test_an_error_in_work_done_while_waiting_is_only_logged(reactor: Reactor, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: None) -> NoReturn:
        raise KeyError("inside")

    run_for(Future(), [Link(lambda: submit(reactor, Work(fail, None)))], reactor)
    assert "inside" in caplog.text


go = threading.Event()


class Slow(Exception):
    def __reduce__(self) -> Any:
        return rebuilt, ()


def rebuilt() -> Slow:
    assert current.agent().name == "w1" or go.wait(PATIENCE)
    return Slow()


def fail() -> NoReturn:
    raise Slow


def test_a_worker_answers_while_it_rebuilds_an_exception() -> None:
    with agents_here(2) as (_, other):
        made: rpc.RRef[None] = rpc.remote("w1", fail)
        wait_until(lambda: other.agent.served and other.agent.idle)
        assert other.agent.call("w0", abs, (-1,), None) == 1
        go.set()
        with pytest.raises(Slow):
            made.to_here()


def test_a_call_ends_although_a_device_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents_here(2) as (one, _):
        monkeypatch.setattr(one.agent.streams, "aside", Mock(side_effect=RuntimeError("the device has failed")))
        monkeypatch.setattr(one.agent.streams, "used", (0,))
        future, errors = rpc.rpc_async("w1", abs, (-1,)), list[Any]()
        future.add_done_callback(errors.append)
        wait_until(lambda: errors)
        with pytest.raises(RuntimeError, match="the device has failed"):
            future.value()
        monkeypatch.undo()
