"""Shared memory is lent, comes back with the end of its last tensor, and is bounded."""

import errno
import gc
import mmap
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from time import monotonic
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from telegrad._core.memory import lending, warm_memory
from telegrad._core.memory.blobs import Outgoing, Prepared, SharedMaps
from telegrad._core.memory.device_streams import Streams
from telegrad._core.memory.lending import SharedLender
from telegrad._core.memory.warm_memory import (
    KEEP,
    MOST_MAPS,
    SHARING,
    WARM_FROM,
    LastingMaps,
    ReceiveBufferPool,
    SharedBlockPool,
    size_class,
)
from telegrad._core.wire.tensors import Blob
from telegrad.errors import ProtocolViolation
from tests.cluster import PATIENCE, agents, wait_until

MB = 1 << 20
needs_forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no forks")
needs_sharing = pytest.mark.skipif(not SHARING, reason="this platform has no memory files")


def test_sizes_are_rounded_up_by_at_most_a_quarter() -> None:
    for size in (WARM_FROM, 5 * MB + 1, 64 * MB, 64 * MB + 1):
        assert size <= size_class(size) <= 1.25 * size + 4096


def test_warm_memory_is_reused() -> None:
    arena = ReceiveBufferPool(64 * MB)
    tensor, memory = arena.allocate(MB)
    memory[:3] = b"abc"
    assert tensor[:3].tolist() == [97, 98, 99]
    where = tensor.data_ptr()
    view = tensor.view(torch.float32)[5:9]
    del tensor, memory
    assert arena.allocate(MB)[0].data_ptr() != where  # a view is still alive
    del view
    assert where in {arena.allocate(MB)[0].data_ptr() for _ in range(2)}


def test_an_arena_keeps_no_more_than_its_limit() -> None:
    arena = ReceiveBufferPool(2 * MB)
    tensors = [arena.allocate(MB)[0] for _ in range(5)]
    tensors.clear()
    gc.collect()
    arena.allocate(MB)
    assert arena._kept <= 2 * MB
    arena.trim(float("inf"))
    assert arena._kept == 0


@needs_sharing
def test_a_receiver_maps_a_block_and_releases_it() -> None:
    pool, maps = SharedBlockPool(8 * MB), SharedMaps(Streams())
    block = pool.take(MB)
    block.fill(torch.arange(MB // 8).view(torch.uint8))
    maps.arrived.append(os.dup(block.fd))
    tensor = maps.attach(block.number, MB)
    assert torch.equal(tensor.view(torch.int64), torch.arange(MB // 8))
    assert not maps.released
    del tensor
    assert list(maps.released) == [block.number]
    pool.give_back(maps.released)
    assert pool.take(MB) is block
    pool.give_back([block.number])
    assert maps.attach(block.number, 10).numel() == 10  # a mapped block needs no descriptor
    maps.close()
    pool.close()


@needs_sharing
def test_a_pool_is_bounded_and_frees_idle_blocks_for_others() -> None:
    pool = SharedBlockPool(4 * MB)
    blocks = [pool.take(2 * MB), pool.take(2 * MB)]
    assert (pool.take(MB), pool.take(5 * MB)) == (None, None)
    pool.give_back([blocks[0].number])
    assert pool.take(MB) is not None  # the idle block was freed
    assert pool.trim(0.0) == [blocks[0].number]
    pool.close()


@needs_sharing
def test_a_pool_without_memory_gives_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
    pool, before = SharedBlockPool(4 * MB), len(os.listdir("/proc/self/fd"))
    assert (pool.take(MB), len(os.listdir("/proc/self/fd"))) == (None, before)
    assert not any(pool._bytes.values())


@needs_sharing
def test_idle_blocks_are_freed_after_a_while() -> None:
    pool = SharedBlockPool(4 * MB)
    block = pool.take(MB)
    pool.give_back([block.number])
    assert (pool.trim(monotonic() + KEEP / 2), pool.trim(monotonic() + KEEP)) == ([], [block.number])
    assert not any(pool._bytes.values())
    pool.close()


@needs_sharing
def test_a_block_that_a_lost_peer_holds_is_not_reused() -> None:
    pool, maps = SharedBlockPool(4 * MB), SharedMaps(Streams())
    block = pool.take(MB)
    block.fill(torch.ones(MB, dtype=torch.uint8))
    maps.arrived.append(os.dup(block.fd))
    tensor = maps.attach(block.number, MB)
    pool.abandon([block.number])
    other = pool.take(MB)
    other.fill(torch.zeros(MB, dtype=torch.uint8))
    assert tensor.all()  # the content is unchanged
    assert pool.trim(0.0) == [block.number]  # the peers that mapped the block are asked to unmap it
    pool.close()


def echo(value: torch.Tensor) -> torch.Tensor:
    return value


@needs_sharing
def test_an_argument_that_is_returned_frees_its_block_with_the_answer() -> None:
    with agents(2, transport="unix") as group:
        pools = [worker.agent.memory for worker in group]
        sent = torch.ones(MB)
        for _ in range(4):
            assert torch.equal(group[0].agent.call("w1", echo, (sent,), None), sent)
            assert pools[0].lent == 0
        assert [pool._made for pool in pools] == [1, 1]


kept: list[torch.Tensor] = []


def keep(value: torch.Tensor) -> None:
    kept.append(value)


def look(pipe: Connection) -> None:
    while pipe.recv():
        values = [kept[0][0].item(), kept[0][-1].item()]
        kept[0][0] = 5
        pipe.send(values)


@needs_sharing
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_memory_that_a_forked_child_has_is_not_reused(transport: str) -> None:
    with agents(2, transport=transport) as group:
        agent, pool = group[0].agent, group[0].agent.memory
        agent.call("w1", keep, (torch.ones(MB),), None)
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=look, args=(theirs,))
        child.start()
        ours.send(True)
        assert ours.recv() == [1, 1]
        if transport == "tcp":
            assert kept[0][0] == 1  # the child has changed its own copy
        kept.clear()
        for _ in range(4):
            agent.call("w1", echo, (torch.zeros(MB),), None)
        ours.send(True)
        assert (ours.recv()[1], pool.lent) == (1, transport == "unix")
        ours.send(False)
        child.join(PATIENCE)
        wait_until(lambda: pool.lent == 0)  # once no child has it


@needs_forks
def test_two_threads_may_take_back_memory_of_an_ended_child_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    lender, fork = SharedLender(ended.append), lending._Fork()
    tensors = [lender.lend(memoryview(bytearray(8)), 8, number) for number in range(2)]
    lender.fork(fork)
    fork.only_read()  # there is no child
    tensors.clear()
    is_over = lending._Fork.is_over
    entered: list[bool] = []

    def interrupted(fork: lending._Fork) -> bool:
        if not entered:  # another thread takes back memory while the first one looks at a lease
            entered.append(True)
            lender.tick()
        return is_over(fork)

    monkeypatch.setattr(lending._Fork, "is_over", interrupted)
    lender.tick()
    assert sorted(ended) == [0, 1]


def call_with(called: Callable[[], object], step: int, act: Callable[[], object]) -> bool:
    """Call a function, and `act` before its instruction `step`, as another thread may. Return False if it has less."""
    left = step

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        left -= what == "opcode"
        if left == 0 and what == "opcode":
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        called()
    finally:
        sys.settrace(before)
    return left <= 0


@needs_forks
@pytest.mark.parametrize("moment", ["arrives before a fork", "ends after a fork", "ends after two forks at once"])
def test_a_tensor_of_another_thread_at_the_moment_of_a_fork_is_recorded(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "_forking", {})
    step, is_reached = 0, True
    while is_reached:
        step += 1
        monkeypatch.setattr(lending, "_shared", type(lending._shared)())
        ended: list[int] = []
        lenders = [SharedLender(ended.append) for _ in range(3)]
        tensors: list[torch.Tensor] = []

        def arrive(ended: Any = ended, lenders: Any = lenders, tensors: Any = tensors) -> None:
            lenders.append(SharedLender(ended.append))  # of a connection that is made just now
            tensors.append(lenders[-1].lend(memoryview(bytearray(8)), 8, 1))

        if moment == "arrives before a fork":
            is_reached = call_with(lending._before_fork, step, arrive)
            fork = lending._forking[threading.get_ident()]
            child = os.dup(fork._writing)
            tensors.clear()
            lending._after_fork()
        else:
            arrive()
            lending._before_fork()
            fork = lending._forking[threading.get_ident()]
            if moment == "ends after two forks at once":
                fork = lending._forking[0] = lending._Fork()  # of another thread
            child = os.dup(fork._writing)
            is_reached = call_with(lending._after_fork, step, tensors.clear)
            tensors.clear()
            if lending._forking.pop(0, None):
                fork.only_read()
        for lender in lenders:
            lender.tick()
        assert not ended  # the child has the tensor
        os.close(child)
        for lender in lenders:
            lender.tick()
        assert len(ended) == len(lenders) - 3
    assert step > 10


@needs_sharing
def test_mappings_for_later_loans_may_expire_while_one_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [os.memfd_create("test") for _ in range(MOST_MAPS + 1)]
    for fd in files:
        os.ftruncate(fd, mmap.PAGESIZE)
    step, is_reached = 0, True
    while is_reached:
        step += 1
        maps = LastingMaps()
        monkeypatch.setattr(warm_memory, "monotonic", lambda: 0.0)
        for fd in files[1:]:
            maps.of(fd)
        monkeypatch.setattr(warm_memory, "monotonic", lambda: KEEP)
        is_reached = call_with(partial(maps.of, files[0]), step, maps.trim)
        assert 0 < len(maps._maps) <= MOST_MAPS
    for fd in files:
        os.close(fd)


def test_blocks_that_were_never_passed_are_refused() -> None:
    with pytest.raises(ProtocolViolation, match="never passed"):
        SharedMaps(Streams()).attach(1, 10)


def firsts(tensors: list[torch.Tensor]) -> list[int]:
    return [int(tensor[0]) for tensor in tensors]


@needs_sharing
@pytest.mark.parametrize("common", [False, True], ids=["lent", "common"])
@pytest.mark.parametrize("count", [64, 65, 600])
def test_many_tensors_of_one_message_arrive_in_order(count: int, common: bool) -> None:
    """The test sends more tensors than the 64 descriptors of one write."""
    with agents(2, transport="unix", shared_memory=1 << 30) as group:
        agent = group[0].agent
        sent = [
            (agent.memory.common(1 << 16) if common else torch.empty(1 << 16, dtype=torch.uint8)) for _ in range(count)
        ]
        values = [tensor.view(torch.int32).fill_(number) for number, tensor in enumerate(sent)]
        for _ in range(2):  # first with blocks that are new to the receiver
            assert agent.call("w1", firsts, (values,), None) == list(range(count))


def test_a_tensor_that_cannot_be_prepared_fails_only_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, wanted = Outgoing.prepare, torch.ones(MB)

    def fails(outgoing: Outgoing, blob: Blob, shares: bool = True) -> Prepared:
        if isinstance(blob, torch.Tensor) and blob.data_ptr() == wanted.data_ptr():
            raise MemoryError("no memory")
        return prepare(outgoing, blob, shares)

    monkeypatch.setattr(Outgoing, "prepare", fails)
    gate.clear()
    with agents(2) as group:
        agent, pool = group[0].agent, group[0].agent.memory
        assert agent.call("w1", echo, (torch.ones(1),), None)  # to connect them
        other = agent.call_async("w1", wait_for_gate, None, None)
        with pytest.raises(MemoryError, match="no memory"):
            agent.call("w1", echo, ([torch.ones(MB), wanted],), None)
        assert pool is None or pool.lent == 0
        gate.set()
        assert other.wait()
        assert torch.equal(agent.call("w1", echo, (torch.ones(MB),), None), torch.ones(MB))


gate = threading.Event()


def wait_for_gate() -> bool:
    return gate.wait(PATIENCE)
