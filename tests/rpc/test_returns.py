"""Tests of calls that wait for their worker, and of idempotent calls, which are repeated but run once."""

import asyncio
import contextlib
import operator
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import telegrad.rpc as rpc
from telegrad import autograd, errors
from telegrad._core.agent.pending_call import SEARCH_PAUSE
from telegrad._core.calls.cancelling import Nested, Served, serving
from telegrad._core.membership.membership import Membership
from telegrad._core.rpc.idempotency import IdempotentCalls
from telegrad._core.rpc.retry_queue import Failure, RetryQueue, classify
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from tests import links
from tests.cluster import PATIENCE, agents_here, in_background, wait_until
from tests.rpc.test_publishing import Crowd

LATER = 0.3  # seconds until a worker joins


class Stage(Crowd):
    """A dynamic group in this process, whose workers come and go."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.all: list[Worker] = []

    def come(self, name: str, **options: Any) -> Worker:
        self.all.append(self.add(name, len(self.all), **options))
        return self.all[-1]

    def later(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Have a worker join in a moment, while the block runs."""
        return in_background(self.come, name, after=LATER)

    def crash(self, worker: Worker) -> None:
        """End a worker as if its process were killed: its entries stay in the store."""
        worker.directory.leave = lambda *_: None
        links.shut([*links.accepted(worker), *links.made(worker)])
        worker.end("")
        wait_until(lambda: not any(is_open(other, worker) for other in self.all))


def is_open(caller: Worker, to: Worker) -> bool:
    """Return True if the caller has a connection to that worker, as far as it knows."""
    peer = caller.agent._connections._peers.get(to.agent.incarnation)
    return peer is not None and peer.link is not None


@pytest.fixture
def stage(tmp_path: pathlib.Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    current.enter(made.come("boss"))
    yield made
    current.enter(None)
    for worker in made.all:
        if not worker.agent.closed:
            worker.end("")


def who() -> str:
    """Return the incarnation of the worker that runs this."""
    return current.agent().incarnation


# Waiting


def test_a_call_waits_for_a_worker_that_has_never_joined(stage: Stage) -> None:
    with stage.later("x"):
        assert rpc.rpc_sync("x", operator.add, (1, 2), wait_for_worker=True) == 3


@pytest.mark.parametrize("call", [rpc.rpc_sync, lambda *call, **how: rpc.remote(*call, **how).to_here()])
def test_a_profiled_call_waits_for_a_rank_that_has_never_joined(stage: Stage, call: Callable[..., Any]) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen, stage.later("x"):
        assert call(1, operator.add, (1, 2), wait_for_worker=True) == 3
    assert any("add(boss -> rank 1)" in event.name for event in seen.events())


def test_a_call_waits_for_a_worker_that_comes_back(stage: Stage) -> None:
    old = stage.come("x")
    assert rpc.rpc_sync("x", who) == old.agent.incarnation
    stage.crash(old)
    with stage.later("x"):
        found = rpc.rpc_async("x", who, wait_for_worker=True).wait()
    assert found == stage.all[-1].agent.incarnation != old.agent.incarnation
    assert rpc.rpc_sync("x", who) == found  # as does a call that does not wait


def test_the_error_of_a_call_that_does_not_wait_names_the_option(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "_watch_next", lambda _: None)  # else the end of "x" is noticed at once
    with pytest.raises(errors.UnknownWorker, match="with wait_for_worker=True, a call waits"):
        rpc.rpc_sync("x", who)
    stage.crash(stage.come("x"))  # no worker has called it, so none has noticed
    with pytest.raises(errors.PeerUnreachable, match="call rpc_sync or rpc_async with wait_for_worker=True"):
        rpc.rpc_sync("x", who)


def test_a_call_waits_no_longer_than_its_timeout(stage: Stage) -> None:
    began = time.monotonic()
    with pytest.raises(errors.CallTimeout, match=r"who on worker 'x' timed out: .* \(0.3 s\)\. could not find") as told:
        rpc.rpc_sync("x", who, timeout=0.3, wait_for_worker=True)
    assert 0.3 <= time.monotonic() - began < 3
    assert "\n" not in str(told.value)


def test_the_function_gets_the_time_that_is_left_after_the_wait(stage: Stage) -> None:
    with stage.later("x"):
        with pytest.raises(errors.CallTimeout, match=r"what was left of the 0\.8 s of this call"):
            rpc.rpc_sync("x", hold, ("x",), timeout=0.8, wait_for_worker=True)
        may_end.set()


def test_a_call_that_may_have_run_is_not_repeated(stage: Stage) -> None:
    old = stage.come("x")
    begun.clear()
    future = rpc.rpc_async("x", hold, ("a",), wait_for_worker=True)
    assert begun.wait(PATIENCE)
    stage.crash(old)
    stage.come("x")
    with pytest.raises(errors.PeerError, match="may or may not have run"):
        future.wait()
    may_end.set()


def test_remote_and_rpc_stream_block_until_the_worker_joins(stage: Stage) -> None:
    with stage.later("x"):
        reference = rpc.remote("x", torch.ones, (2,), wait_for_worker=True)
    assert reference.to_here().sum() == 2
    with stage.later("y"):
        assert list(rpc.rpc_stream("y", range, (3,), wait_for_worker=True)) == [0, 1, 2]
    with pytest.raises(errors.CallTimeout, match="timed out: the worker could not be called"):
        rpc.remote("z", torch.ones, (2,), timeout=0.2, wait_for_worker=True)


def test_the_wait_goes_on_if_the_worker_leaves_once_it_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.come("x")
    peer = current.agent().peer
    left: list[str] = []

    def find_later(to: Any) -> Any:
        if len(left) < 2:
            left.append(to)
            raise errors.UnknownWorker("it has left")
        return peer(to)

    monkeypatch.setattr(current.agent(), "peer", find_later)
    assert rpc.remote("x", torch.ones, (2,), wait_for_worker=True).to_here().sum() == 2
    assert left == ["x", "x"]
    left.clear()
    assert list(rpc.rpc_stream("x", range, (3,), wait_for_worker=True)) == [0, 1, 2]
    left.clear()
    with pytest.raises(errors.UnknownWorker):
        rpc.remote("x", torch.ones, (2,))


def test_a_reference_to_an_earlier_incarnation_is_lost(stage: Stage) -> None:
    old = stage.come("x")
    reference = rpc.remote("x", torch.ones, (2,))
    reference.to_here()
    stage.crash(old)
    stage.come("x")
    assert rpc.rpc_sync("x", who, wait_for_worker=True) == stage.all[-1].agent.incarnation
    with pytest.raises(errors.OwnerLost):
        reference.to_here()
    with pytest.raises(errors.PeerLost, match="worker 'x' is no longer in the group"):
        rpc.rpc_sync("boss", total, (reference,))  # which fetches the value from its owner


def test_a_live_worker_declared_lost_is_not_called_by_its_name(stage: Stage) -> None:
    old = stage.come("x")
    assert rpc.rpc_sync("x", who) == old.agent.incarnation
    stage.all[0].directory.registry.declare_lost(old.me.incarnation, "it was out of reach")
    anew = stage.come("x")
    current.here().membership.refresh()
    assert rpc.rpc_sync("x", who) == anew.agent.incarnation != old.agent.incarnation


def test_a_call_that_waits_can_be_cancelled(stage: Stage) -> None:
    future = rpc.rpc_async("x", who, wait_for_worker=True)
    assert "persistent call of" in repr(future)
    assert future.cancel()
    assert future.done()
    assert not future.cancel()
    with pytest.raises(errors.CallCancelled, match=r"who on worker 'x' was cancelled$"):
        future.wait()


def test_a_nested_call_that_waits_ends_with_the_outer_call(stage: Stage) -> None:
    stage.come("y")
    outer = rpc.rpc_async("y", call_absent)
    assert asks.wait(PATIENCE)
    assert outer.cancel()
    assert said.acquire(timeout=PATIENCE)
    assert "which was cancelled or whose caller gave up" in why[0]


asks, said, why = threading.Event(), threading.Semaphore(0), [""]


def call_absent() -> None:
    future = rpc.rpc_async("x", who, wait_for_worker=True)
    asks.set()
    try:
        future.wait()
    except errors.CallCancelled as error:
        why[0] = str(error)
        said.release()


def test_a_worker_that_leaves_ends_its_calls_that_wait(stage: Stage) -> None:
    other = stage.come("other")
    current.enter(other)
    future = rpc.rpc_async("x", who, wait_for_worker=True)
    assert not other.agent.idle
    other.end("")
    with pytest.raises(errors.ShutDown, match="while"):
        future.wait()
    with pytest.raises(errors.ShutDown, match="has left the group"):
        rpc.rpc_sync("x", who, wait_for_worker=True)


def test_a_call_without_an_answer_of_the_directory_has_not_run() -> None:
    assert classify(errors.DirectoryLost("etcd did not answer")) is Failure.NOT_RUN


def test_calls_in_a_fixed_group_do_not_wait_for_a_lost_worker() -> None:
    with agents_here(3) as made:
        rpc.rpc_sync("w1", who)
        made[1].end("")
        wait_until(lambda: not is_open(made[0], made[1]))
        with pytest.raises(errors.PeerUnreachable):
            rpc.rpc_sync("w1", who, wait_for_worker=True)
        with pytest.raises(errors.UnknownWorker):
            rpc.rpc_sync("nobody", who, wait_for_worker=True)
        assert rpc.rpc_sync("w2", who, wait_for_worker=True) == made[2].agent.incarnation


def test_an_option_of_a_worker_makes_all_its_calls_wait(stage: Stage) -> None:
    current.enter(stage.come("patient", wait_for_worker=True))
    with stage.later("x"):
        assert rpc.rpc_sync("x", operator.add, (1, 2)) == 3
    with pytest.raises(errors.UnknownWorker):
        rpc.rpc_sync("z", operator.add, (1, 2), wait_for_worker=False)


def fail_as_if_lost(kind: type[Exception]) -> None:
    runs.append(kind.__name__)
    raise kind("a worker that this function has called")


@pytest.mark.parametrize("kind", [errors.PeerLost, errors.PeerUnreachable, errors.UnknownWorker])
def test_a_function_is_not_run_again_after_a_telegrad_error(stage: Stage, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="that this function has called"):
        rpc.rpc_sync("boss", fail_as_if_lost, (kind,), wait_for_worker=True, idempotent=True)
    assert runs == [kind.__name__]


async def both(names: list[str]) -> list[int]:
    return [await rpc.rpc_async(name, operator.add, (1, 2), wait_for_worker=True) for name in names]


def test_a_call_that_waits_can_be_awaited(stage: Stage) -> None:
    with stage.later("x"):
        assert asyncio.run(both(["boss", "x"])) == [3, 3]


def test_many_calls_wait_for_the_same_worker(stage: Stage) -> None:
    futures = [rpc.rpc_async("x", operator.add, (i, i), wait_for_worker=True) for i in range(200)]
    stage.come("x")
    assert [future.wait() for future in futures] == [2 * i for i in range(200)]


def test_an_argument_that_cannot_be_sent_fails_at_once(stage: Stage) -> None:
    with pytest.raises(errors.CannotEncode):
        rpc.rpc_async("boss", operator.add, (threading.Lock(), 1), wait_for_worker=True)


# Groups


def test_calls_to_a_group_wait_for_each_worker(stage: Stage) -> None:
    stage.come("x")
    old, both_of_them = stage.come("y"), rpc.group(["x", "y"])
    for name in "xy":
        rpc.rpc_sync(name, who)
    stage.crash(old)
    with stage.later("y"):
        assert both_of_them.rpc_async(operator.add, (1, 2), wait_for_worker=True).wait() == [3, 3]
    assert both_of_them.rpc_sync(operator.add, (1, 2), idempotent=True) == [3, 3]
    assert both_of_them.gather(operator.add, (1, 2), wait_for_worker=True, idempotent=True) == {"x": 3, "y": 3}
    assert both_of_them.map(operator.neg, range(5), wait_for_worker=True, idempotent=True).wait() == [0, -1, -2, -3, -4]
    assert [each.to_here() for each in both_of_them.remote(operator.add, (1, 2), wait_for_worker=True)] == [3, 3]
    assert [each.to_here() for each in both_of_them.broadcast(7, wait_for_worker=True)] == [7, 7]
    with pytest.raises(errors.UsageError, match="a reduction"):
        both_of_them.rpc_sync(operator.add, (1, 2), reduce=operator.add, wait_for_worker=True)
    with pytest.raises(errors.CannotEncode):
        both_of_them.rpc_sync(operator.add, (threading.Lock(), 1), idempotent=True)


class Serving(Served):
    """A call that is cancelled once it has begun so many nested calls."""

    cancelled = False
    nested = None
    stop = None

    def __init__(self, most: int) -> None:
        self.most = most

    def admit(self, call: Nested) -> None:
        self.cancelled = len(self.nested or ()) == self.most
        super().admit(call)

    @property
    def described(self) -> str:
        return "a call"


def test_a_group_call_that_cannot_begin_leaves_no_nested_calls(stage: Stage) -> None:
    stage.come("x")
    stage.come("y")
    served = Serving(1)
    token = serving.set(served)
    try:
        with pytest.raises(errors.CallCancelled):
            rpc.group(["x", "y"]).rpc_async(operator.add, (1, 2), idempotent=True)
    finally:
        serving.reset(token)
    assert served.nested == set()


class Exits:
    def __reduce__(self) -> NoReturn:
        raise SystemExit


def test_an_argument_that_raises_system_exit_ends_its_call(stage: Stage) -> None:
    served = Serving(2)
    token = serving.set(served)
    try:
        with pytest.raises(SystemExit):
            rpc.rpc_async("boss", print, (Exits(),), idempotent=True)
    finally:
        serving.reset(token)
    assert served.nested == set()
    with stage.later("x"):
        future = rpc.rpc_async("x", print, (Exits(),), wait_for_worker=True)
        assert stage.all[0].agent.wait_for(future, PATIENCE)
        with pytest.raises(SystemExit):
            future.wait()


# Idempotent calls

runs: list[str] = []
begun, may_end = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def nothing_has_run() -> Iterator[None]:
    runs.clear()
    begun.clear()
    may_end.clear()
    yield
    may_end.set()


def hold(what: str) -> str:
    runs.append(what)
    begun.set()
    return wait_here(what)


async def hold_async(what: str) -> str:
    return await asyncio.to_thread(hold, what)


@rpc.functions.async_execution
def hold_later(what: str) -> torch.futures.Future[str]:
    runs.append(what)
    begun.set()
    return rpc.rpc_async("boss", wait_here, (what,))


def wait_here(what: str) -> str:
    assert may_end.wait(PATIENCE)
    return f"{what} has run {len(runs)} times"


@pytest.mark.parametrize("function", [hold, hold_async, hold_later])
@pytest.mark.parametrize("waits", [False, True])
def test_a_call_that_lost_its_connection_is_run_once(stage: Stage, function: Callable[..., Any], waits: bool) -> None:
    x = stage.come("x")
    future = rpc.rpc_async("x", function, ("it",), idempotent=True, wait_for_worker=waits)
    assert begun.wait(PATIENCE)
    for _ in range(2):
        wait_until(lambda: links.accepted(x))  # the second time, that of the repeated call
        links.cut(x)
    may_end.set()
    assert (future.wait(), runs) == ("it has run 1 times", ["it"])
    settled(x)


def settled(worker: Worker) -> None:
    """Wait until a worker keeps no more answers."""
    wait_until(lambda: not len(worker.attached(IdempotentCalls)))


def raise_once(what: str) -> None:
    hold(what)
    raise KeyError(what)


async def raise_async(what: str) -> None:
    raise_once(what)


@rpc.functions.async_execution
def no_future(what: str) -> Any:
    return hold(what)


@pytest.mark.parametrize("function", [raise_once, raise_async, no_future])
def test_a_repeated_call_gets_the_error_of_the_first(stage: Stage, function: Callable[..., Any]) -> None:
    x = stage.come("x")
    future = rpc.rpc_async("x", function, ("it",), idempotent=True)
    assert begun.wait(PATIENCE)
    links.cut(x)
    may_end.set()
    with pytest.raises(errors.UsageError if function is no_future else KeyError, match=r"x|it"):
        future.wait()
    assert runs == ["it"]
    settled(x)


def test_a_restarted_worker_runs_an_idempotent_call_again(stage: Stage) -> None:
    old = stage.come("x")
    future = rpc.rpc_async("x", hold, ("it",), idempotent=True, wait_for_worker=True)
    assert begun.wait(PATIENCE)
    stage.crash(old)
    may_end.set()
    with stage.later("x"):
        assert future.wait() == "it has run 2 times"


def test_without_waiting_an_idempotent_call_fails_if_its_worker_dies(stage: Stage) -> None:
    old = stage.come("x")
    future = rpc.rpc_async("x", hold, ("it",), idempotent=True)
    assert begun.wait(PATIENCE)
    stage.crash(old)
    with pytest.raises(errors.PeerLost, match="may or may not have run") as told:
        future.wait()
    assert isinstance(told.value.__cause__, errors.PeerUnreachable | errors.UnknownWorker)


def test_usual_idempotent_calls(stage: Stage) -> None:
    x = stage.come("x")
    assert rpc.rpc_sync("x", operator.add, (1, 2), idempotent=True) == 3
    assert rpc.rpc_sync("x", torch.add, (torch.ones(2), 1), idempotent=True).sum() == 4
    assert rpc.rpc_sync("x", dict, (), {"a": 1}, idempotent=True) == {"a": 1}
    assert rpc.rpc_sync("boss", total, (rpc.remote("x", torch.ones, (3,)),), idempotent=True) == 3
    assert rpc.rpc_sync("x", rpc.RRef, (5,), idempotent=True).to_here() == 5
    with pytest.raises(errors.CannotEncode, match="argument"):
        rpc.rpc_sync("x", operator.add, (threading.Lock(), 1), idempotent=True)
    with pytest.raises(errors.CannotEncode, match=r"On worker 'x', in tests\.rpc\.test_returns\.make_lock"):
        rpc.rpc_sync("x", make_lock, idempotent=True)
    with pytest.raises(ZeroDivisionError, match="truediv"):
        rpc.rpc_sync("x", operator.truediv, (1, 0), idempotent=True)
    futures = [rpc.rpc_async("x", operator.add, (i, i), idempotent=True) for i in range(100)]
    assert [future.wait() for future in futures] == [2 * i for i in range(100)]
    settled(x)


def test_a_repeated_call_with_a_borrowed_reference_gets_the_answer(stage: Stage) -> None:
    x = stage.come("x")
    reference: Any = rpc.remote("x", torch.ones, (3,))
    assert rpc.rpc_sync("x", total_later, (reference,), idempotent=True) == 3
    future = rpc.rpc_async("x", scaled, (reference,), idempotent=True)
    assert begun.wait(PATIENCE)
    links.cut(x)
    may_end.set()
    assert future.wait().sum() == 6
    with pytest.raises(TypeError, match=r"On worker 'x', in tests\.rpc\.test_returns\.total_later"):
        rpc.rpc_sync("x", total_later, (reference, 1), idempotent=True)
    settled(x)


@rpc.functions.async_execution
def total_later(tensor: torch.Tensor) -> torch.futures.Future[float]:
    return rpc.rpc_async("boss", total, (tensor,))


def make_lock() -> Any:
    return threading.Lock()


def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def test_a_cancelled_idempotent_call_runs_to_its_end(stage: Stage) -> None:
    x = stage.come("x")
    future = rpc.rpc_async("x", hold, ("it",), idempotent=True)
    assert begun.wait(PATIENCE)
    assert future.cancel()
    with pytest.raises(errors.CallCancelled):
        future.wait()
    may_end.set()
    settled(x)
    assert runs == ["it"]


def scaled(tensor: torch.Tensor) -> torch.Tensor:
    begun.set()
    assert may_end.wait(PATIENCE)
    return 2 * tensor


def test_gradients_flow_through_a_repeated_call(stage: Stage) -> None:
    x = stage.come("x")
    weight = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        future = rpc.rpc_async("x", scaled, (weight,), idempotent=True)
        assert begun.wait(PATIENCE)
        links.cut(x)
        may_end.set()
        autograd.backward(context, [future.wait().sum()])
        assert autograd.get_gradients(context)[weight].tolist() == [2, 2, 2]


def test_a_call_that_begins_to_wait_does_not_look_at_all_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, true = list[float](), RetryQueue.next

    def look(queue: RetryQueue[Any]) -> float:
        looks.append(true(queue))
        return looks[-1]

    monkeypatch.setattr(RetryQueue, "next", look)
    begun = time.monotonic()
    futures = [rpc.rpc_async("none", abs, (n,), wait_for_worker=True) for n in range(300)]
    wait_until(lambda: looks)
    assert len(looks) <= 2 + (time.monotonic() - begun) / SEARCH_PAUSE
    for future in futures:
        assert future.cancel()
