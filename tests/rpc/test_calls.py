"""Tests of calls between agents of this process: functions, nested calls, futures, errors and arguments."""

import asyncio
import collections
import gc
import operator
import re
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import nn

from telegrad import errors
from telegrad._core.agent import call_server
from telegrad._core.agent.agent import Agent
from telegrad._core.reactor import reactor, scheduler
from telegrad._core.rpc import life, remote_calls
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CannotEncode, InvalidArgument, UsageError
from telegrad.rpc import Future, RRef, functions, group, remote, rpc_async, rpc_stream, rpc_sync
from tests import links
from tests.cluster import PATIENCE, agents, agents_here, wait_until
from tests.naming import alike


def echo(value: Any) -> Any:
    return value


def fail(kind: type[BaseException], *args: Any) -> NoReturn:
    raise kind(*args)


def who() -> str:
    return life.get_worker_info().name


def relay(path: list[str], function: Callable[..., Any], *args: Any) -> str:
    """Call the function at the end of a path of workers."""
    if not path:
        return function(*args)
    return remote_calls.rpc_sync(path[0], relay, (path[1:], function, *args))


def fan_out(to: str, count: int) -> int:
    return sum(future.wait() for future in [remote_calls.rpc_async(to, operator.add, (i, 1)) for i in range(count)])


class Adder:
    def __init__(self, start: int) -> None:
        self.value = start

    @staticmethod
    @functions.async_execution
    def static_async(to: str, x: torch.Tensor, y: int, z: int) -> Future[Any]:
        return remote_calls.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + z)

    @classmethod
    @functions.async_execution
    def class_async(cls, to: str, x: torch.Tensor, y: int, z: int) -> torch.futures.Future[Any]:
        out: torch.futures.Future[Any] = torch.futures.Future()
        remote_calls.rpc_async(to, torch.add, args=(x, y)).then(lambda future: out.set_result(future.wait() + z))
        return out

    @functions.async_execution
    def bound_async(self, to: str, x: torch.Tensor, y: int, z: int) -> Future[Any]:
        return remote_calls.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + z + self.value)


@functions.async_execution
def async_add(to: str, x: torch.Tensor, y: int, z: int) -> Future[Any]:
    return remote_calls.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + z)


@functions.async_execution
def async_wrong() -> int:
    return 3


@torch.jit.script
def scripted(x: torch.Tensor, n: int) -> torch.Tensor:
    return x + n


def ask_by_info() -> str:
    return remote_calls.rpc_sync(life.get_worker_info("w1"), who)


def test_workers_are_called_by_name_rank_and_worker_info(pair: list[Worker]) -> None:
    assert pair[0].agent.call("w1", operator.add, (1, 2), None) == 3
    assert pair[0].agent.call(1, operator.add, (1, 2), None) == 3
    assert pair[0].agent.call("w0", ask_by_info, None, None) == "w1"


@pytest.mark.parametrize("function", [torch.add, scripted, torch.ops.aten.add])
def test_functions_of_torch_can_be_called(pair: list[Worker], function: Callable[..., Any]) -> None:
    assert pair[0].agent.call("w1", function, (torch.ones(2), 3), None).tolist() == [4, 4]


@pytest.mark.parametrize(
    "function", [async_add, Adder.static_async, Adder.class_async, Adder(0).bound_async], ids=alike
)
@pytest.mark.parametrize("to", ["w0", "w1"])
def test_async_execution_of_each_kind_of_function(pair: list[Worker], function: Callable[..., Any], to: str) -> None:
    assert pair[0].agent.call("w1", function, (to, torch.ones(2), 1, 2), None).tolist() == [4, 4]


def test_async_execution_must_return_a_future(pair: list[Worker]) -> None:
    with pytest.raises(errors.UsageError, match=r"torch\.futures\.Future"):
        pair[0].agent.call("w1", async_wrong, None, None)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_nested_calls_both_ways_and_many_calls_in_flight(threads: int) -> None:
    with agents(2, num_worker_threads=threads) as (a, _):
        assert a.agent.call("w1", relay, (["w0", "w1"] * 20, who), None) == "w1"
        futures = [a.agent.call_async("w1", operator.add, (i, 1), None) for i in range(3000)]
        assert [future.wait() for future in futures] == list(range(1, 3001))
        futures = [a.agent.call_async("w1", fan_out, ("w0", 10), None) for _ in range(50)]
        assert {future.wait() for future in futures} == {55}


def fan_out_unseen(to: str, count: int) -> int:
    """Wait inside torch, where the scheduler does not notice it."""
    futures: list[torch.futures.Future[int]] = [remote_calls.rpc_async(to, fan_out, ("w1", 1)) for _ in range(count)]
    return sum(torch.futures.wait_all(futures))


def test_waits_inside_torch_do_not_use_up_the_slots() -> None:
    with agents(2, num_worker_threads=1) as (a, _):
        futures = [a.agent.call_async("w1", fan_out_unseen, ("w0", 2), None) for _ in range(2)]
        assert [future.wait() for future in futures] == [2, 2]


def test_a_connection_that_broke_is_made_again() -> None:
    gate = threading.Event()
    waiting[0] = gate
    with agents(2) as (a, b):
        lost = [a.agent.call_async("w1", wait_gate, None, None) for _ in range(2)]
        assert a.agent.call("w1", echo, (1,), None) == 1
        links.cut(b)
        for future in lost:  # each error tells of its own call, though all have the same cause
            with pytest.raises(errors.PeerLost, match="may or may not have run") as told:
                future.wait()
            assert re.search(
                r"again\. This call of [\w.]+\.wait_gate was in flight for \d\.\d s; rpc_sync and rpc_async repeat",
                str(told.value),
            )
            assert str(told.value).count("This call") == 1
        assert a.agent.call("w1", echo, (2,), None) == 2
        gate.set()


def test_only_functions_are_said_to_be_repeatable() -> None:
    with agents_here(2) as (_, b):
        event = remote("w1", threading.Event)
        waits = event.rpc_async().wait()
        asked = event._call_async("wait", 0, (), {}, "Pipeline.forward_backward")
        assert not event.rpc_sync().is_set()
        links.cut(b)
        with pytest.raises(errors.PeerLost, match=r"of wait\(\) of the value of a reference was in flight for \S+ s$"):
            waits.wait()
        with pytest.raises(errors.PeerLost, match=r"of Pipeline.forward_backward was in flight for \S+ s$"):
            asked.wait()
        event.rpc_sync().set()


def test_futures_of_calls_are_futures_of_torch() -> None:
    with agents(2) as (a, _):
        futures: list[torch.futures.Future[Any]] = [
            a.agent.call_async("w1", operator.add, (i, i), None) for i in range(3)
        ]
        assert all(isinstance(future, torch.futures.Future) for future in futures)
        assert torch.futures.wait_all(futures) == [0, 2, 4]
        told = []
        futures[1].add_done_callback(lambda future: told.append(future.value()))
        assert told == [2]
        assert a.agent.call_async("w1", operator.add, (1, 2), None).then(lambda f: f.wait() * 10).wait() == 30
        failing = a.agent.call_async("w1", fail, (ValueError, "late"), None)
        with pytest.raises(ValueError, match="late"):
            failing.then(lambda f: f.wait()).wait()
        with pytest.raises(ValueError, match="late"):
            torch.futures.collect_all([failing]).wait()


def test_slots_limit_the_functions_that_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "STALLED_AFTER", PATIENCE)  # else functions that sleep cause more slots
    with agents(2, num_worker_threads=2) as (a, b):
        futures = [a.agent.call_async("w1", crowd, None, None) for _ in range(6)]
        wait_until(lambda: len(crowd_inside) >= 2 and len(links.calls_of(b)) == 6)
        assert not crowd_exceeds.wait(0.2)  # a third function could have begun
        crowd_gate.set()
        assert max(future.wait() for future in futures) == 2


crowd_inside: list[int] = []
crowd_exceeds, crowd_gate = threading.Event(), threading.Event()


def crowd() -> int:
    """Return how many of these functions run when this one has begun."""
    crowd_inside.append(1)
    found = len(crowd_inside)
    if found > 2:
        crowd_exceeds.set()
    crowd_gate.wait(10)
    crowd_inside.pop()
    return found


@pytest.mark.parametrize("size", [10, 100_000, 1_000_000])
@pytest.mark.parametrize("to", ["w0", "w1"])
def test_the_receiver_owns_the_tensors_that_it_gets(pair: list[Worker], size: int, to: str) -> None:
    sent = torch.arange(size)
    back = pair[0].agent.call(to, echo, (sent,), None)
    assert torch.equal(back, torch.arange(size))
    back.zero_()
    assert torch.equal(sent, torch.arange(size))
    assert torch.equal(pair[0].agent.call(to, echo, (sent,), None), sent)
    assert not back.any()


# Errors


def test_unknown_worker(pair: list[Worker]) -> None:
    with pytest.raises(errors.UnknownWorker, match="did you mean 'w1'"):
        pair[0].agent.call("w11", echo, (1,), None)
    with pytest.raises(errors.UnknownWorker, match="rank 7"):
        pair[0].agent.call(7, echo, (1,), None)


waiting = [threading.Event()]


def wait_gate() -> bool:
    return waiting[0].wait(10)


def test_a_function_that_is_slow_for_once_does_not_hold_up_others() -> None:
    """The function was short before, and then waits for a later call of the same connection."""
    with agents(2, num_worker_threads=4) as (a, _):
        turnstile.set()
        for _ in range(20):
            a.agent.call("w1", pass_turnstile, None, None)
        turnstile.clear()
        futures = [a.agent.call_async("w1", pass_turnstile, None, None) for _ in range(3)]
        assert a.agent.call_async("w1", turnstile_set, None, None).wait() is None
        assert all(future.wait() for future in futures)


turnstile = threading.Event()


def pass_turnstile() -> bool:
    return turnstile.wait(10)


def turnstile_set() -> None:
    turnstile.set()


def test_closing_fails_calls_in_flight() -> None:
    gate = threading.Event()
    waiting[0] = gate
    with agents(2) as (a, b):
        future = a.agent.call_async("w1", wait_gate, None, None)
        a.agent.call("w1", echo, (1,), None)
        b.agent.close()
        with pytest.raises(errors.PeerError, match="w1"):
            future.wait()
        with pytest.raises(errors.PeerError, match="w1"):
            a.agent.call("w1", echo, (1,), None)
        gate.set()


def test_a_call_of_a_closed_agent_raises_shut_down() -> None:
    with agents(2) as (a, _):
        a.agent.close()
        with pytest.raises(errors.ShutDown, match="w0"):
            a.agent.call("w1", echo, (1,), None)


class Witness:
    """An object that lives as long as the frame that holds it."""


def fail_and_wait(wait: Callable[..., Any], seen: list[weakref.ref[Witness]], agent: Agent) -> bool:
    witness = Witness()
    seen.append(weakref.ref(witness))
    with pytest.raises((ValueError, errors.PeerError)):
        wait(agent)
    return witness is None


FAILING: list[Callable[[Agent], Any]] = [
    lambda agent: agent.call("w1", fail, (ValueError,), None),
    lambda agent: agent.call_async("w1", fail, (ValueError,), None).wait(),
    lambda agent: agent.call_async("w1", fail, (ValueError,), None).then(lambda done: done.wait()).wait(),
    lambda agent: agent.call_async("w1", fail, (ValueError, "x", 2), None).wait(),
]


def test_an_error_keeps_no_frames_alive() -> None:
    seen: list[weakref.ref[Witness]] = []
    with agents(2) as (a, _):
        for wait in 2 * FAILING:
            fail_and_wait(wait, seen, a.agent)
        a.agent.close()
        for wait in 2 * FAILING[:1]:
            fail_and_wait(wait, seen, a.agent)
        gc.collect()
        assert [ref() for ref in seen] == [None] * 10


def test_the_error_of_a_callback_names_the_failing_function(pair: list[Worker]) -> None:
    child = pair[0].agent.call_async("w1", echo, (1,), None).then(lambda done: fail(KeyError, done.wait()))
    with pytest.raises(KeyError) as caught:
        child.wait()
    assert "in fail" in caught.value.__notes__[0]


class Answers(Exception):
    """Its class answers for each attribute, as the class of a proxy may; or raises an error that is not expected."""

    def __getattr__(self, name: str) -> Any:
        return self.args[1]["answer"]


def answers(kind: Any) -> NoReturn:
    raise Answers("as it is", {} if kind is KeyError else {"answer": kind})


def answers_in_a_stream(kind: Any) -> Iterator[int]:
    yield 1
    answers(kind)


async def answers_in_an_async_stream(kind: Any) -> AsyncIterator[int]:
    yield 1
    answers(kind)


async def awaited(future: Any) -> Any:
    return await future


WAYS: dict[str, Callable[[Any], Any]] = {
    "sync": lambda kind: rpc_sync("w1", answers, (kind,)),
    "wait": lambda kind: rpc_async("w1", answers, (kind,)).wait(),
    "then": lambda kind: rpc_async("w1", answers, (kind,)).then(lambda done: done.wait()).wait(),
    "await": lambda kind: asyncio.run(awaited(rpc_async("w1", answers, (kind,)))),
    "reference": lambda kind: remote("w1", answers, (kind,)).to_here(),
    "group": lambda kind: group(["w1"]).rpc_sync(answers, (kind,)),
    "stream": lambda kind: [*rpc_stream("w1", answers_in_a_stream, (kind,))],
    "async stream": lambda kind: [*rpc_stream("w1", answers_in_an_async_stream, (kind,))],
}


@pytest.mark.parametrize("kind", [None, 5, "text", KeyError])
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_that_has_all_attributes_is_raised(way: str, kind: Any, pair: list[Worker]) -> None:
    current.enter(pair[0])
    try:  # `pytest.raises` reads the notes of the exception
        WAYS[way](kind)
    except (Answers, errors.WorkersFailed) as error:
        raised = str(error)
    assert "as it is" in raised


def test_the_repr_of_a_future_describes_its_call(pair: list[Worker]) -> None:
    agent = pair[0].agent
    waiting[0] = threading.Event()
    future = agent.call_async("w1", wait_gate, None, None)
    assert re.fullmatch(
        rf"<Future of <call \d+ of {__name__}.wait_gate on 'w1': in flight for \d+\.\d s>>", repr(future)
    )
    waiting[0].set()
    future.wait()
    assert repr(future) == "<Future: done>"
    failed = agent.call_async("w1", operator.truediv, (1, 0), None)
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    assert repr(failed) == "<Future: ZeroDivisionError of _operator.truediv on worker 'w1'>"
    assert repr(Future()) == "<Future: not done>"


def test_only_its_call_completes_the_future_of_a_call(pair: list[Worker]) -> None:
    waiting[0] = threading.Event()
    future = pair[0].agent.call_async("w1", wait_gate, None, None)
    for complete in (future.set_result, future.set_exception):
        with pytest.raises(UsageError, match=r"is completed by its call: use `then`, or a Future of your own"):
            complete(ValueError())
    with pytest.raises(UsageError, match="is not done: call wait"):
        future.value()
    waiting[0].set()
    assert future.wait() is True


# Invalid calls are refused before they are sent: tests/test_checks.py tests each parameter, tests/limits the texts


class Pair(NamedTuple):
    first: int
    second: int


def take(*args: int, **kwargs: int) -> tuple[tuple[int, ...], dict[str, int]]:
    return args, kwargs


def annotated(value: torch.Tensor) -> torch.Tensor:
    return value


REFUSED = pytest.mark.usefixtures("here", "nothing_travels")


@pytest.fixture
def nothing_travels(five: list[Worker], request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a call that is refused was never begun."""
    before = five[0].agent.started
    yield
    assert five[0].agent.started - before == ("allowed" in request.node.name)


@REFUSED
@pytest.mark.parametrize("call", [rpc_sync, rpc_async, remote])
@pytest.mark.parametrize("function", [take, annotated, torch.neg])
def test_a_refused_call_raises_a_builtin_type_of_error(call: Callable[..., Any], function: Callable[..., Any]) -> None:
    for kind in (TypeError, ValueError, RuntimeError, UsageError):
        with pytest.raises(kind, match=r"args must be a tuple .* write args=\(x,\)"):
            call("w1", function, torch.ones(()))
    with pytest.raises(InvalidArgument, match=r"such as thing\.method"):
        call("w1", nn.Linear(2, 2).weight)


@REFUSED
def test_names_of_arguments_that_are_no_strings_are_refused() -> None:
    everyone: Any = group()
    ways: list[Any] = [rpc_sync, rpc_async, remote, rpc_stream]
    for call in [*(partial(way, "w1") for way in ways), everyone.rpc_async, everyone.remote]:
        for names in ({1: 2}, collections.OrderedDict([("a", 1), (b"b", 2)])):
            with pytest.raises(InvalidArgument, match=r"names of arguments in kwargs must be strings, not (1|b'b')"):
                call(take, (1,), names)


@REFUSED
@pytest.mark.parametrize("args", [(1, 2), [1, 2], Pair(1, 2), torch.Size([1, 2])], ids=repr)
def test_any_tuple_or_list_is_allowed(args: Any) -> None:
    assert rpc_sync("w1", take, args, collections.OrderedDict(a=3)) == ((1, 2), {"a": 3})


@REFUSED
def test_an_argument_that_cannot_be_sent_is_named_by_its_position() -> None:
    lock = threading.Lock()
    for refused in (
        lambda: rpc_sync("w1", take, (1, [lock])),  # type: ignore[arg-type]
        lambda: RRef([]).rpc_sync().append(1, [lock]),  # type: ignore[call-arg, arg-type]
        lambda: rpc_sync("w1", annotated, (RRef(torch.ones(1)), [lock])),
    ):
        with pytest.raises(CannotEncode, match=r"argument 1\[0\] \(_thread\.lock\) cannot be sent: cannot pickle"):
            refused()


def test_short_functions_that_are_sent_by_value_run_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """To wake another thread for each takes longer than the call."""
    monkeypatch.setattr(call_server, "SHORT", PATIENCE)
    monkeypatch.setattr(reactor, "STUCK_AFTER", PATIENCE)
    with agents(2) as (caller, _):
        threads = [caller.agent.call("w1", lambda: threading.get_ident(), (), None) for _ in range(20)]
    assert len({*threads[1:]}) == 1
