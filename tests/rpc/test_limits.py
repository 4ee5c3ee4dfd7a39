"""Tests of the limits on what a worker keeps for another: references, contexts, connections and descriptors."""

import operator
import os
from collections.abc import Iterator

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import autograd
from telegrad._core.memory.warm_memory import SHARE_FROM, SHARING
from telegrad._core.references import reference_table as table_module
from telegrad._core.security.handshake import StreamId
from telegrad._core.transport.connect import Target
from telegrad._core.transport.listener import MOST_CONNECTIONS
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.autograd import contexts as contexts_module
from telegrad.autograd.passes import Abandon, Mark, PassSpec
from telegrad.errors import LimitReached, PeerError
from telegrad.rpc import RRef
from tests.cluster import Three, agents, wait_until

MOST = 20


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Three]:
    """Start a callee with low limits, and two callers."""
    monkeypatch.setattr(table_module, "MOST_HELD", MOST)
    monkeypatch.setattr(contexts_module, "MOST_OPEN", MOST)
    with agents(3) as (callee, caller, other):
        yield callee, caller, other
        current.enter(None)


def count(number: int) -> int:
    made.append(number)
    return number


made: list[int] = []


def held_by(callee: Worker, caller: Worker) -> int:
    return callee.references._machine.holders.counts.get(f"{caller.agent.name}#{caller.agent.incarnation}", 0)


def test_the_values_that_are_kept_for_one_worker_are_limited(three: Three) -> None:
    callee, caller, other = three
    made.clear()

    def remote(worker: Worker, number: int) -> RRef[int]:
        current.enter(worker)
        return rpc.remote("w0", count, (number,))

    kept = [remote(caller, number) for number in range(MOST)]
    assert [each.to_here() for each in kept] == list(range(MOST))
    refused = remote(caller, MOST)
    with pytest.raises(LimitReached, match=r"worker 'w0' keeps 20 values .*'w1' holds.* Delete some references"):
        refused.to_here()
    assert (remote(other, 100).to_here(), sorted(made)) == (100, [*range(MOST), 100])
    current.enter(caller)
    with pytest.raises(LimitReached):
        rpc.rpc_sync("w0", rpc.RRef, (1,))  # the same for references in results
    del refused
    kept.pop()
    wait_until(lambda: held_by(callee, caller) < MOST)
    kept.append(remote(caller, MOST))
    assert kept[-1].to_here() == MOST
    caller.agent.close(PeerError("the end"))
    callee.references._on_death(f"w1#{caller.agent.incarnation}")
    wait_until(lambda: held_by(callee, caller) == 0)


def test_the_connections_of_one_worker_are_limited(three: Three) -> None:
    callee, caller, other = three
    for worker in (caller, other):
        current.enter(worker)
        rpc.rpc_sync("w0", operator.neg, (1,))
    accepted = callee.agent._connections._accepted
    target = Target("w0", callee.agent.incarnation, callee.me.unix, callee.me.tcp, StreamId(""))
    numbers = [f"{number:016x}" for number in range(3 * MOST_CONNECTIONS)]
    channels = [caller.agent._connections._reach(target._replace(stream_id=StreamId(each))) for each in numbers]

    def of(name: str) -> int:
        return sum(link.peer == name for link in list(accepted))

    wait_until(lambda: numbers[-1] in [connection for _, connection in list(accepted.values())])
    wait_until(lambda: of("w1") <= MOST_CONNECTIONS)  # the oldest ends right after the newest was added
    assert (of("w1"), of("w2")) == (MOST_CONNECTIONS, 1)
    assert rpc.rpc_sync("w0", operator.neg, (1,)) == -1  # by the other caller
    current.enter(caller)
    wait_until(lambda: getattr(caller.agent._connections.peer("w0").link, "closed", True))
    assert rpc.rpc_sync("w0", operator.neg, (1,)) == -1  # by a new connection
    for channel in channels:
        channel.sock.close()


def test_the_backward_passes_of_one_worker_are_limited(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts_module, "MOST_PASSES", MOST)
    callee, caller, other = three

    def run(worker: Worker, passes: int) -> None:
        current.enter(worker)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("w0", torch.neg, (torch.ones(1, requires_grad=True),)).sum()
            for _ in range(passes):
                autograd.backward(context_id, [loss], retain_graph=True)

    def none_is_left() -> bool:
        return not sum(callee.conductor.contexts._passes.values()) and not len(callee.conductor.contexts)

    for _ in range(3):
        run(caller, MOST)
        wait_until(none_is_left)
    with pytest.raises(LimitReached, match=r"'w\d' has taken part in 20 backward passes .*rank 1.*begin a new one"):
        run(caller, MOST + 1)
    run(other, MOST)
    wait_until(none_is_left)
    run(caller, MOST)


def test_passes_that_never_begin_or_have_failed_are_counted(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile worker sends marks of passes that never begin, and failures of passes that do not exist."""
    monkeypatch.setattr(contexts_module, "MOST_PASSES", MOST)
    callee, caller, _ = three
    current.enter(caller)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("w0", torch.neg, (torch.ones(1, requires_grad=True),)).sum()
        for number in range(3 * MOST):
            spec = PassSpec(context_id, "w1", 1000 + number // 5, False, False, False, ("w0",))
            caller.agent.notify("w0", Mark(spec, ("w1", number), ()))
            caller.agent.notify("w0", Abandon(spec._replace(number=-number)))
        with pytest.raises(LimitReached):
            autograd.backward(context_id, [loss])
        context = callee.conductor.contexts.find(context_id)
        assert len(context.parts) + sum(map(len, context.early.values())) <= MOST
    rpc.rpc_sync("w0", int)
    wait_until(lambda: not sum(callee.conductor.contexts._passes.values()))


@pytest.mark.skipif(not SHARING, reason="memory is not shared here")
def test_kept_results_use_a_limited_share_of_the_descriptors(three: Three) -> None:
    callee, caller, other = three
    pool = callee.agent.memory
    pool.most_files = MOST

    def make(worker: Worker) -> torch.Tensor:
        current.enter(worker)
        return rpc.rpc_sync("w0", torch.ones, (SHARE_FROM,))

    before = len(os.listdir("/proc/self/fd"))
    kept = [make(caller) for _ in range(3 * MOST)]
    assert pool.lent == MOST // 2
    kept += [make(other) for _ in range(3 * MOST)]
    assert pool.lent == MOST
    assert len(os.listdir("/proc/self/fd")) < before + 3 * MOST + 10  # two of each file, and one of each mapping
    assert all(bool((each == 1).all()) for each in kept)


def test_the_open_contexts_of_one_worker_are_limited(three: Three) -> None:
    callee, caller, other = three
    tensor = torch.ones(2, requires_grad=True)

    def send(worker: Worker) -> None:
        current.enter(worker)
        rpc.rpc_sync("w0", operator.neg, (tensor,))

    def begin(worker: Worker) -> int:
        """Call in a new context that stays open; return its id."""
        context = worker.conductor.contexts.begin()
        with context.entered():
            send(worker)
        return context.id

    own = [begin(caller) for _ in range(MOST)]
    with pytest.raises(LimitReached, match=r"20 autograd contexts of .* rank 1, .*Leave some"):
        begin(caller)
    begin(other)
    caller.conductor.contexts.release(own[0])
    wait_until(lambda: len(callee.conductor.contexts) == MOST)  # one of them of the other caller
    begin(caller)
    for id_ in own[1:]:
        caller.conductor.contexts.release(id_)
    wait_until(lambda: len(callee.conductor.contexts) == 2)
