"""Compare device tensors with torch.distributed.rpc: `python -m benchmarks.cuda [words] [--quick]`.

Two worker processes share one GPU, and both libraries use a device map. Each figure includes the wait until the device
has the bytes. The limit is a copy within the device.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.calls import echo
from benchmarks.command import choose, machine, run
from benchmarks.measuring import MB, OTHER, Row, times
from benchmarks.processes import Child, children_killed
from benchmarks.report import table
from benchmarks.results import Run
from benchmarks.targets import OfLimit, OfPeer, Target
from benchmarks.turns import take_all

SIZES = {"1 MB": MB, "16 MB": 16 * MB, "64 MB": 64 * MB, "256 MB": 256 * MB, "1 GB": 1024 * MB}
COPY = "copy within the device"
PATIENCE = 60.0

_held: dict[int, torch.Tensor] = {}


def take(value: torch.Tensor) -> None:
    """Receive a tensor, and wait until the device has it."""
    torch.accelerator.synchronize()


def give(size: int, device: str) -> torch.Tensor:
    """Return a cached tensor on a device."""
    if size not in _held:
        _held.clear()
        _held[size] = torch.ones(size // 4, device=device)
        torch.accelerator.synchronize()
    return _held[size]


def bandwidth(rpc: Any, size: int, direction: str, device: str = "cuda:0") -> float:
    """Return the payload per second in GB/s. An echo counts its payload once."""
    tensor = torch.ones(size // 4, device=device)
    call = {
        "to": lambda: rpc.rpc_sync(OTHER, take, (tensor,)),
        "from": lambda: rpc.rpc_sync(OTHER, give, (size, device)),
        "echo": lambda: rpc.rpc_sync(OTHER, echo, (tensor,)),
    }[direction]

    def whole() -> None:
        call()
        torch.accelerator.synchronize()

    return size / statistics.median(times(max(5, min(100, 256 * MB // size)), whole)) / 1e9


def _copies(pipe: Connection, device: str = "cuda:0") -> None:
    """Send the limits by name. Runs in its own process, because a process that has used a GPU cannot be forked."""
    found = {}
    for name, size in SIZES.items():
        source, target = (torch.ones(size // 4, device=device) for _ in range(2))

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target.copy_(source)
            torch.accelerator.synchronize()

        found[f"{COPY}, {name}"] = [size / statistics.median(times(50, copy)) / 1e9]
    pipe.send((True, found))


def _row(name: str, direction: str) -> Row:
    targets: list[Target] = [OfPeer(1)]
    if SIZES[name] >= 64 * MB:
        targets.append(OfLimit(0.4 if direction == "echo" else 0.8, f"{COPY}, {name}"))
    measure = partial(bandwidth, size=SIZES[name], direction=direction)
    return Row(f"{name} {direction}", "GB/s", True, measure, ("cuda",), workers=2, targets=tuple(targets))


ROWS = [_row(name, direction) for name in SIZES for direction in ("to", "from", "echo")]


def main() -> int:
    chosen = choose("benchmarks.cuda", __doc__, ROWS)
    if not torch.cuda.device_count():  # does not start the driver, so workers can still be forked
        print("this machine has no GPU: there is nothing to measure", file=sys.stderr)
        return 1
    with children_killed() as children:
        children.append(Child(_copies, fresh=True))
        limits = children[0].wait_answer(PATIENCE)
    found = Run(machine(), take_all(chosen.rows, chosen.rounds, limits), limits)
    print(table(found))
    if chosen.folder:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        (chosen.folder / "cuda.md").write_text(table(found))
    return 1 if any(result.ours_failed for result in found.results) else 0


if __name__ == "__main__":
    run(main)
