"""What one worker may have another keep for it: references and autograd contexts, and the error above that."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch

import telegrad.rpc as rpc
from telegrad.autograd import contexts as contexts_module
from telegrad.errors import LimitReached, PeerError
from telegrad.rpc import RRef, current
from telegrad.rpc.worker import Worker
from telegrad.rref import table as table_module
from tests.cluster import agents, wait_until

MOST = 20


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Worker, Worker, Worker]]:
    """The callee, who has little room, and two callers."""
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


def test_no_more_values_are_made_for_one_worker(three: tuple[Worker, Worker, Worker]) -> None:
    callee, caller, other = three
    made.clear()

    def remote(worker: Worker, number: int) -> RRef[int]:
        current.enter(worker)
        return rpc.remote("w0", count, (number,))

    kept = [remote(caller, number) for number in range(MOST)]
    assert [each.to_here() for each in kept] == list(range(MOST))
    refused = remote(caller, MOST)
    with pytest.raises(LimitReached, match=r"worker 'w0' keeps 20 values .*'w1' holds.* Let go of some references"):
        refused.to_here()
    assert remote(other, 100).to_here() == 100
    assert sorted(made) == [*range(MOST), 100]
    current.enter(caller)
    with pytest.raises(LimitReached):
        rpc.rpc_sync("w0", rpc.RRef, (1,))  # the same for those that come as results
    del refused
    kept.pop()
    wait_until(lambda: held_by(callee, caller) < MOST)
    kept.append(remote(caller, MOST))
    assert kept[-1].to_here() == MOST
    caller.agent.close(PeerError("the end"))
    callee.references._on_death(f"w1#{caller.agent.incarnation}")
    wait_until(lambda: held_by(callee, caller) == 0)


def test_no_more_contexts_are_entered_for_one_worker(three: tuple[Worker, Worker, Worker]) -> None:
    callee, caller, other = three
    tensor = torch.ones(2, requires_grad=True)

    def send(worker: Worker) -> None:
        current.enter(worker)
        rpc.rpc_sync("w0", operator.neg, (tensor,))

    def begin(worker: Worker) -> int:
        """Send in a new context, which stays."""
        context = worker.conductor.contexts.begin()
        with context.entered():
            send(worker)
        return context.id

    own = [begin(caller) for _ in range(MOST)]
    with pytest.raises(LimitReached, match=r"20 autograd contexts of .* rank 1, .*Leave some"):
        begin(caller)
    begin(other)
    caller.conductor.contexts.release(own[0])
    wait_until(lambda: len(callee.conductor.contexts) == MOST)  # one of them of the other
    begin(caller)
    for id_ in own[1:]:
        caller.conductor.contexts.release(id_)
    wait_until(lambda: len(callee.conductor.contexts) == 2)
