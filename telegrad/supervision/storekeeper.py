"""The program that keeps a group's store for `telegrad run`, and ends what that has started where it is killed.

It reads words from its standard input: `+PID` and `-PID` for groups of processes that begin and end, `over` when the
group has ended, and `key FOLDER` for a folder to be removed at the end. When that input ends, the supervisor has
ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from typing import Any

READY = b"ready\n"  # on its standard output, once the store is served

_stores: list[Any] = []  # the one that is served, once it is; no lock: `append` is a single step


def main(arguments: list[str]) -> None:
    """`arguments`: the descriptor of the listening socket; none where others keep the store."""
    if arguments:  # meanwhile, since to import torch takes seconds
        threading.Thread(target=_serve, args=arguments, name="telegrad-serve", daemon=True).start()
    else:
        _say_ready()
    started: set[int] = set()
    key_folder = ""
    for word in sys.stdin:
        if word.startswith("+"):
            started.add(int(word))
        elif word.startswith("-"):
            started.discard(-int(word))
        elif word.startswith("key "):
            key_folder = word[len("key ") :].rstrip("\n")
        elif _stores:
            from telegrad.group.directory import Directory

            directory = Directory(_stores[0])
            if directory.board.terms():
                directory.end()
    for group in started:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    if key_folder:
        shutil.rmtree(key_folder, ignore_errors=True)
    os._exit(0)


def _serve(listener: str) -> None:
    try:
        import torch  # noqa: F401 - first, since the compatibility mode takes effect with it

        from telegrad.group.board import OPEN, SERVED, Board
        from telegrad.group.keys import find_keys
        from telegrad.group.renewing import Renewal
        from telegrad.group.sealing import SealedStore
        from telegrad.group.tcp import serve_on

        with socket.socket(fileno=int(listener)) as listening:
            store = SealedStore(serve_on(listening)[0], find_keys())
        Board(store).write(SERVED, OPEN)
        Renewal(store).begin()
        _stores.append(store)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    _say_ready()


def _say_ready() -> None:
    with contextlib.suppress(OSError):  # the supervisor has ended meanwhile
        os.write(1, READY)


if __name__ == "__main__":
    main(sys.argv[1:])
