"""What a waiting thread does itself, and what it leaves to others."""

from __future__ import annotations

import threading

import pytest

from telegrad.agent import helping
from telegrad.agent.futures import Future
from telegrad.agent.reactor import INSTANT, Work
from telegrad.transport.reading import Owner, Reading


class Reactor:
    """Only notes what it is asked."""

    def __init__(self):
        self.given = []

    def submit(self, work):
        self.given.append(work.argument)


class Link:
    """Brings something at each read, as long as there is any."""

    def __init__(self, *reads):
        self.watched = False
        self.reading = Reading(
            threading.Lock(), lambda read: setattr(self, "watched", read), lambda: True, lambda: None
        )
        self.reading.watch()
        self._reads = list(reads)

    def read(self):
        if self._reads:
            self._reads.pop(0)()

    def stop_reading(self):
        self.reading.give_back()


@pytest.fixture
def reactor():
    return Reactor()


def errand(reactor, done, name, then=lambda: None):
    def act(argument):
        done.append(argument)
        then()

    return lambda: helping.submit(reactor, Work(act, name, INSTANT))


def test_does_what_it_reads_and_what_follows_from_that(reactor):
    done, future = [], Future()
    second = errand(reactor, done, "second", lambda: future.set_result(None))
    link = Link(lambda: None, errand(reactor, done, "first", second))
    helping.run_for(future, [link], reactor)
    assert done == ["first", "second"]
    assert reactor.given == []
    assert link.watched
    assert link.reading.owner is Owner.LEADER


def test_leaves_the_rest_to_others_since_it_may_wait_for_it(reactor):
    done, future = [], Future()
    several = [errand(reactor, done, name) for name in "abc"]
    helping.run_for(future, [Link(lambda: [each() for each in several])], reactor)
    assert done == ["a"]
    assert reactor.given == ["b", "c"]


def test_only_for_a_moment(reactor):
    done = []
    helping.run_for(Future(), [Link()], reactor)
    errand(reactor, done, "later")()
    assert done == []
    assert reactor.given == ["later"]


def test_does_not_take_a_connection_from_one_who_reads_it(reactor):
    link = Link(lambda: pytest.fail("read by two"))
    assert link.reading.take()
    helping.run_for(Future(), [link], reactor)
    assert link.reading.owner is Owner.WAITER


def test_a_connection_that_ends_is_forgotten(reactor):
    link = Link(lambda: link.reading.end())
    helping.run_for(Future(), [link], reactor)
    assert not link.watched


def test_an_error_in_an_errand_is_not_that_of_the_wait(reactor, caplog):
    def fail(_):
        raise KeyError("inside")

    link = Link(lambda: helping.submit(reactor, Work(fail, None, INSTANT)))
    helping.run_for(Future(), [link], reactor)
    assert "inside" in caplog.text
