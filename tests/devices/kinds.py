"""Run tests on the host, on the simulated accelerator and, if there is one, on a GPU; and make groups for them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from telegrad._core.memory import staging
from telegrad._core.worker.current import Worker
from tests import accelerator
from tests.accelerator.apart import apart
from tests.cluster import agents_here

SIM = pytest.param(
    "sim", marks=pytest.mark.skipif(not accelerator.available(), reason="needs g++ to build the simulated accelerator")
)
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


def on_devices(test: Callable[..., None], host: bool = False) -> Any:
    """Run a test for each kind of accelerator, its first argument `kind`; the simulated one in a process of its own.

    On the simulated one, missing waits between streams are failures.
    """

    @functools.wraps(test)
    def run(kind: str, **named: Any) -> None:
        if kind == "sim":
            apart(checked)(kind, **named)
        else:
            test(kind, **named)

    @functools.wraps(test)
    def checked(kind: str, **named: Any) -> None:
        test(kind, **named)
        found = accelerator.violations()
        assert not found, "\n".join(found)

    run.body = checked  # type: ignore[attr-defined]
    return pytest.mark.parametrize("kind", [*(["cpu"] if host else []), SIM, CUDA])(run)


on_host_and_devices = partial(on_devices, host=True)


def places(kind: str) -> tuple[torch.device, torch.device]:
    """Return two devices, or the same device twice if there is only one."""
    if kind == "cpu":
        return torch.device("cpu"), torch.device("cpu")
    last = torch.get_device_module(kind).device_count() - 1
    return torch.device(kind, 0), torch.device(kind, min(last, 1))


@contextlib.contextmanager
def group(
    kind: str, count: int = 2, share: bool = False, crossed: bool = True, **options: Any
) -> Iterator[list[Worker]]:
    """Make agents of this process; this thread uses `w0`.

    All workers map each device to the other one, or to itself if not `crossed`. With `share` they share the memory of
    devices, as a GPU would do by CUDA's handles.
    """
    here, there = places(kind)
    map_ = {here: there, there: here} if crossed else {here: here}
    maps = {f"w{rank}": map_ for rank in range(count)} if kind != "cpu" else {}
    sharer = {"sim": Sharer()} if share and kind == "sim" else {}
    shares = {**staging.SHARERS, **sharer} if share else {}
    with replaced(staging.SHARERS, shares), agents_here(count, **{"device_maps": maps, **options}) as made:
        yield made


@contextlib.contextmanager
def replaced(table: dict[str, Any], other: dict[str, Any]) -> Iterator[None]:
    before = dict(table)
    table.clear()
    table.update(other)
    try:
        yield
    finally:
        table.clear()
        table.update(before)


class Sharer(staging.Cuda):
    """Shares memory of the simulated accelerator between agents of one process."""

    def limit(self, index: int) -> int:
        return 64 << 20

    def export(self, block: torch.Tensor, events: tuple[Any, Any]) -> tuple[Any, ...]:
        return ()

    def open(self, exported: tuple[Any, ...]) -> Any:
        raise NotImplementedError("the simulated accelerator is that of one process")

    def event(self, index: int) -> torch.Event:
        return torch.Event(f"sim:{index}")

    def record(self, event: torch.Event, index: int) -> None:
        event.record(torch.accelerator.current_stream(index))

    def wait(self, event: torch.Event, index: int) -> None:
        torch.accelerator.current_stream(index).wait_event(event)
