"""A fixture of the tests that differentiate through agents of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from telegrad.rpc.worker import Worker
from tests.cluster import wait_until


@pytest.fixture
def contexts_end(five: list[Worker], here: None) -> Iterator[None]:
    """This thread speaks for `w0`, and no worker keeps a context of the test."""
    yield
    wait_until(lambda: not any(len(worker.conductor.contexts) for worker in five))
