"""What tests of any engine need: a server that can fail, clients that are closed, waits that end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from telegrad.directory.protocol import Directory, Entry, Event, Swap

SOON = 1.0  # seconds in which an idle engine answers on a busy machine
LONG = 60.0  # a ttl that does not end within a test
PATIENCE = 20.0


class Engine(Protocol):
    """A server of one engine, as its tests start it."""

    ttl: float  # seconds of the shortest lease that the tests ask for
    slack: float  # seconds by which a key may outlive the end of its lease
    survives: bool  # whether a server that was killed has its state when it is started again

    def client(self, patience: float = 10.0) -> Directory: ...

    def kill(self) -> None:
        """End the server as SIGKILL does."""

    def start(self) -> None:
        """Start the server that was killed again: with its state where it survives, at the same address."""

    def pause(self) -> None:
        """Stop the server as SIGSTOP does."""

    def resume(self) -> None: ...

    def forget(self) -> None:
        """Have the engine forget all changes until now."""


Make = Callable[..., Directory]


class Fixtures:
    """What the tests of `Contract` and `Faults` are given."""

    @pytest.fixture
    def make(self, engine: Engine) -> Iterator[Make]:
        """Make a client that is closed behind the test."""
        made: list[Directory] = []

        def make(patience: float = PATIENCE) -> Directory:
            made.append(engine.client(patience))
            return made[-1]

        yield make
        for client in made:
            client.close()

    @pytest.fixture
    def client(self, make: Make) -> Directory:
        return make()

    @pytest.fixture
    def place(self) -> str:
        """The prefix of the test's own keys."""
        return f"test-{secrets.token_hex(6)}/"


def read(client: Directory, key: str) -> Entry | None:
    """Return what stands under one key."""
    return next((entry for entry in client.list(key).entries if entry.key == key), None)


def written(swap: Swap) -> Entry:
    assert swap.done
    assert swap.entry is not None
    return swap.entry


def wait_for(client: Directory, prefix: str, since: int, wanted: Callable[[Event], bool], limit: float) -> list[Event]:
    """Watch until a change is `wanted`; return all until then."""
    seen: list[Event] = []
    ends = time.monotonic() + limit
    while not any(map(wanted, seen)):
        left = ends - time.monotonic()
        assert left > 0, f"not within {limit} s; seen: {seen}"
        since, events = client.watch(prefix, since, left)
        seen += events
    return seen


def is_gone(event: Event) -> bool:
    return event.entry is None
