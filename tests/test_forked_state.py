"""A forked child has no calls, contexts, passes or turns of its parent, and can join a group of its own."""

import contextlib
import functools
import gc
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch import fx, nn

from telegrad import autograd, rpc
from telegrad._core import events
from telegrad._core.calls import call_context
from telegrad._core.reactor import reactor
from telegrad.autograd import guard
from telegrad.insight.prometheus import EventCounters
from telegrad.optim.owner import guards_of, holding
from telegrad.pipeline import comparison, exporting
from telegrad.pipeline.stage import Stage
from telegrad.reporting import process_state
from tests.cluster import PATIENCE, processes
from tests.test_atfork import elsewhere, outcome
from tests.test_forked import in_child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")


@contextlib.contextmanager
def group_of(name: str) -> Iterator[None]:
    """Join a group of this process alone, under the given name."""
    with tempfile.TemporaryDirectory() as folder:
        options = rpc.TelegradOptions(init_method=f"file://{folder}/store")
        rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options)
        try:
            yield
        finally:
            rpc.shutdown(graceful=False)


def in_plain_child(act: Callable[[], Any]) -> Any:
    """Return the result of `act` in a forked child."""
    return in_child(lambda: outcome(act))


def joins(act: Callable[[], Any]) -> Any:
    """Return the result of `act` in a forked child that has joined a group of its own, as "child"."""

    def run() -> Any:
        with group_of("child"):
            return act()

    return in_plain_child(run)


def acts() -> list[int]:
    @rpc.actor
    class Actor:
        def steps(self) -> Iterator[int]:
            yield from (1, 2)

    return list(rpc.remote("child", Actor).rpc_stream().steps())


def passes() -> float:
    """Run a backward pass through the child itself."""
    x = torch.ones(1, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("child", torch.mul, (x, 3.0)).sum()])
        return float(autograd.get_gradients(context_id)[x])


def hooks() -> list[int]:
    """Return the calls of a hook of two tensors, also on a new thread, which may reuse a thread id of the parent."""
    heard: list[int] = []

    def run() -> None:
        both = [torch.ones(1, requires_grad=True) for _ in range(2)]
        torch.autograd.graph.register_multi_grad_hook(both, lambda found: heard.append(len(found)))
        (both[0] * both[1]).sum().backward()

    run()
    on_new_thread(run)
    return heard


def on_new_thread(act: Callable[[], Any]) -> Any:
    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.append(act()))
    thread.start()
    thread.join()
    return told[0]


def calls() -> int:
    return int(rpc.rpc_sync("child", pow, (2, 3)))


def forks_and_joins() -> Any:
    return joins(calls)


class Gate(nn.Module):
    """A module whose forward pass blocks in the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.is_in = threading.Event()
        self.go_on = threading.Event()
        self.waits = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_in.set()
        if self.waits:
            self.go_on.wait(PATIENCE)
        return x * self.weight


def steps(gate: Gate) -> float:
    gate.waits = False
    with holding(guards_of([gate.weight])):
        return float(Stage(rpc.RRef(gate), "a stage").run(torch.ones(1)))


def saves() -> Any:
    def enter() -> str:
        with torch.autograd.graph.save_on_cpu():
            return "entered"

    return on_new_thread(enter)


def traces() -> float:
    """Call a module with an unused tracer."""
    module, tracer = nn.Identity(), fx.Tracer()
    return float(on_new_thread(lambda: tracer.call_module(module, module.forward, (torch.ones(1),), {})))


def inherited_gradients() -> str:
    with autograd.context():
        x = torch.ones(1, requires_grad=True)
        loss = (rpc.rpc_sync("parent", torch.mul, (x, 2.0)) * x).sum()
        return str(in_plain_child(lambda: torch.autograd.grad(loss, [x])))[:17]


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Mark a pass as running on this thread, and on another one."""
    guard.install()
    guard.running.add(threading.get_ident())
    try:
        with elsewhere(lambda: contextlib.closing(Running())):
            yield
    finally:
        guard.running.clear()


class Running:
    def __init__(self) -> None:
        guard.running.add(threading.get_ident())

    def close(self) -> None: ...


@contextlib.contextmanager
def counted() -> Iterator[None]:
    counters = EventCounters()
    events.add(counters)
    try:
        with elsewhere(lambda: counters.lock):
            yield
    finally:
        events.remove(counters)


def limited() -> contextlib.AbstractContextManager[None]:
    return call_context.entered(call_context.CallContext(until=time.monotonic()))


@contextlib.contextmanager
def helps() -> Iterator[None]:
    reactor._here.own = deque()
    try:
        yield
    finally:
        reactor._here.own = None


@contextlib.contextmanager
def stepping(gate: Gate) -> Iterator[None]:
    stage = Stage(rpc.RRef(gate), "a stage")
    thread = threading.Thread(target=stage.run, args=(torch.ones(1),))
    thread.start()
    try:
        assert gate.is_in.wait(PATIENCE)
        with elsewhere(lambda: holding(guards_of([gate.weight]))):
            yield
    finally:
        gate.go_on.set()
        thread.join()


def collects() -> bool:
    """Return True if a child collects garbage although it was forked while another thread read all frames."""
    is_in, go_on = threading.Event(), threading.Event()

    def frames() -> NoReturn:
        is_in.set()
        go_on.wait(PATIENCE)
        raise InterruptedError

    def look() -> None:
        with contextlib.suppress(InterruptedError):
            process_state.all_stacks()

    real, sys._current_frames = sys._current_frames, frames
    try:
        thread = threading.Thread(target=look)
        thread.start()
        assert is_in.wait(PATIENCE)
        assert not gc.isenabled()
        told = in_child(gc.isenabled)
    finally:
        go_on.set()
        thread.join()
        sys._current_frames = real
    assert gc.isenabled()
    return bool(told)


def within(around: Callable[[], contextlib.AbstractContextManager[Any]], child: Callable[[], Any]) -> Any:
    """Run a child that is forked inside of the context manager `around()`."""
    with around():
        return child()


def in_a_turn() -> Any:
    gate = Gate()
    with stepping(gate):
        return joins(functools.partial(steps, gate))


# The results in a child, and the expected ones. The parent is in a group of its own.
FOUND: dict[str, tuple[Callable[[], Any], Any]] = {
    "actors": (lambda: joins(acts), [1, 2]),
    "a context": (lambda: within(autograd.context, lambda: joins(passes)), 3.0),
    "gradients of other workers": (inherited_gradients, "raises UsageError"),
    "a remote function": (lambda: rpc.rpc_sync("parent", forks_and_joins), 8),
    "a pass": (lambda: within(running, lambda: joins(hooks)), [2, 2]),
    "metrics": (lambda: within(counted, lambda: joins(calls)), 8),
    "a thread that helps": (lambda: within(helps, lambda: in_plain_child(lambda: reactor._here.own)), None),
    "a limit": (lambda: within(limited, lambda: in_plain_child(rpc.time_left)), None),
    "a turn": (in_a_turn, 1.0),
    "a comparison": (
        lambda: within(lambda: elsewhere(comparison._no_saving), lambda: in_plain_child(saves)),
        "entered",
    ),
    "an export": (lambda: within(lambda: elsewhere(exporting._this_thread_alone), lambda: in_plain_child(traces)), 1.0),
    "a look at all frames": (collects, True),
}


def find(name: str) -> Any:
    with group_of("parent"):
        return FOUND[name][0]()


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("name", FOUND)
def test_a_forked_child_does_not_inherit_state_of_its_parent(name: str) -> None:
    with processes(1) as (process,):
        assert process.run(find, name) == FOUND[name][1]
