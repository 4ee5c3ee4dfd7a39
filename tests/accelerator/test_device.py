"""The simulated accelerator finds each kind of missing wait.

The tests of tests/devices run all their programs on it, and fail if it reports work that is in order.
"""

import os
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests import accelerator
from tests.accelerator.apart import apart

pytestmark = pytest.mark.skipif(not accelerator.available(), reason="needs a C++ compiler for the accelerator")

DEVICE = "sim:0"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Compile outside of the first test's time limit."""
    accelerator.build()


def current(device: str = DEVICE) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def pinned(*values: float) -> Tensor:
    return torch.tensor(values).pin_memory()


def settled(*values: float, device: str = DEVICE) -> Tensor:
    """Return a tensor that the host has waited for, so that all streams may use it."""
    return torch.tensor(values).to(device)


def pending(*values: float) -> Tensor:
    """Return a tensor that work on the current stream is still writing."""
    return settled(*values) * 1


# ---- tensors


@apart
def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        settled(1.0, 2.0) + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        settled(1.0, 2.0) @ torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        settled(1.0, 2.0) @ settled(1.0, 2.0, device="sim:1")


# ---- races


def reads(tensor: Tensor) -> object:
    return tensor + 1


def writes(tensor: Tensor) -> object:
    return tensor.fill_(0)


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (writes, reads, "reads memory written by aten::fill_"),
        (writes, writes, "writes memory written by aten::fill_"),
        (reads, writes, "writes memory read by aten::add"),
        (reads, reads, None),
    ],
)
@apart
def test_unordered_uses_are_found(
    first: Callable[..., object], second: Callable[..., object], found: str | None
) -> None:
    tensor = settled(1.0, 2.0)
    kept = [first(tensor)]
    side = torch.Stream(device=DEVICE)
    with side:
        kept.append(second(tensor))
    assert len(accelerator.violations()) == (found is not None)
    assert found is None or found in accelerator.violations()[0]
    assert found is None or "on stream 1 of sim:0" in accelerator.violations()[0]
    accelerator.forget()
    assert accelerator.violations() == []


@apart
def test_an_event_orders_only_what_was_before_it() -> None:
    tensor = settled(1.0, 2.0)
    event = current().record_event()
    tensor.add_(1)
    side = torch.Stream(device=DEVICE)
    side.wait_event(event)
    with side:
        kept = tensor + 1
    assert len(accelerator.violations()) == 1
    del kept


@apart
def test_waiting_is_not_mutual() -> None:
    tensor = settled(1.0, 2.0)
    side = torch.Stream(device=DEVICE)
    side.wait_stream(current())
    with side:
        tensor.add_(1)
    tensor.add_(1)
    assert len(accelerator.violations()) == 1


@apart
def test_memory_belongs_to_the_stream_of_its_allocation() -> None:
    """Work of that stream which has not run yet may have freed the block before."""
    settled(1.0).add_(1)
    tensor = torch.empty(2, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    with side:
        tensor.fill_(0)
    assert "writes memory allocated on stream 0" in accelerator.violations()[0]
    current().wait_stream(side)


@apart
def test_parts_of_a_buffer_are_distinguished() -> None:
    buffer = settled(*range(8))
    buffer[:4].add_(1)
    side = torch.Stream(device=DEVICE)
    with side:
        buffer[4:].add_(1)
    assert accelerator.violations() == []
    with side:
        buffer[3:].add_(1)
    assert len(accelerator.violations()) == 1


# ---- frees


@apart
def test_memory_freed_under_another_stream_is_found() -> None:
    tensor = settled(1.0, 2.0)
    side = torch.Stream(device=DEVICE)
    with side:
        kept = tensor + 1
    del tensor
    assert "freed while stream 1 of sim:0 may still use it (aten::add)" in accelerator.violations()[0]
    del kept


# ---- deferred copies


@apart
def test_a_pinned_buffer_is_read_late() -> None:
    buffer = pinned(1.0, 2.0)
    assert buffer.is_pinned()
    assert torch.empty(1, pin_memory=True).is_pinned()
    assert not torch.empty(1).is_pinned()
    there = torch.empty(2, device=DEVICE)
    there.copy_(buffer, non_blocking=True)
    buffer.fill_(9)  # too early, so the copy reads the new values
    assert there.tolist() == [9.0, 9.0]
    there.copy_(buffer.fill_(1), non_blocking=True)
    current().record_event().synchronize()
    buffer.fill_(9)
    assert there.tolist() == [1.0, 1.0]
    there.copy_(buffer)  # waits for the copy
    buffer.fill_(1)
    assert there.tolist() == [9.0, 9.0]
    there.copy_(torch.tensor([3.0, 4.0]), non_blocking=True)  # copied at once, as the source is not pinned
    assert there.tolist() == [3.0, 4.0]


@apart
def test_a_copy_is_part_of_its_streams_order() -> None:
    side = torch.Stream(device=DEVICE)
    with side:
        there = pinned(1.0, 2.0).to(DEVICE, non_blocking=True)
    kept = there + 1
    assert "reads memory written by aten::copy_ on stream 1" in accelerator.violations()[0]
    accelerator.forget()
    current().wait_stream(side)
    assert (there + 1).tolist() == [2.0, 3.0]
    assert accelerator.violations() == []
    side.wait_stream(current())
    del there, kept


@apart
def test_a_freed_pinned_buffer_is_kept_until_it_was_read() -> None:
    there = pinned(1.0, 2.0).to(DEVICE, non_blocking=True)
    others = [pinned(8.0, 9.0) for _ in range(10)]
    assert there.tolist() == [1.0, 2.0]
    del others


def after_the_event(there: Tensor, event: torch.Event) -> None:
    event.synchronize()


def after_the_stream(there: Tensor, event: torch.Event) -> None:
    current().synchronize()


def after_the_device(there: Tensor, event: torch.Event) -> None:
    torch.accelerator.synchronize()


def after_a_query(there: Tensor, event: torch.Event) -> None:
    assert [event.query() for _ in range(3)] == [False, False, True]


def after_a_value(there: Tensor, event: torch.Event) -> None:
    there.sum().item()


@pytest.mark.parametrize("wait", [after_the_event, after_the_stream, after_the_device, after_a_query, after_a_value])
@apart
def test_copies_to_the_host_arrive_late(wait: Callable[..., None]) -> None:
    there = settled(1.0, 2.0)
    here = pinned(5.0, 6.0)
    here.copy_(there, non_blocking=True)
    event = current().record_event()
    there.fill_(7)  # later on the stream, so not copied
    assert here.view(torch.uint8).tolist() == [0xCD] * 8
    wait(there, event)
    assert here.tolist() == [1.0, 2.0]
    assert accelerator.violations() == []


@apart
def test_a_wait_for_another_stream_completes_no_copy() -> None:
    here = pinned(5.0, 6.0)
    here.copy_(settled(1.0, 2.0), non_blocking=True)
    torch.Stream(device=DEVICE).synchronize()
    torch.accelerator.synchronize("sim:1")
    assert here.view(torch.uint8).tolist() == [0xCD] * 8


# ---- queries and counters


@apart
def test_queries_answer_late() -> None:
    assert current().query()
    event = torch.Event(DEVICE)
    assert event.query()
    pending(1.0)
    event.record()
    assert [event.query() for _ in range(4)] == [False, False, True, True]
    pending(1.0)
    assert [current().query() for _ in range(4)] == [False, False, True, True]
    accelerator.set_lateness(0)
    pending(1.0)
    assert current().query()
    accelerator.set_lateness(1)
    pending(1.0)
    assert [current().query() for _ in range(2)] == [False, True]
    assert accelerator.synchronizations() == (0, 4)  # by `settled` alone


@apart
def test_synchronizations_are_counted() -> None:
    tensor = settled(1.0, 2.0)
    accelerator.forget()
    kept = [tensor + 1, pinned(1.0).to(DEVICE, non_blocking=True)]
    torch.Stream(device=DEVICE).wait_stream(current())
    assert accelerator.synchronizations() == (0, 0)
    counted: list[Callable[[], object]] = [
        torch.accelerator.synchronize,
        current().synchronize,
        current().record_event().synchronize,
        tensor.cpu,
        tensor.sum().item,
        tensor.nonzero,
        lambda: tensor.equal(tensor),
        lambda: tensor.copy_(torch.ones(2)),
        lambda: torch.empty(2).copy_(tensor, non_blocking=True),
    ]
    for number, synchronize in enumerate(counted):
        synchronize()
        assert accelerator.synchronizations() == (1, number)
    del kept


# ---- futures


@apart
def test_futures_without_devices_do_not_order_streams() -> None:
    side = torch.Stream(device=DEVICE)
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    with side:
        future.set_result([settled(1.0, 2.0) * 1])
    kept = future.wait()[0] + 1
    assert len(accelerator.violations()) == 1
    del kept


# ---- autograd


@apart
def test_a_forgotten_wait_before_backward_is_found() -> None:
    weight = settled(1.0, 2.0).requires_grad_()
    side = torch.Stream(device=DEVICE)
    with side:
        part = weight.exp()
    part.sum().backward()
    assert any("reads memory written by aten::exp on stream 1" in line for line in accelerator.violations())


# ---- devices, threads and processes


@apart
def test_a_copy_between_devices_orders_both() -> None:
    here, there = pending(1.0, 2.0), torch.empty(2, device="sim:1")
    there.fill_(0)
    there.copy_(here)
    there.add_(1)
    here.add_(1)
    assert (there.tolist(), here.tolist()) == ([2.0, 3.0], [2.0, 3.0])
    side = torch.Stream(device="sim:1")
    there.add_(1)
    with side:
        kept = there.to(DEVICE)
    assert "reads memory written by aten::add on stream 0 of sim:1" in accelerator.violations()[0]
    del kept


@apart
def test_the_device_survives_a_fork() -> None:
    tensor = pending(1.0, 2.0)
    here = pinned(5.0, 6.0)
    here.copy_(tensor, non_blocking=True)
    going = threading.Event()

    def work() -> None:
        while not going.is_set():
            torch.ones(8, device="sim:1").add_(1)

    torch.ones(8, device="sim:1").add_(1)  # a fork during the thread's first use would keep locks of the C library
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                side = torch.Stream(device=DEVICE)
                with side:
                    kept = tensor + 1
                found = len(accelerator.violations())
                torch.accelerator.synchronize()
                os._exit(0 if found == 1 and here.tolist() == [1.0, 2.0] and kept.tolist() == [2.0, 3.0] else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        going.set()
        thread.join()


def test_the_test_process_has_no_simulated_device() -> None:
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
