"""A program for torchrun's elastic agents: it notes each group. A single worker waits; the first pair loses one."""

from __future__ import annotations

import os
import pathlib
import sys
import time

import telegrad.rpc as rpc


def pairs_noted(notes: pathlib.Path) -> int:
    """Return the number of notes of workers in groups of two."""
    return sum(line.startswith("2") for line in notes.read_text().splitlines()) if notes.exists() else 0


def main() -> None:
    notes = pathlib.Path(sys.argv[1])
    last = pairs_noted(notes) == 2
    rpc.init_rpc(role="worker")
    me, size = rpc.get_worker_info(), len(rpc.workers())
    others = [rpc.rpc_sync(rank, rpc.get_worker_info).name for rank in range(size) if rank != me.id]
    with notes.open("a") as file:
        file.write(" ".join([str(size), me.name, *others]) + "\n")
    if not last and me.id == 1:
        while pairs_noted(notes) < 2:
            time.sleep(0.05)
        os._exit(1)
    if not last:
        time.sleep(600)  # its agent ends it, since another agent has come, or has lost its worker
    rpc.shutdown()


if __name__ == "__main__":
    main()
