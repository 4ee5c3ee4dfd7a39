"""The program of each worker: it joins, runs its load, and follows the files in the schedule's folder.

`order-NAME` holds a word for that worker alone; `enough` ends the load of all, `end` the group.
"""

import contextlib
import gc
import logging
import math
import os
import pathlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import torch

import telegrad.rpc as rpc
from telegrad._core.worker import current
from telegrad.errors import PeerError
from tests.chaos import functions as shelf
from tests.chaos import leaks
from tests.chaos.load import Errors, told
from tests.chaos.supervised import functions
from tests.chaos.supervised.functions import make_table
from tests.chaos.supervised.load import Load
from tests.chaos.supervised.operations import PATIENCE, TABLE
from tests.chaos.supervised.plan import FIRST, FOLDER, OWN, PUBLISHERS, ROLES, SEED
from tests.cluster import wait_until

MOST_AWAY = 0.5  # seconds between leaving and coming back
LEFT = 1  # the exit code of a worker that has left and wants to be restarted


def main(name: str) -> int:
    folder = pathlib.Path(os.environ[FOLDER])
    torch.set_num_threads(1)
    leaks.keep_briefly()
    record = functions.begin(name, folder)
    threading.excepthook = lambda args: record.note("wrong", f"a thread ended by {args.exc_value!r}")
    logging.getLogger("telegrad").addHandler(
        Errors(lambda text, error: record.note("wrong", text + (told(error) if error else "")))
    )
    while True:
        join(name)
        load = Load(ROLES, int(os.environ[SEED]))
        word = wait_for_word(folder, name)
        load.stop()
        shelf.clear_shelf()
        if word == "enough":
            break
        record.note("leaves")
        rpc.shutdown(timeout=PATIENCE)
        if word == "exit":
            return LEFT
        threading.Event().wait(MOST_AWAY / 2)
        record.life = record.life._replace(number=record.life.number + 1)
    let_go()
    wait_for((folder / "end").exists)
    record.note("leaves")
    rpc.shutdown(timeout=PATIENCE)
    return 0


def join(name: str) -> None:
    own = os.environ.get(OWN)
    options = rpc.TelegradOptions(rpc_timeout=PATIENCE, init_method=own or "env://")
    functions.record.note("joins", _age() if functions.record.life.number == 0 else 0.0)
    rank = 0 if own and name == FIRST else -1
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    if ROLES.get(name) == PUBLISHERS:
        threading.Thread(target=publish, daemon=True).start()
    functions.record.note("joined")


def publish() -> None:
    with contextlib.suppress(PeerError):  # this worker may leave before that is decided
        rpc.publish(TABLE, make_table)


def _age() -> float:
    """Return the seconds since this process was started: the interpreter's start and its imports."""
    with open("/proc/self/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def wait_for_word(folder: pathlib.Path, name: str) -> str:
    order, enough = folder / f"order-{name}", folder / "enough"
    wait_for(lambda: order.exists() or enough.exists())
    if not order.exists():
        return "enough"
    word = order.read_text()
    order.unlink()
    return word


def wait_for(word: Callable[[], bool]) -> None:
    """Wait without a limit: the schedule ends its workers."""
    wait_until(word, math.inf)


def let_go() -> None:
    """Check that nothing is held any more, once all have ended their load."""
    functions.record.note("rests")
    if found := leaks.wait_for_nothing(left):
        functions.record.note("wrong", f"left over: {found}")
    functions.record.note("clean")


def left() -> dict[str, int]:
    shelf.clear_shelf()  # others may have published here since
    gc.collect()
    counts = Counter(rpc.debug_info())
    counts["owners"] -= functions.table_of == functions.record.life  # the table stays published
    files = leaks.holding().memory_files
    found = {**counts, "memory files": files, "calls in flight": int(not current.agent().idle)}
    return {name: int(count) for name, count in found.items() if int(count)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
