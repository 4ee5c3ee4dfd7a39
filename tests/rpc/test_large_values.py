"""Tests of large values that are not tensors: each kind of call delivers them as plain pickle would."""

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import telegrad.rpc as rpc
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from tests.cluster import agents_here, in_threads
from tests.trees import DATA, LARGE, TREES, Record, alike

ANY = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


pytestmark = pytest.mark.usefixtures("three")


@pytest.fixture(scope="module", params=["unix", pytest.param("tcp", marks=pytest.mark.nightly)])
def three(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    with agents_here(3, transport=request.param) as made:
        yield made


def same(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def twice(value: Any) -> Iterator[Any]:
    yield value
    yield [value]


@ANY
@given(TREES)
def test_any_value_arrives_by_any_kind_of_call(value: Any) -> None:
    alone = pickle.loads(pickle.dumps(value, 5))
    for to in ("w1", "w0"):
        assert alike(rpc.rpc_sync(to, same, (value,), {"key": value}), ((alone,), {"key": alone}))
        assert alike(rpc.rpc_async(to, same, (value, 1)).wait(), ((alone, 1), {}))
        assert alike(list(rpc.rpc_stream(to, twice, (value,))), [alone, [alone]])
        assert alike(rpc.remote(to, same, (), {"key": value}).to_here(), ((), {"key": alone}))
        assert alike(rpc.rpc_sync(to, lambda value: [value], (value,)), [alone])
    assert alike(rpc.rpc_sync("w1", lambda reference: reference.to_here(), (rpc.RRef(value),)), alone)
    answers = rpc.group(["w1", "w2", "w0"]).rpc_sync(same, (value,))
    assert all(alike(answer, ((alone,), {})) for answer in list(answers))


def test_a_received_value_shares_no_memory_with_the_sender() -> None:
    kept: list[Any] = [bytearray(DATA[:LARGE]), {"deep": bytearray(DATA[:LARGE])}]

    def change(value: Any) -> Any:
        value[0][:4] = b"else"
        value[1]["deep"] += b"more"
        return value

    for to in ("w1", "w0"):
        back = rpc.rpc_sync(to, change, (kept,))
        assert (back[0][:4], kept) == (b"else", [DATA[:LARGE], {"deep": DATA[:LARGE]}])
        again = rpc.rpc_sync(to, change, (kept,))  # may be received in reused memory
        again[0][4:8] = b"here"
        assert back[0][4:] == DATA[4:LARGE]


def test_large_values_of_many_threads_do_not_mix() -> None:
    values = [bytes([number]) * (LARGE + number) for number in range(16)]

    def send(value: bytes) -> Any:
        current.enter(first)
        return [rpc.rpc_sync("w1", same, (value, Record("x", value)))[0] for _ in range(5)]

    first = current.here()
    for value, found in zip(values, in_threads(*[partial(send, value) for value in values]), strict=True):
        assert all(each == (value, Record("x", value)) for each in found)


def raises(value: Any) -> None:
    raise ValueError("bad", value)


def test_a_large_value_in_an_exception_arrives() -> None:
    with pytest.raises(ValueError, match="bad") as caught:
        rpc.rpc_sync("w1", raises, (DATA[:LARGE],))
    assert caught.value.args[1] == DATA[:LARGE]
