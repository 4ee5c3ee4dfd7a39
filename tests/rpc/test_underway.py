"""Tests of the warning about tensors that are written to during their call; some transports would send torn data."""

import linecache
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad._core import texts
from telegrad._core.worker import current
from telegrad.errors import TelegradWarning
from telegrad.rpc import Future, RRef, remote, rpc_async, rpc_sync
from tests.cluster import PATIENCE, agents_here, in_threads

LARGE = 1 << 16

may_end = threading.Event()
has_begun = threading.Event()


@pytest.fixture(scope="module", params=["unix", "tcp"])
def here(request: pytest.FixtureRequest) -> Iterator[None]:
    with agents_here(2, transport=request.param):
        yield


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_said", set())


pytestmark = pytest.mark.usefixtures("here")


def consume(*tensors: torch.Tensor) -> int:
    """Wait until the caller allows the end; return the number of tensors."""
    has_begun.set()
    assert may_end.wait(PATIENCE)
    return len(tensors)


def warned_by(
    act: Callable[[], object],
    *tensors: torch.Tensor,
    to: str = "w1",
    begin: Callable[..., Future[Any] | RRef[Any]] = rpc_async,
) -> list[warnings.WarningMessage]:
    """Run `act` while a call is in flight; return the warnings."""
    may_end.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        future = begin(to, consume, tensors)
        act()
        may_end.set()
        (future.wait if begin is rpc_async else future.to_here)()
    return said


@pytest.mark.parametrize("begin", [rpc_async, remote])
@pytest.mark.parametrize("to", ["w0", "w1"])
def test_writing_to_a_tensor_during_its_call_is_warned_of_once(
    to: str, begin: Callable[..., Future[Any] | RRef[Any]]
) -> None:
    tensor = torch.zeros(LARGE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            may_end.clear()
            call = begin(to, consume, (torch.ones(3), tensor))  # this line, once
            tensor.add_(1)
            may_end.set()
            (call.wait if begin is rpc_async else call.to_here)()
    (only,) = said
    assert f"shape ({LARGE},)" in str(only.message)
    assert f"the call of tests.rpc.test_underway.consume that sends it to worker {to!r}" in str(only.message)
    assert "send tensor.clone()" in str(only.message)
    assert "# this line, once" in linecache.getline(only.filename, only.lineno)


def test_writing_to_the_base_of_a_sent_view_is_warned_of() -> None:
    buffer = torch.zeros(4, LARGE)
    (only,) = warned_by(lambda: buffer.zero_(), buffer[2])
    assert issubclass(only.category, TelegradWarning)


def test_a_write_of_another_thread_is_warned_of_in_the_calling_thread() -> None:
    tensor = torch.zeros(LARGE)
    has_begun.clear()
    may_end.clear()

    def write() -> None:
        assert has_begun.wait(PATIENCE)
        tensor.add_(1)
        may_end.set()

    def call() -> None:
        current.enter(worker)
        with pytest.warns(TelegradWarning, match="consume"):
            rpc_sync("w1", consume, (tensor,))

    worker = current.here()
    in_threads(write, call)


def test_calls_without_a_harmful_write_do_not_warn() -> None:
    tensor, parameter = torch.zeros(LARGE), torch.nn.Parameter(torch.zeros(LARGE))
    small, gone = torch.zeros(8), torch.zeros(LARGE)
    with torch.inference_mode():
        uncounted = torch.zeros(LARGE)
    assert not warned_by(lambda: None, tensor, parameter, uncounted, torch.eye(200).to_sparse(), gone.t())
    assert not warned_by(lambda: small.add_(1), small)
    assert not warned_by(lambda: None, *(tensor.to(dtype) for dtype in (torch.int64, torch.bool, torch.complex64)))
    assert not warned_by(lambda: torch.add(tensor, 1), tensor)
    tensor.add_(1)


def test_the_memory_of_a_sent_tensor_is_not_kept_until_the_answer() -> None:
    may_end.clear()
    future = rpc_async("w1", consume, (torch.zeros(LARGE),))
    (watched,) = future.call.underway._counters
    assert watched[0].untyped_storage().nbytes() == 0
    may_end.set()
    future.wait()
