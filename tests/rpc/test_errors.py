"""Tests of the text of remote errors: one block per worker, with lines of the user's code only."""

import asyncio
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import telegrad.autograd as autograd
from telegrad._core.calls.futures import Future
from telegrad.errors import TelegradError, WorkersFailed
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef, functions, remote, rpc_async, rpc_stream, rpc_sync
from tests.autograd.functions import Passing
from tests.cluster import PATIENCE, agents_here, wait_until
from tests.links import cut
from tests.wire.test_failures import HIDDEN, Nameless, hides

pytestmark = pytest.mark.usefixtures("here")


def to(hops: int) -> str:
    return f"w{1 + hops % 2}"


def nested(hops: int) -> None:
    if not hops:
        raise ValueError("boom")
    return rpc_sync(to(hops - 1), nested, (hops - 1,))


def waiting(hops: int) -> None:
    if not hops:
        raise ValueError("boom")
    return rpc_async(to(hops - 1), waiting, (hops - 1,)).wait()


@functions.async_execution
def chained(hops: int) -> Future[Any]:
    if not hops:
        raise ValueError("boom")
    return rpc_async(to(hops - 1), chained, (hops - 1,)).then(lambda done: done.wait())


@functions.async_execution
def passed_on(hops: int) -> torch.futures.Future[Any]:
    if not hops:
        raise ValueError("boom")
    found: torch.futures.Future[Any] = torch.futures.Future()

    def look(done: torch.futures.Future[Any]) -> None:
        try:
            found.set_result(done.wait())
        except ValueError as error:
            found.set_exception(error)

    rpc_async(to(hops - 1), passed_on, (hops - 1,)).add_done_callback(look)
    return found


async def awaited(hops: int) -> Any:
    if not hops:
        raise ValueError("boom")
    return await rpc_async(to(hops - 1), awaited, (hops - 1,))


def referred(hops: int) -> None:
    if not hops:
        raise ValueError("boom")
    return remote(to(hops - 1), referred, (hops - 1,)).to_here()


class Relay:
    def go(self, hops: int) -> Any:
        if not hops:
            raise ValueError("boom")
        return remote(to(hops - 1), Relay).rpc_sync().go(hops - 1)


def by_proxy(hops: int) -> Any:
    return Relay().go(hops)


def retold(hops: int) -> Any:
    """Raise a new error at each hop, with the text of the previous one in it."""
    try:
        return nested(0) if not hops else rpc_sync(to(hops - 1), retold, (hops - 1,))
    except ValueError as error:
        raise ValueError(f"{error}") from error


WAYS = [nested, waiting, chained, passed_on, awaited, referred, by_proxy, retold]


def told_by(function: Callable[..., Any], hops: int) -> str:
    with pytest.raises(ValueError, match="boom") as raised:
        rpc_sync(to(hops), function, (hops,))
    return str(raised.value)


@pytest.mark.parametrize("function", WAYS)
def test_each_hop_adds_one_block_with_lines_of_the_users_code_only(function: Callable[..., Any]) -> None:
    texts = {hops: told_by(function, hops) for hops in (1, 2, 3, 7)}
    longest = len(texts[2]) - len(texts[1]) + 16
    assert function is not nested or texts[2].count("\n") <= 11  # of three workers; printed, it is 3 or 4 more
    for hops, text in texts.items():
        assert text.count("On worker") == hops + 1
        assert text.count("most recent call last") <= (hops + 1) * (2 if function is retold else 1)
        assert len(text) <= len(texts[1]) + (hops - 1) * longest
        assert 'raise ValueError("boom")' in text
        assert set(re.findall(r'File "([^"]+)"', text)) == {__file__}


@pytest.mark.parametrize("function", [nested, waiting, referred, by_proxy])
def test_a_simple_error_has_few_lines_all_of_the_users_code(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="boom") as raised:
        function(1)
    text = "".join(traceback.format_exception(raised.value))
    assert set(re.findall(r'File "([^"]+)"', text)) == {__file__}
    # `by_proxy` has a frame more, and Python 3.13 marks a part of one of its lines.
    assert len(text.splitlines()) <= 15 + (function is by_proxy) * (1 + (sys.version_info >= (3, 13)))


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


class FailsBackward(Passing):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> NoReturn:
        raise ValueError("boom")


class Unsendable:
    def __reduce__(self) -> NoReturn:
        raise ValueError("boom")


def yields() -> Iterator[int]:
    yield 1
    raise ValueError("boom")


def run_backward(begin: Callable[[int, torch.Tensor, torch.Tensor], object]) -> None:
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        begin(context_id, rpc_sync("w1", FailsBackward.apply, (x,)).sum(), x)


async def read_stream() -> None:
    async for _ in rpc_stream("w1", yields):
        pass


USES: dict[str, Callable[[], object]] = {
    "await": lambda: asyncio.run(awaited(1)),
    "stream": lambda: list(rpc_stream("w1", yields)),
    "async stream": lambda: asyncio.run(read_stream()),
    "backward": lambda: run_backward(lambda context_id, loss, x: autograd.backward(context_id, loss)),
    "backward_async": lambda: run_backward(lambda *given: autograd.backward_async(*given[:2]).wait()),
    "grad": lambda: run_backward(autograd.grad),
    "RemoteModule": lambda: RemoteModule("w1", Fails).eval()(torch.ones(2)),
    "forward_async": lambda: RemoteModule("w1", Fails).eval().forward_async(torch.ones(2)).wait(),
    "module_cls": lambda: RemoteModule("w1", nested, (0,)),  # type: ignore[arg-type]
    "pipeline": lambda: Pipeline([RemoteModule("w1", Fails)], chunks=2).eval()(torch.ones(2, 2)),
    "a keyword of an optimizer": lambda: DistributedOptimizer(torch.optim.SGD, [RRef(nn.Linear(1, 1))], boom=1),
    "an argument": lambda: rpc_async("w1", str, (Unsendable(),)),
    "a wrong name": lambda: rpc_async("boom", abs, (1,)),
    "a reference with a wrong name": lambda: remote("boom", abs, (1,)),
}


@pytest.mark.parametrize("use", USES)
def test_no_use_shows_lines_of_the_package(use: str) -> None:
    with pytest.raises((ValueError, TypeError, TelegradError), match="boom") as raised:
        USES[use]()
    text = "".join(traceback.format_exception(raised.value))
    assert "/telegrad/" not in text.replace(__file__, "")
    assert "During handling" not in text


def test_the_debug_variable_keeps_the_lines_of_the_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_DEBUG", "1")
    assert "telegrad/_core/agent/call_server.py" in told_by(nested, 0)


def test_the_users_function_and_the_worker_are_named() -> None:
    first, *_ = told_by(nested, 2).partition(" (most recent")
    assert first == f"boom\nOn worker 'w1', in {__name__}.nested"
    with pytest.raises(RuntimeError, match=r"\nOn worker 'w1', in view\(\) of the value of a reference"):
        remote("w1", torch.ones, (2,)).view(5).to_here()
    assert "On worker 'w1', in Relay.go (most recent call last):" in told_by(by_proxy, 2)


def test_a_lambda_is_named(here: None) -> None:
    with pytest.raises(ZeroDivisionError, match=r"in test_a_lambda_is_named\.<locals>\.<lambda> \(most"):
        rpc_sync("w1", lambda: 1 / 0)


def test_the_error_of_a_failed_reference_has_a_single_block() -> None:
    reference = remote("w1", nested, (0,))
    for _ in range(2):
        with pytest.raises(ValueError, match="boom") as raised:
            reference.to_here()
        assert str(raised.value).count("On worker") == 1


def test_errors_name_modules_and_optimizers() -> None:
    with pytest.raises(TypeError, match=r"On worker 'w1', in RemoteModule\(Linear\)"):
        RemoteModule("w1", nn.Linear, (3,))
    module = RemoteModule("w1", nn.Linear, (3, 2))
    with pytest.raises(RuntimeError, match=r"On worker 'w1', in Linear.forward \(most"):
        module(torch.ones(1, 7))
    with pytest.raises(ValueError, match=r"On worker 'w1', in DistributedOptimizer\(\) \(most"):
        DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=-1.0)


class Wrong(nn.Module):
    def forward(self, x: torch.Tensor) -> NoReturn:
        raise ArithmeticError("boom")


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_the_stage_of_a_pipeline_is_named(stages: int) -> None:
    modules = [RemoteModule(to(i), nn.Identity) for i in range(stages - 1)] + [RemoteModule("w3", Wrong)]
    with pytest.raises(ArithmeticError) as raised, autograd.context() as context:
        Pipeline(modules, chunks=1).forward_backward(context, torch.ones(2, 1), torch.ones(2, 1), nn.MSELoss())
    text = str(raised.value)
    assert f"On worker 'w3', in stage {stages} of {stages} of a Pipeline (Wrong) (most recent call last):" in text
    assert (text.count("On worker"), text.count("most recent call last")) == (1, 1)
    assert len(text) < 2000


def test_several_workers_that_fail_take_one_line_each() -> None:
    parameters = [remote(f"w{i}", nn.Parameter, (torch.ones(1),)) for i in (1, 2, 3)]
    with pytest.raises(WorkersFailed) as raised:
        DistributedOptimizer(torch.optim.SGD, parameters, lr=-1.0)
    assert str(raised.value).count("\n") == 3
    with pytest.raises(WorkersFailed) as raised:
        rpc_sync("w4", make_optimizer, (parameters,))
    assert str(raised.value).count("On worker") == 2
    assert len(str(raised.value)) < 2000


def make_optimizer(parameters: list[RRef[Any]]) -> RRef[DistributedOptimizer]:
    return RRef(DistributedOptimizer(torch.optim.SGD, parameters, lr=-1.0))


@functions.batch(max_size=3, max_wait=5.0)
async def batched(values: list[int]) -> NoReturn:
    raise ValueError("boom")


async def use_batched(value: int) -> Any:
    return await batched(value)


def test_each_caller_of_a_batch_gets_the_lines_once() -> None:
    for future in [rpc_async("w1", use_batched, (i,)) for i in range(3)]:
        with pytest.raises(ValueError, match="boom") as raised:
            future.wait()
        assert str(raised.value).count("await batched(value)") == 1
        assert str(raised.value).count("in batched\n") == 1


def test_the_log_names_the_worker_and_the_users_function(caplog: pytest.LogCaptureFixture) -> None:
    told_by(by_proxy, 1)
    assert caplog.text == ""  # the callers get the error
    with caplog.at_level(logging.DEBUG, logger="telegrad"):
        told_by(by_proxy, 1)
        with pytest.raises(ValueError, match="boom"):
            rpc_sync("w1", awaited, (0,))
    said = [record.getMessage() for record in caplog.records]
    assert f"telegrad: worker 'w2': {__name__}.by_proxy, called by worker 'w0', raised ValueError: boom" in said
    assert "telegrad: worker 'w1': Relay.go, called by worker 'w2', raised ValueError: boom" in said
    assert f"telegrad: worker 'w1': {__name__}.awaited, called by worker 'w0', raised ValueError: boom" in said


async def test_the_error_of_an_awaited_callback_has_a_single_traceback() -> None:
    with pytest.raises(ValueError, match="boom") as raised:
        await rpc_async("w1", nested, (0,)).then(lambda done: done.wait())
    assert str(raised.value).count("most recent call last") == 1


begun, may_fail = threading.Event(), threading.Event()


def fails_later() -> None:
    begun.set()
    may_fail.wait(PATIENCE)
    raise ValueError("boom")


def test_an_error_that_cannot_reach_its_caller_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with agents_here(2) as (_, callee):
        made = remote("w1", fails_later)
        assert begun.wait(PATIENCE)
        cut(callee)
        may_fail.set()
        said = "fails_later, called by worker 'w0', whose connection is lost, raised ValueError: boom"
        told = ("telegrad", logging.WARNING, f"telegrad: worker 'w1': {__name__}.{said}")
        wait_until(lambda: told in caplog.record_tuples)
        del made


# Errors that cannot be read: each call ends, and its slot is given back


KINDS = [*HIDDEN, "metaclass"]


def raises(name: str) -> None:
    raise Nameless("x") if name == "metaclass" else hides(name, KeyError)


async def raises_later(name: str) -> None:
    raises(name)


@pytest.mark.parametrize("function", [raises, raises_later], ids=lambda each: each.__name__)
def test_calls_with_unreadable_errors_end_and_free_their_slots(function: Callable[[str], Any]) -> None:
    with agents_here(2, num_worker_threads=2):
        for name in KINDS:
            futures = [rpc_async("w1", function, (name,), timeout=PATIENCE) for _ in range(3)]
            made = remote("w1", function, (name,), timeout=PATIENCE)
            for wait in (*[future.wait for future in futures], made.to_here):
                with pytest.raises(Exception, match="w1") as raised:
                    wait()
                assert not isinstance(raised.value, TelegradError) or "timeout" not in str(raised.value)
        assert rpc_sync("w1", pow, (2, 3), timeout=PATIENCE) == 8
