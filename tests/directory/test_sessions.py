"""Tests of a client's connections to a directory: the choice of the endpoint, repetitions, and the end of waits."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from telegrad._core.stores import directory_client as client
from telegrad._core.stores.directory import DirectoryLost
from telegrad._core.stores.directory_client import Sessions, Unanswered, Unsent
from telegrad.errors import StoreUntrusted
from tests.cluster import wait_until
from tests.directory.harness import LONG, SOON


class Fake:
    """A connection that can be told to fail."""

    def __init__(self, endpoint: int, down: set[int]) -> None:
        self.endpoint, self.down = endpoint, down
        self.is_quiet, self.is_closed, self.woken = True, False, threading.Event()

    def open(self, deadline: float) -> None:
        if self.endpoint in self.down:
            raise ConnectionRefusedError("refused")

    def usable(self) -> bool:
        return self.is_quiet

    def interrupt(self) -> None:
        self.woken.set()

    def close(self) -> None:
        self.is_closed = True


class World:
    """A client of a few endpoints."""

    def __init__(self, endpoints: int = 3, patience: float = 5.0) -> None:
        self.down: set[int] = set()
        self.made: list[Fake] = []
        names = [f"e{n}" for n in range(endpoints)]
        self.sessions = Sessions(self.make, names, patience, "the engine", "See whether it runs.")
        self.sessions.current = 0

    def make(self, endpoint: int) -> Fake:
        self.made.append(Fake(endpoint, self.down))
        return self.made[-1]

    def ask(self, *errors: Exception, repeat: bool = True) -> list[int]:
        """Run an operation of which the first attempts fail; return the endpoints that had it."""
        asked, left = [], list(errors)

        def operation(session: Fake, deadline: float) -> None:
            asked.append(session.endpoint)
            if left:
                raise left.pop(0)

        self.sessions.run(operation, repeat)
        return asked


def test_the_next_endpoint_is_asked_if_one_fails() -> None:
    world = World()
    world.down |= {0, 1}
    assert (world.ask(), [each.endpoint for each in world.made]) == ([2], [0, 1, 2])
    world.down.clear()
    assert world.ask(Unanswered("slow")) == [2, 0]
    assert world.ask(OSError("broke")) == [0, 1]
    assert world.ask(Unsent("busy"), repeat=False) == [1, 2]


def test_a_write_with_an_unknown_outcome_is_not_repeated() -> None:
    world = World()
    for error in (Unanswered("slow"), TimeoutError()):
        with pytest.raises(DirectoryLost, match=r"the engine did not confirm the write.*read the key again"):
            world.ask(error, repeat=False)
    assert world.sessions.current == 2


def test_an_error_of_this_package_is_final() -> None:
    world = World()
    with pytest.raises(StoreUntrusted):  # StoreUntrusted is an OSError
        world.ask(StoreUntrusted("altered"))
    assert world.made[0].is_closed


def test_pauses_come_after_each_round_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    world, pauses = World(2), list[float]()
    monkeypatch.setattr(client._random, "random", lambda: 0.5)
    monkeypatch.setattr(world.sessions, "wait", pauses.append)
    assert len(world.ask(*(Unsent("busy") for _ in range(12)))) == 13
    assert pauses[::2] == [0.0] * 6
    assert pauses[1::2] == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_request_fails_after_the_patience() -> None:
    world = World(2, 0.2)
    world.down |= {0, 1}
    began = time.monotonic()
    with pytest.raises(DirectoryLost, match=r"did not answer within 0\.2 s \(e0: refused; e1: refused\)\. See whether"):
        world.sessions.run(lambda session, deadline: None)
    assert 0.2 <= time.monotonic() - began < SOON


def test_connections_are_kept_while_they_are_quiet() -> None:
    world = World(1)
    for _ in range(5):
        world.ask()
    assert len(world.made) == 1
    world.made[0].is_quiet = False  # the peer has closed it
    world.ask(repeat=False)
    assert [each.is_closed for each in world.made] == [True, False]


def test_a_close_ends_waiting_requests() -> None:
    world = World(1)
    world.ask()

    def wait(session: Fake, deadline: float) -> None:
        session.woken.wait(LONG)
        raise OSError("woken")

    def fail(session: Fake, deadline: float) -> None:
        raise Unsent("busy")

    asked: list[Callable[[Fake, float], None]] = [wait, wait, fail]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(world.sessions.run, each) for each in asked]
        wait_until(lambda: len(world.made) == 3)
        world.sessions.close()
        for each in waiting:
            with pytest.raises(DirectoryLost, match="closed"):
                each.result(SOON)
    with pytest.raises(DirectoryLost, match="closed"):
        world.ask()
    assert all(each.is_closed for each in world.made)
