"""The program that keeps a group's store for `telegrad run`, and ends what that has started where it is killed.

It reads words from its standard input: `+PID` and `-PID` for groups of processes that begin and end, `over` when the
group has ended. When that input ends, so does the supervisor, in whatever way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

READY = b"ready\n"  # on its standard output, once the store is served


def main(arguments: list[str]) -> None:
    """`arguments`: the host, the port and the descriptor of the listening socket; none where others keep the store."""
    store = _serve(arguments[0], int(arguments[1]), int(arguments[2])) if arguments else None
    os.write(1, READY)
    started: set[int] = set()
    for word in sys.stdin:
        if word.startswith("+"):
            started.add(int(word))
        elif word.startswith("-"):
            started.discard(-int(word))
        elif store is not None:
            from telegrad.group.dynamic import DynamicGroup

            DynamicGroup(store).end()
    for group in started:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


def _serve(host: str, port: int, listener: int) -> Any:
    import torch.distributed as dist

    from telegrad.group.dynamic import DynamicGroup
    from telegrad.group.stores import OPEN, SERVED

    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener, multi_tenant=False
    )
    store.set(SERVED, OPEN)
    DynamicGroup(store).kept_by(f"telegrad run (process {os.getppid()})")
    return store


if __name__ == "__main__":
    main(sys.argv[1:])
