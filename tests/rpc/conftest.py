"""Fixtures: a group of one caller and five actors."""

from collections.abc import Iterator

import pytest

import telegrad.rpc as rpc
from telegrad._core.worker.current import Worker
from tests.cluster import agents_here


@pytest.fixture(scope="module")
def team() -> Iterator[list[Worker]]:
    """Start `w0`, the current worker of this thread, and the actors `w1` to `w5`."""
    with agents_here(6, role_of=lambda rank: "actor" if rank else "") as made:
        yield made


@pytest.fixture
def actors(team: list[Worker]) -> rpc.Group:
    return rpc.group("actor")
