"""Workers, in processes of their own, that die in a context or in its backward pass."""

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

import telegrad.autograd as autograd
from telegrad._core.worker import current
from telegrad.errors import ContextLost, OwnerLost, PeerError, PeerLost, PeerUnreachable
from telegrad.rpc import remote, rpc_async, rpc_sync, shutdown
from tests.autograd.functions import Passing
from tests.cluster import PATIENCE, Process, agents, group, wait_until


@pytest.fixture
def trio() -> Iterator[list[Process]]:
    with group(3) as made:
        yield made


class Dying(Passing):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> NoReturn:
        os._exit(1)


def dying(x: torch.Tensor) -> torch.Tensor:
    return Dying.apply(x)


def relayed(x: torch.Tensor) -> torch.Tensor:
    return rpc_sync("worker2", dying, (x,)) + 1


def contexts() -> int:
    return len(current.conductor().contexts)


def step_that_loses(function: Callable[..., Any], to: str) -> str:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = rpc_sync(to, function, (x,)).sum()
        try:
            autograd.backward(context, loss)
        except PeerError as error:
            said = str(error)
        else:
            said = "nothing was raised"
    with autograd.context() as context:
        autograd.backward(context, rpc_sync("worker1", torch.sin, (x,)).sum())
        assert x in autograd.get_gradients(context)
    return said


@pytest.mark.parametrize(("function", "to"), [(relayed, "worker1"), (dying, "worker2")])
def test_a_worker_that_dies_in_its_backward(trio: list[Process], function: Callable[..., Any], to: str) -> None:
    began = time.monotonic()
    assert "'worker2'" in trio[0].run(step_that_loses, function, to)
    assert time.monotonic() - began < PATIENCE / 3, "it was found out by a timeout only"
    trio[0].run(wait_for_contexts, 0)
    trio[1].run(wait_for_contexts, 0)


def wait_for_contexts(count: int) -> None:
    wait_until(lambda: contexts() == count)


entered: list[autograd.context] = []  # contexts that were entered in this process


def begin_and_stay() -> None:
    entered.append(autograd.context())
    entered[-1].__enter__()
    rpc_async("worker1", torch.mul, (torch.ones(3, requires_grad=True), 2)).wait()


def step_whose_root_is_lost() -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        roots: list[Any] = [rpc_sync("worker1", torch.sin, (x,)).sum(), remote("worker2", os._exit, (1,))]
        with pytest.raises((PeerError, OwnerLost), match="worker2"):
            autograd.backward(context, roots)
        assert not autograd.get_gradients(context)


def test_a_worker_that_dies_before_it_has_made_a_root(trio: list[Process]) -> None:
    trio[0].run(step_whose_root_is_lost)


def test_the_contexts_of_a_worker_that_died_are_released(trio: list[Process]) -> None:
    trio[2].run(begin_and_stay)
    trio[1].run(wait_for_contexts, 1)
    trio[2].kill()
    trio[1].run(wait_for_contexts, 0)


def shut_down_in_a_context() -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        autograd.backward_async(context, rpc_sync("worker1", torch.sin, (x,)).sum()).wait()
    shutdown()


def ends_as_the_connection_breaks() -> None:
    """End a context while its `Release` is lost with the connection."""
    agent = current.agent()
    notify = agent.notify
    lost: list[str] = []

    def lose(to: Any, message: Any, *rest: Any, **named: Any) -> None:
        if type(message).__name__ == "Release" and not lost:
            lost.append(to)
            agent._connections.peer(to).link.close(PeerLost("cut by the test"))
            return
        notify(to, message, *rest, **named)

    agent.notify = lose
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, rpc_sync("worker1", torch.sin, (x,)).sum())
        assert rpc_sync("worker1", contexts) == 1
    agent.notify = notify
    assert lost == ["worker1"]
    wait_until(lambda: rpc_sync("worker1", contexts) == 0)


def test_the_end_of_a_context_is_noticed_after_a_broken_connection(trio: list[Process]) -> None:
    trio[0].run(ends_as_the_connection_breaks)


def ends_without_a_word() -> None:
    """End a context while its `Release` is lost, without a broken connection."""
    agent = current.agent()
    notify = agent.notify
    agent.notify = lambda to, message, *rest, **named: (
        None if type(message).__name__ == "Release" else notify(to, message, *rest, **named)
    )
    with autograd.context():
        rpc_sync("worker1", torch.sin, (torch.ones(3, requires_grad=True),))
    agent.notify = notify


@pytest.mark.nightly  # waits for the timer; the tests of `Contexts` and of a broken connection take the same steps
def test_the_end_of_a_context_is_noticed_without_a_message(trio: list[Process]) -> None:
    trio[0].run(ends_without_a_word)
    assert trio[1].run(contexts) == 1
    trio[1].run(wait_for_contexts, 0)


def lose(rank: int) -> None:
    """Treat a worker as dead."""
    agent = current.agent()
    for tell in agent.lost:
        tell(agent.identify(rank), PeerUnreachable("it only seems so"))


def use_what_others_let_go_of() -> int:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = rpc_sync("worker1", relayed, (x,)).sum()
        rpc_sync("worker1", lose, (0,))
        with pytest.raises(ContextLost, match="'worker1' has dropped"):
            rpc_sync("worker1", torch.sin, (x,))
        with pytest.raises(ContextLost, match="'worker1' has dropped"):
            autograd.backward(context, loss)
        return int(rpc_sync("worker2", contexts))


def test_a_worker_that_gave_up_a_live_context_reports_this_at_its_next_use(trio: list[Process]) -> None:
    assert trio[0].run(use_what_others_let_go_of) == 1  # the third worker has asked the owner, and kept the context
    trio[2].run(wait_for_contexts, 0)


def test_a_live_context_is_kept(trio: list[Process]) -> None:
    trio[2].run(begin_and_stay)
    assert trio[1].run(ask_three_times) == 1


def ask_three_times() -> Any:
    """Ask the owner of the context three times if it has ended; return the number of contexts after that."""
    held = current.conductor().contexts
    (context,) = held._foreign()
    for _ in range(3):
        held._ask([context])
        rpc_sync("worker2", torch.sin, (torch.ones(1),))
    return contexts()


def test_a_device_that_fails_for_good_fails_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn() -> Any:
        raise RuntimeError("the device is lost")

    with agents(2) as workers:
        current.enter(workers[0])
        with autograd.context() as context:
            loss = rpc_sync("w1", torch.sin, (torch.ones(3, requires_grad=True),)).sum()
            monkeypatch.setattr(workers[1].agent.streams, "turn", turn)
            with pytest.raises(RuntimeError, match="the device is lost"):
                autograd.backward(context, loss)
            monkeypatch.undo()
        current.enter(None)


def test_shutdown_after_a_pass(trio: list[Process]) -> None:
    trio[0].begin(shut_down_in_a_context)
    for other in trio[1:]:
        other.begin(shutdown)
    for process in trio:
        process.end()


def test_a_pass_goes_on_if_an_earlier_worker_of_a_name_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []
    with agents(2) as (worker, other):
        conductor, context = worker.conductor, worker.conductor.contexts.begin()
        context.meet(other.me.identity)
        driven: Any = SimpleNamespace(workers={"w1"}, context=context)
        monkeypatch.setattr(conductor, "_driven", {"a pass": driven})
        monkeypatch.setattr(conductor, "_fail", lambda each, _: failed.append(each))
        conductor._on_lost(other.me.identity._replace(incarnation="an earlier life"), PeerLost("late news"))
        assert not failed
        conductor._on_lost(other.me.identity, PeerLost("it died"))
        assert failed == ["a pass"]
        monkeypatch.setattr(conductor, "_driven", {})
