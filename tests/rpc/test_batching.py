"""Tests of `functions.batch`: calls that run in batches."""

import asyncio
import copy
import pickle
import threading
from collections import Counter
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import pytest
import torch

import telegrad.autograd as autograd
from telegrad._core.worker import current
from telegrad.autograd.contexts import entered_id
from telegrad.errors import UsageError
from telegrad.rpc import RRef, functions, remote, rpc_async
from tests.cluster import PATIENCE, in_threads, next_turn

pytestmark = pytest.mark.usefixtures("here")

LONG = 60.0  # seconds: a batch that waited for this would fail its test


class Adder:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    @functions.batch(max_size=4, max_wait=LONG)
    async def full(self, values: list[Any], amounts: Any = 1) -> list[Any]:
        self.sizes.append(len(values))
        return [value + amount for value, amount in zip(values, amounts, strict=True)]

    @functions.batch(max_size=100, max_wait=0.02)
    async def timely(self, values: list[int]) -> list[int]:
        self.sizes.append(len(values))
        return [value * 2 for value in values]

    @functions.batch(max_size=2, max_wait=LONG)
    async def fails(self, values: list[int]) -> NoReturn:
        raise KeyError("no such")

    @functions.batch(max_size=2, max_wait=LONG)
    async def forgets(self, values: list[int]) -> list[int]:
        return values[:1]

    @functions.batch(max_size=2, max_wait=LONG)
    async def first(self, values: list[Any]) -> Any:
        return values[0]

    @functions.batch(max_size=1, max_wait=LONG)
    async def context(self, values: list[torch.Tensor]) -> list[tuple[bool, bool]]:
        assert entered_id() is None
        return [(torch.is_grad_enabled(), value.requires_grad) for value in values]

    @functions.batch(max_size=2, max_wait=LONG)
    async def modes(self, values: list[torch.Tensor]) -> list[Any]:
        found = (values[0] @ values[0]).dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with torch.no_grad():
            await next_turn()  # while other batches begin
        return [found] * len(values)

    @functions.batch(max_size=2, max_wait=LONG)
    async def times(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(torch.stack(values) * 3)

    def seen(self) -> list[int]:
        return self.sizes


@functions.batch(max_size=2, max_wait=LONG)
async def pair(values: list[int]) -> list[int]:
    return [len(values)] * len(values)


def test_a_batch_runs_once_it_is_full() -> None:
    adder = remote("w1", Adder)
    calls = [adder.rpc_async().full(torch.ones(2) * i, amounts=i) for i in range(8)]
    assert [call.wait().tolist() for call in calls] == [[2 * i, 2 * i] for i in range(8)]
    assert adder.rpc_sync().seen() == [4, 4]


def test_a_batch_runs_when_its_first_call_has_waited_long_enough() -> None:
    adder = remote("w1", Adder)
    assert [call.wait() for call in [adder.rpc_async().timely(i) for i in range(3)]] == [0, 2, 4]
    assert sum(adder.rpc_sync().seen()) == 3


def test_callers_on_several_workers_share_a_batch() -> None:
    adder = remote("w1", Adder)
    calls = [rpc_async(worker, use, (adder,)) for worker in ("w0", "w1", "w1", "w2")]
    assert ([call.wait() for call in calls], adder.rpc_sync().seen()) == ([6] * 4, [4])


def use(adder: RRef[Adder]) -> int:
    return adder.rpc_async().full(5).wait()


def test_each_object_has_batches_of_its_own() -> None:
    one, other = remote("w1", Adder), remote("w1", Adder)
    calls = [each.rpc_async().full(1) for each in (one, other) for _ in range(3)]
    assert not any(call.done() for call in calls)
    calls += [each.rpc_async().full(1) for each in (one, other)]
    assert [call.wait() for call in calls] == [2] * 8


def test_calls_in_equal_modes_share_a_batch_that_runs_in_these_modes() -> None:
    adder, given = remote("w1", Adder), torch.ones(2, 2)
    calls = []
    for _ in range(2):
        calls.append(adder.rpc_async().modes(given))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            calls.append(adder.rpc_async().modes(given))
        with torch.inference_mode():
            calls.append(adder.rpc_async().modes(given))
    wanted = [(torch.float32, True, False), (torch.bfloat16, False, False), (torch.float32, False, True)]
    assert [call.wait() for call in calls] == wanted * 2


def test_gradients_flow_through_a_batch() -> None:
    adder = remote("w1", Adder)
    given = [torch.ones(2, requires_grad=True) for _ in range(2)]
    with autograd.context() as context:
        calls = [adder.rpc_async().times(each) for each in given]
        autograd.backward(context, [sum(call.wait().sum() for call in calls)])
        found = autograd.get_gradients(context)
        assert [found[each].tolist() for each in given] == [[3, 3], [3, 3]]


def test_a_batched_function_is_pickled_by_its_name() -> None:
    assert [call.wait() for call in [rpc_async("w2", pair, (i,)) for i in range(2)]] == [2, 2]
    assert pickle.loads(pickle.dumps(pair)) is pair


async def test_a_batched_method_works_in_a_class_sent_by_value() -> None:
    class Doubler:
        @functions.batch(max_size=2, max_wait=LONG)
        async def double(self, values: list[int]) -> list[int]:
            return [2 * value for value in values]

    there = cloudpickle.loads(cloudpickle.dumps(Doubler))()
    assert [*await asyncio.gather(there.double(1), there.double(2))] == [2, 4]


def test_an_object_with_used_batches_can_be_pickled() -> None:
    adder = Adder()
    assert adder.full is adder.full
    copied = pickle.loads(pickle.dumps(adder))
    assert copied.full is not adder.full
    assert copied.sizes == []


def test_the_batches_of_a_copied_object_use_the_copy() -> None:
    adder = Adder()
    assert asyncio.run(adder.timely(1)) == 2
    copied = copy.copy(adder)
    copied.sizes = []
    assert asyncio.run(copied.timely(2)) == 4
    assert (adder.sizes, copied.sizes) == ([1], [1])


NO_RESULTS = ["ab", b"ab", {1, 2}, {1: 1, 2: 2}, Counter("ab"), np.ones(3), torch.tensor(3), 3]


@pytest.mark.parametrize(
    ("method", "value", "error"),
    [("fails", 1, KeyError), ("forgets", 1, ValueError), *(("first", each, ValueError) for each in NO_RESULTS)],
)
def test_an_error_of_a_batch_is_raised_for_each_caller(method: str, value: Any, error: type[Exception]) -> None:
    adder = remote("w1", Adder)
    for call in [getattr(adder.rpc_async(), method)(value) for _ in range(2)]:
        with pytest.raises(
            error, match=r"no such|returned (1 result|3 results|.*, not a list,) for a batch of 2"
        ) as caught:
            call.wait()
        assert f"On worker 'w1', in Adder.{method}" in str(caught.value)


def test_a_call_with_wrong_arguments_does_not_disturb_its_batch() -> None:
    adder = remote("w1", Adder)
    good = [adder.rpc_async().full(1) for _ in range(3)]
    with pytest.raises(TypeError, match="missing a required argument"):
        adder.rpc_async().full().wait()
    assert adder.rpc_async().full(1).wait() == 2
    assert [call.wait() for call in good] == [2] * 3


def test_a_batch_runs_outside_of_its_callers_contexts() -> None:
    adder = remote("w1", Adder)
    with autograd.context(), torch.no_grad():
        assert adder.rpc_async().context(torch.ones(1)).wait() == (False, False)


def test_a_batch_whose_loop_has_ended_does_not_delay_the_next() -> None:
    adder = Adder()

    async def give_up() -> None:
        waiting = asyncio.ensure_future(adder.timely(1))
        await next_turn()
        waiting.cancel()

    async def wait() -> int:
        return await asyncio.wait_for(adder.timely(2), PATIENCE)

    asyncio.run(give_up())
    assert asyncio.run(wait()) == 4
    assert adder.sizes == [1]
    assert not adder.timely._waiting


def test_each_loop_has_batches_of_its_own() -> None:
    adder, waits = Adder(), threading.Event()

    async def one(value: int) -> int:
        call = asyncio.ensure_future(adder.timely(value))
        await next_turn()
        waits.set()
        return await asyncio.wait_for(call, PATIENCE)

    def second() -> int:
        assert waits.wait(PATIENCE)
        return asyncio.run(one(2))

    assert in_threads(lambda: asyncio.run(one(1)), second) == [2, 4]


def test_functions_that_cannot_run_in_batches_are_refused() -> None:
    with pytest.raises(UsageError, match="async def"):
        functions.batch(2, 1)(lambda values: values)

    async def named(*, values: list[int]) -> list[int]:
        return values

    with pytest.raises(UsageError, match="keyword-only"):
        functions.batch(2, 1)(named)


def test_calls_of_many_threads_share_batches() -> None:
    adder = remote("w1", Adder)
    worker = current.here()
    results: list[int] = []

    def call() -> None:
        current.enter(worker)
        results.extend(adder.rpc_async().timely(i).wait() for i in range(20))

    in_threads(*[call] * 8)
    assert sorted(results) == sorted(2 * i for i in range(20) for _ in range(8))
    assert max(adder.rpc_sync().seen()) > 1
