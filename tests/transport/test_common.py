"""A common block is lent to many receivers, each with private writes, and reused after the last release."""

import errno
import gc
import mmap
import os
import time
from typing import NoReturn

import pytest
import torch

from telegrad._core.memory.blobs import SharedMaps
from telegrad._core.memory.device_streams import Streams
from telegrad._core.memory.warm_memory import KEEP, SHARING, SharedBlockPool
from telegrad._core.wire.messages import COMMON
from telegrad._core.worker import current
from tests.cluster import agents, group, wait_until

MB = 1 << 20
pytestmark = pytest.mark.skipif(not SHARING, reason="this platform has no memory files")


def common(pool: SharedBlockPool, size: int = MB) -> torch.Tensor:
    tensor = pool.take_common(size)
    assert tensor is not None
    return tensor


def lend(pool: SharedBlockPool, tensor: torch.Tensor, maps: SharedMaps) -> torch.Tensor:
    """Lend a tensor to one receiver; return the tensor that the receiver sees."""
    loan = pool.lend(tensor)
    assert loan is not None
    assert loan.number & COMMON
    maps.arrived.append(os.dup(loan.block.fd))
    return maps.attach(loan.number, tensor.numel())


# The pool


def test_receivers_see_the_content_and_write_privately() -> None:
    pool, maps = SharedBlockPool(8 * MB), [SharedMaps(Streams()) for _ in range(3)]
    tensor = common(pool)
    tensor.fill_(7)
    seen = [lend(pool, tensor, each) for each in maps]
    assert all(bool((each == 7).all()) for each in seen)
    seen[0].fill_(1)
    assert [int(each[-1]) for each in (tensor, *seen)] == [7, 1, 7, 7]
    pool.close()


def test_a_loan_that_cannot_be_mapped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int, **__: int) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    pool = SharedBlockPool(8 * MB)
    tensor = common(pool)
    where = tensor.data_ptr()
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        with pytest.raises(OSError, match="Too many"):
            pool.private(tensor)
    del tensor
    assert common(pool).data_ptr() == where
    pool.close()


def test_a_block_is_reused_only_after_the_last_release() -> None:
    pool, maps = SharedBlockPool(8 * MB), [SharedMaps(Streams()) for _ in range(2)]
    tensor = common(pool)
    where = tensor.data_ptr()
    seen = [lend(pool, tensor, each) for each in maps]
    del tensor
    for _ in range(2):
        assert common(pool).data_ptr() != where
        seen.pop()
        gc.collect()
        for each in maps:
            pool.give_back(each.released)
            each.released.clear()
    assert pool.lent == 0
    assert where in {each.data_ptr() for each in [common(pool) for _ in range(2)]}
    pool.close()


def test_one_mapping_serves_many_loans_until_it_is_idle() -> None:
    pool, maps, places = SharedBlockPool(8 * MB), SharedMaps(Streams()), set()
    tensor = common(pool)
    for value in range(3):
        tensor.fill_(value)
        seen = lend(pool, tensor, maps)
        seen.fill_(9)  # a private write of this receiver
        assert bool((pool.lasting(seen) == value).all())
        places.add(pool.lasting(seen).data_ptr())
        pool.give_back([*maps.released])
    assert len(places) == 1
    assert pool.lasting(tensor) is tensor
    maps.lasting.trim()
    assert maps.lasting._maps
    maps.close()
    assert not maps.lasting._maps
    pool.close()


def test_a_block_can_be_lent_again_while_its_tensor_lives() -> None:
    pool = SharedBlockPool(8 * MB)
    tensor = common(pool)
    for _ in range(3):
        loan = pool.lend(tensor[: MB // 2])  # a prefix of the block
        assert loan is not None
        pool.give_back([loan.number])
    assert pool.lend(tensor[1:]) is None
    assert pool.lend(torch.empty(MB, dtype=torch.uint8)) is None
    assert common(pool).data_ptr() != tensor.data_ptr()
    pool.close()


def test_a_block_that_a_lost_receiver_may_read_is_never_reused() -> None:
    pool, maps = SharedBlockPool(8 * MB), SharedMaps(Streams())
    tensor = common(pool)
    tensor.fill_(7)
    seen, other = lend(pool, tensor, maps), pool.lend(tensor)
    assert other is not None
    pool.abandon([COMMON | 2])
    assert pool.lent == 1
    pool.give_back([other.number])
    del tensor
    assert pool.trim(0.0) == []
    assert not any(pool._bytes.values())  # the pool has given the block up
    assert bool((seen == 7).all())
    pool.close()


def test_both_kinds_of_blocks_share_a_limit_and_idle_ones_are_freed_for_others() -> None:
    pool = SharedBlockPool(4 * MB)
    block, tensor = pool.take(2 * MB), common(pool, 2 * MB)
    assert block is not None
    assert (pool.take_common(MB), pool.take(MB)) == (None, None)
    del tensor
    assert pool.take(MB) is not None  # the idle common block was freed
    pool.give_back([block.number])
    assert pool.take_common(2 * MB) is not None
    pool.close()


def test_idle_blocks_are_freed_after_a_while() -> None:
    pool, before = SharedBlockPool(4 * MB), len(os.listdir("/proc/self/fd"))
    common(pool)
    now = time.monotonic()
    pool.trim(now)
    assert any(pool._bytes.values())
    pool.trim(now + 2 * KEEP)
    assert not any(pool._bytes.values())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_tensor_outlives_the_pool() -> None:
    pool = SharedBlockPool(4 * MB)
    tensor = common(pool)
    loan = pool.lend(tensor)
    assert loan is not None
    pool.close()
    tensor.fill_(3)
    assert (int(tensor.sum()), pool.lend(tensor), pool.take_common(MB)) == (3 * MB, None, None)
    pool.give_back([loan.number])
    del tensor
    assert pool.trim(0.0) == []


def test_receivers_cannot_map_a_block_for_writing() -> None:
    pool = SharedBlockPool(4 * MB)
    tensor = common(pool)
    loan = pool.lend(tensor)
    assert loan is not None
    try:
        mmap.mmap(loan.block.fd, MB)
    except PermissionError:
        pass
    else:
        pytest.skip("this kernel has no such seal")
    pool.close()


# Over connections

_kept: dict[str, torch.Tensor] = {}


def keep(name: str, value: torch.Tensor) -> None:
    _kept[name] = value


def scribble(value: torch.Tensor) -> float:
    value.add_(1)
    return float(value.sum())


def total(value: torch.Tensor) -> float:
    return float(value.sum())


def total_of(name: str) -> float:
    return float(_kept.pop(name).sum())


def mapped() -> tuple[int, int]:
    """Return the number of descriptors and of mappings of memory files in this process."""
    gc.collect()
    links = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    with open("/proc/self/maps") as maps:
        return sum("memfd:telegrad" in link for link in links), sum("memfd:telegrad" in line for line in maps)


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_writes_of_many_receivers_do_not_reach_the_sender(way: str) -> None:
    with agents(4, transport=way) as workers:
        agent = workers[0].agent
        tensor = agent.memory.common(MB).view(torch.float32)
        tensor.fill_(1)
        count = tensor.numel()
        for _ in range(3):
            futures = [agent.call_async(f"w{rank}", scribble, (tensor,), None) for rank in (1, 2, 3)]
            assert [future.wait() for future in futures] == [2 * count] * 3
        assert float(tensor.sum()) == count
        pool = agent.memory
        assert bool(pool._common) is (way == "unix")
        assert not pool._shelf._unused  # no content was copied into ordinary blocks
        wait_until(lambda: pool.lent == 0)


def test_answers_lend_common_blocks_and_small_tensors_are_plain() -> None:
    with agents(2, transport="unix") as workers:
        answer = workers[1].agent.memory.common(MB)
        answer.fill_(5)
        _kept["answer"] = answer
        assert torch.equal(workers[0].agent.call("w1", _kept.get, ("answer",), None), answer)
        pool = workers[1].agent.memory
        assert not pool._shelf._unused
        assert workers[1].agent.memory.common(1024).numel() == 1024
        assert len(pool._common) == 1
        _kept.clear()


def test_above_the_limit_common_memory_is_plain_memory(caplog: pytest.LogCaptureFixture) -> None:
    with agents(2, transport="unix", shared_memory=2 * MB) as workers:
        agent = workers[0].agent
        held = [agent.memory.common(MB) for _ in range(2)]
        assert not caplog.messages
        held += [agent.memory.common(MB) for _ in range(2)]
        assert len(agent.memory._common) == 2
        (said,) = caplog.messages
        assert "2097152 of 2097152 bytes are in use" in said
        assert "raise the option shared_memory to at least 3145728" in said
        for tensor in held:
            tensor.fill_(2)
            assert agent.call("w1", total, (tensor,), None) == 2 * MB


def test_a_first_message_that_waits_for_its_connection_lends_a_block() -> None:
    with agents(3, transport="unix") as workers:
        agent = workers[0].agent
        tensor = agent.memory.common(MB)
        tensor.fill_(1)
        futures = [agent.call_async(f"w{rank}", total, (tensor,), None) for rank in (1, 2)]
        assert [future.wait() for future in futures] == [MB, MB]
        assert not agent.memory._shelf._unused


def test_a_killed_receiver_does_not_harm_the_other_receivers() -> None:
    with group(3) as made:
        made[0].run(_publish)
        made[0].run(_send_to_both)
        made[1].kill()
        assert made[0].run(_after_the_death)


def _publish() -> None:
    _kept["source"] = current.agent().memory.common(MB)
    _kept["source"].fill_(1)


def _send_to_both() -> None:
    for rank in (1, 2):
        current.agent().call(f"worker{rank}", keep, ("it", _kept["source"]), None)


def _after_the_death() -> bool:
    agent = current.agent()
    pool = agent.memory
    wait_until(lambda: pool.lent == 1)  # the loan to the killed worker was given up
    agent.call("worker2", keep, ("again", _kept["source"]), None)  # other receivers still get loans
    _kept.clear()
    for name in ("it", "again"):
        assert agent.call("worker2", total_of, (name,), None) == MB
    gc.collect()
    wait_until(lambda: not any(pool._bytes.values()))
    return pool.lent == 0


def test_many_messages_leave_no_descriptor_and_no_mapping() -> None:
    with group(2) as made:
        made[0].run(_publish)
        made[0].run(_send_often, 20)
        before = [each.run(mapped) for each in made]
        made[0].run(_send_often, 100)
        made[0].run(_release)
        assert [each.run(mapped) for each in made] == before


def _send_often(times: int) -> None:
    agent = current.agent()
    for _ in range(times // 20):
        futures = [agent.call_async("worker1", total, (_kept["source"],), None) for _ in range(20)]
        assert [future.wait() for future in futures] == [MB] * 20
    _release()


def _release() -> None:
    wait_until(lambda: current.agent()._connections.memory.lent == 0)
