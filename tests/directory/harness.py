"""Helpers for tests of any engine: a server that can fail, clients that are closed, waits that end."""

import contextlib
import itertools
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import pytest
from hypothesis import strategies as st

from telegrad._core.stores.directory import Directory, DirectoryLost, Entry, Event, LeaseLost, Swap
from telegrad.errors import NotInitialized

SOON = 1.0  # seconds in which an idle engine answers on a busy machine
LONG = 60.0  # a ttl that does not end within a test
PATIENCE = 20.0


class Engine(Protocol):
    """A server of one engine, as its tests start it."""

    ttl: float  # seconds of the shortest lease that the tests ask for
    slack: float  # seconds by which a key may outlive the end of its lease

    def client(self, patience: float = 10.0) -> Directory: ...

    def kill(self) -> None:
        """End the server as SIGKILL does."""

    def start(self) -> None:
        """Restart the killed server at the same address, with its state."""

    def pause(self) -> None:
        """Stop the server as SIGSTOP does."""

    def resume(self) -> None: ...

    def forget(self) -> None:
        """Let the engine forget all changes until now."""


Make = Callable[..., Directory]


class Fixtures:
    """Fixtures for the tests of `Contract` and `Faults`."""

    @pytest.fixture
    def make(self, engine: Engine) -> Iterator[Make]:
        """Yield a function that makes clients, which are closed after the test."""
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
        """Return the prefix of the test's own keys."""
        return f"test-{secrets.token_hex(6)}/"


def read(client: Directory, key: str) -> Entry | None:
    """Return the entry of a key."""
    return next((entry for entry in client.list(key).entries if entry.key == key), None)


def written(swap: Swap) -> Entry:
    assert swap.done
    assert swap.entry is not None
    return swap.entry


def wait_for(client: Directory, prefix: str, since: int, wanted: Callable[[Event], bool], limit: float) -> list[Event]:
    """Watch until a change is `wanted`; return all changes until then."""
    seen: list[Event] = []
    ends = time.monotonic() + limit
    while not any(map(wanted, seen)):
        left = ends - time.monotonic()
        assert left > 0, f"not within {limit} s; seen: {seen}"
        since, events = client.watch(prefix, since, left)
        seen += events
    return seen


class Act(NamedTuple):
    """An act of an owner between two times of one clock."""

    token: int
    start: float
    stop: float


def contend(client: Directory, key: str, ttl: float, seed: int, until: threading.Event) -> list[Act]:
    """Claim a key again and again, own it for a while, and let the lease end or revoke it; return the acts."""
    chance, acts = random.Random(seed), []
    while not until.is_set():
        try:
            lease = client.grant(ttl)
            swap = client.swap(key, b"%d" % seed, lease=lease)
            if not swap.done:
                client.revoke(lease)
                client.watch(key, swap.entry.revision, ttl)
                continue
        except (DirectoryLost, LeaseLost):  # a claim with an unknown outcome is not used
            continue
        start = time.monotonic()
        for _ in range(chance.randrange(4)):
            until.wait(lease.ttl / 3)
            try:
                lease = client.renew(lease)
            except (DirectoryLost, LeaseLost):
                break
        is_revoked = chance.random() < 0.5
        if not is_revoked:
            until.wait(max(0.0, lease.ends - time.monotonic()))
        acts.append(Act(swap.entry.created, start, min(lease.ends, time.monotonic())))
        if is_revoked:
            with contextlib.suppress(DirectoryLost):
                client.revoke(lease)
    return acts


def check_acts(acts: list[Act]) -> None:
    """Check that two owners have never acted at once, and that later ones have higher tokens."""
    acts = sorted(act for act in acts if act.stop > act.start)
    for act, next_ in itertools.pairwise(acts):
        assert act.token < next_.token
        assert act.stop <= next_.start, (act, next_)


def altered(value: Any, data: st.DataObject, values: st.SearchStrategy[Any]) -> Any:
    """Return an answer with one part replaced or removed."""
    if not isinstance(value, dict | list) or not value or data.draw(st.integers(0, 3)) == 0:
        return data.draw(values)
    changed = value.copy()
    key = data.draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
    if data.draw(st.booleans()):
        changed[key] = altered(value[key], data, values)
    else:
        del changed[key]
    return changed


def is_gone(event: Event) -> bool:
    return event.entry is None


def assert_refused_in_a_child(client: Directory) -> None:
    """Check that a forked process may not use the client, but may close it."""
    child = os.fork()
    if not child:
        status = 1
        try:
            client.list("")
        except NotInitialized:
            client.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
