"""Functions that raise what cannot be read: each call ends, and its slot is given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from telegrad._core.rpc import remote_calls
from telegrad._core.worker import current
from telegrad.errors import TelegradError
from tests.cluster import PATIENCE, agents
from tests.wire.test_failures import HIDDEN, Nameless, hides

KINDS = [*HIDDEN, "metaclass"]


def raises(name: str) -> None:
    raise Nameless("x") if name == "metaclass" else hides(name, KeyError)


async def raises_later(name: str) -> None:
    raises(name)


@pytest.mark.parametrize("function", [raises, raises_later], ids=lambda each: each.__name__)
def test_calls_end_and_slots_are_free(function: Callable[[str], Any]) -> None:
    with agents(2, num_worker_threads=2) as (worker, _):
        current.enter(worker)
        for name in KINDS:
            futures = [remote_calls.rpc_async("w1", function, (name,), timeout=PATIENCE) for _ in range(3)]
            made = remote_calls.remote("w1", function, (name,), timeout=PATIENCE)
            for wait in (*[future.wait for future in futures], made.to_here):
                with pytest.raises(Exception, match="w1") as raised:
                    wait()
                assert not isinstance(raised.value, TelegradError) or "timeout" not in str(raised.value)
        assert remote_calls.rpc_sync("w1", pow, (2, 3), timeout=PATIENCE) == 8
        current.enter(None)
