"""Tests of a failed call's exception: it is freed without the garbage collector, also while stacks are inspected."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad import rpc
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.reporting.introspection import introspection_of
from tests.cluster import next_turn, wait_until

_alive: list[weakref.ref[Any]] = []
_look: list[Callable[[], object]] = []


class Refused(Exception):
    def __str__(self) -> str:
        for look in _look:  # the callee describes the error here
            look()
        return "no"


def refuse() -> None:
    error = Refused("no")
    _alive.append(weakref.ref(error))
    try:
        raise error
    finally:
        del error


async def refuse_later() -> None:
    await next_turn()
    refuse()


def refuse_in_stream() -> Iterator[int]:
    yield 1
    refuse()


class Refusing:
    def method(self) -> None:
        refuse()


def call(kind: str) -> None:
    to = "w0" if kind == "to itself" else "w1"
    if kind == "stream":
        list(rpc.rpc_stream(to, refuse_in_stream))
    elif kind == "method":
        rpc.remote(to, Refusing).rpc_sync().method()
    else:
        function = refuse_later if kind == "async def" else refuse
        rpc.rpc_sync(to, function, idempotent=kind == "idempotent")


@pytest.mark.parametrize("looked", ["at nothing", "by telegrad"])
@pytest.mark.parametrize("kind", ["plain", "async def", "stream", "to itself", "method", "idempotent"])
def test_a_failed_call_leaves_no_cycle(pair: list[Worker], kind: str, looked: str) -> None:
    looks: dict[str, list[Callable[[], object]]] = {
        "at nothing": [],
        "by telegrad": [introspection_of(each).observer.account for each in pair],
    }
    current.enter(pair[0])
    gc.disable()
    try:
        _look[:] = looks[looked]
        for _ in range(3):
            try:
                call(kind)
            except Exception:
                pass
            else:
                pytest.fail("it did not fail")
        assert len(_alive) == 3
        wait_until(lambda: not any(each() is not None for each in _alive))
    finally:
        gc.enable()
        _look.clear()
        _alive.clear()
        current.enter(None)
