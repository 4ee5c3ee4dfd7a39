"""Requests to CUDA for sharing memory between processes, and the number of lent blocks."""

import gc
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.storage import UntypedStorage

from benchmarks.cuda import bandwidth
from telegrad import errors, rpc
from telegrad._core.memory import staging
from telegrad._core.memory.device_streams import Streams
from telegrad._core.memory.staging import Staging
from telegrad._core.memory.warm_memory import KEEP, MOST_LENT, SharedBlockPool
from telegrad._core.wire.tensors import DeviceBlob
from tests import accelerator
from tests.accelerator.apart import apart
from tests.devices.kinds import SIM, Sharer, group, replaced

SHARED = (b"handle", 512, 64, b"counter", 3, b"event", True)  # torch's description of a storage, without its device


class Gpu:
    """A part of torch.cuda as two processes see it: one opens what the other exports."""

    def __init__(self, uuids: list[str]) -> None:
        self.uuids = uuids

    def device_count(self) -> int:
        return len(self.uuids)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=self.uuids[index])

    def device(self, index: int) -> torch.no_grad:
        return torch.no_grad()

    Event = SimpleNamespace(from_ipc_handle=lambda device, handle: (str(device), handle))


class Storage:
    opened: tuple[int | bytes, ...] = ()

    @staticmethod
    def _new_shared_cuda(index: int, *shared: bytes | int) -> UntypedStorage:
        Storage.opened = index, *shared
        return torch.ones(512, dtype=torch.uint8).untyped_storage()


def test_a_process_opens_a_block_that_another_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", Gpu(["first", "second"]))
    block: Any = SimpleNamespace(
        device=torch.device("cuda:1"), untyped_storage=lambda: SimpleNamespace(_share_cuda_=lambda: (1, *SHARED))
    )
    events: Any = [SimpleNamespace(ipc_handle=lambda name=name: name) for name in (b"filled", b"emptied")]
    exported = staging.Cuda().export(block, events)

    monkeypatch.setattr(torch, "cuda", Gpu(["second"]))  # with other CUDA_VISIBLE_DEVICES
    monkeypatch.setattr(torch, "UntypedStorage", Storage)
    monkeypatch.setattr(staging, "device", lambda index: torch.device("cpu"))
    opened, opened_events = staging.Cuda().open(exported)
    assert Storage.opened == (0, *SHARED)
    assert opened.numel() == 512
    assert opened_events == (("cpu", b"filled"), ("cpu", b"emptied"))

    monkeypatch.setattr(torch, "cuda", Gpu(["third"]))
    with pytest.raises(errors.DeviceError, match="the GPU second is not visible to this worker"):
        staging.Cuda().open(exported)


@pytest.mark.parametrize("kind", [SIM])
@apart
def test_blocks_are_bounded_reused_and_freed(kind: str) -> None:
    with replaced(staging.SHARERS, {"sim": Sharer()}):
        pool = SharedBlockPool(1 << 30)
        limit = Sharer().limit(0)
        first = pool.take_on(0, limit // 2)
        assert first.capacity >= limit // 2
        assert pool.take_on(0, limit) is None
        assert pool.take_on(1, limit) is not None  # each device has its own limit
        pool.give_back([first.number])
        assert pool.take_on(0, limit // 2) is first
        pool.give_back([first.number])
        assert pool.trim(monotonic() + KEEP) == [first.number]
        assert not pool._bytes[0]
        blocks = [pool.take_on(0, 1) for _ in range(2 * MOST_LENT)]
        assert pool.lent == MOST_LENT == len([block for block in blocks if block is not None]) + 1
        pool.close()
        assert pool.take_on(0, 1) is None


@pytest.mark.parametrize("kind", [SIM])
@apart
def test_a_block_is_refilled_only_after_it_was_read(kind: str) -> None:
    """The events of a block order its uses, without a wait on the host."""
    with replaced(staging.SHARERS, {"sim": Sharer()}):
        streams = Streams()
        block = staging.DeviceBlock(1, 1024, 0)
        there = staging.open_block(block.handle())
        for number in range(5):
            block.fill(DeviceBlob(torch.full((100,), number, dtype=torch.uint8, device="sim:0"), 1))
            arrived = there.take(100, 1, streams)
            streams.stream("arrivals", 1).synchronize()
            assert arrived.blob.tolist() == [number] * 100
        assert accelerator.violations() == []


@pytest.mark.parametrize("kind", [SIM])
@apart
def test_a_copy_to_the_host_outlives_its_connection(kind: str) -> None:
    """The memory is not reused while the device still copies."""
    staging = Staging(Streams())
    departure = staging.depart(DeviceBlob(torch.ones(9 << 20, dtype=torch.uint8, device="sim:0"), 0))
    assert not departure.over
    del departure
    gc.collect()
    assert accelerator.violations() == []
    assert not staging.depart(DeviceBlob(torch.ones(5, dtype=torch.uint8, device="sim:0"), 0)).ready


@pytest.mark.parametrize("kind", [SIM])
@apart
def test_the_benchmark_runs(kind: str) -> None:
    with group(kind), patch("benchmarks.cuda.OTHER", "w1"):
        for direction in ("to", "from", "echo"):
            assert bandwidth(rpc, 4096, direction, "sim:0") > 0
