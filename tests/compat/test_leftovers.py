"""What gatherings and scripted modules of the drop-in leave behind: nothing."""

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from telegrad.compat import remote_module
from telegrad.compat.remote_module import RemoteModule
from telegrad.compat.rpc import api
from telegrad.errors import CallTimeout, PeerLost
from tests.cluster import agents, agents_here
from tests.rpc.test_publishing import on


@pytest.fixture(scope="module", autouse=True)
def worker() -> Iterator[None]:
    with agents_here(2):
        yield
    api._forget_rounds()


def test_objects_that_arrive_after_a_failed_gathering_are_dropped() -> None:
    with pytest.raises(CallTimeout, match="w1 timed out in _all_gather"):
        api._all_gather(1, {"w0", "w1"}, timeout=0.01)
    api._gather_to_leader("w0,w1#0", "w1", 2)
    api._broadcast_to_followers("w0,w1#0", {}, CallTimeout("late"))
    assert not api._rounds
    api._gather_to_leader("w0,w1#1", "w1", 2)  # this worker has not begun this one
    assert api._all_gather(1, {"w0", "w1"}) == {"w0": 1, "w1": 2}
    assert not api._rounds


@pytest.mark.parametrize("ended", [0, 1])  # w0 gathers the objects
def test_a_gathering_names_the_worker_that_has_ended(ended: int) -> None:
    with agents(2) as workers:
        workers[ended].end("")
        with pytest.raises(PeerLost, match=f"^worker 'w{ended}' was lost before it called shutdown"):
            on(workers[1 - ended], api._all_gather, None, {"w0", "w1"})


@torch.jit.interface
class Linear:
    def forward(self, value: Tensor) -> Tensor:  # type: ignore[empty-body]
        pass


def test_scripted_modules_end_with_their_last_use() -> None:
    def make() -> nn.Module:
        return torch.jit.script(RemoteModule("w1", nn.Linear, (2, 1), None, Linear))

    first, second = make(), make()
    assert type(first) is type(second)
    assert [*remote_module._callables] == [int(first.handle_number), int(second.handle_number)]  # type: ignore[arg-type]
    with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):  # a copy would have no callable
        copy.deepcopy(first)
    assert not torch.equal(second(torch.ones(1, 2)), first(torch.ones(1, 2)))
    del first, second
    gc.collect()
    assert not remote_module._callables
