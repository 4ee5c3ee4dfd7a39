"""The resources that a worker holds, and a check that it releases them; this runs on the worker itself."""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import telegrad.rpc as rpc
from telegrad._core.agent.agent import Agent
from telegrad._core.memory import warm_memory
from telegrad._core.transport.link import Link
from telegrad._core.transport.poller import Waker
from telegrad._core.worker import current

T = TypeVar("T")
PATIENCE = 30.0
GLANCE = 0.02
KEEP = 0.3  # seconds for which unused memory stays warm, in place of the usual ones
POOL = 17  # threads that a worker keeps for later
MEMORY_FILE = "memfd:telegrad"
TRANSIENT = "telegrad-connect"  # threads that end when their connection is made


class Holding(NamedTuple):
    """The resources that the process has open."""

    sockets: int  # without those of wakers
    wakers: int  # each thread that has waited may have one
    memory_files: int
    others: Counter[str]  # descriptors, by their targets
    maps: int  # of memory files
    threads: int


def holding() -> Holding:
    sockets = files = 0
    others: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the listing itself
            continue
        if target.startswith("socket:"):
            sockets += 1
        elif MEMORY_FILE in target:
            files += 1
        elif not target.startswith("pipe:"):  # libuv, by which torch serves a store, keeps some for good
            others[target.partition(":[")[0]] += 1
    maps = Path("/proc/self/maps").read_text().count(MEMORY_FILE)
    wakers = sum(type(each) is Waker for each in gc.get_objects())
    return Holding(sockets - 2 * wakers, wakers, files, others, maps, threading.active_count())


def keep_briefly() -> None:
    """Keep unused memory warm for a short time only, so that it does not look like a leak. Call this before joining."""
    warm_memory.KEEP = KEEP


def left(before: Holding, dead: int) -> dict[str, int]:
    """Return resources that are new since `before`, when the group was made, of which `dead` workers have died."""
    gc.collect()
    now = holding()
    agent = current.agent()
    lanes = _lanes(agent)
    found = {
        **rpc.debug_info(),
        **(now.others - before.others),
        "contexts": len(current.conductor().contexts),
        "calls in flight": int(not agent.idle),
        "sockets": now.sockets - lanes - (before.sockets - 2 * dead),
        "wakers": now.wakers - now.threads,
        "memory files": now.memory_files,
        "maps of memory files": now.maps,
        "threads": now.threads - lanes - before.threads - POOL,
        "connecting threads": sum(thread.name == TRANSIENT for thread in threading.enumerate()),
    }
    return {name: count for name, count in found.items() if count > 0}


def _lanes(agent: Agent) -> int:
    """Return the number of further streams of the open connections; each has a socket and a thread."""
    connections = agent._connections
    links = [*connections._accepted, *(peer.link for peer in connections._peers.values())]
    lanes = [each for link in links if isinstance(link, Link) for each in (link.lanes_in, link.lanes_out)]
    return sum(sock.fileno() >= 0 for each in lanes for sock in each._socks)


def wait_for_nothing(look: Callable[[], T]) -> T:
    """Look until nothing is found, or until the time is over; return what was found last."""
    deadline = time.monotonic() + PATIENCE
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(GLANCE)
    return found


def wait_until_closed(before: Holding) -> dict[str, int]:
    """Return the descriptors that are still open after the shutdown, and were not before the worker joined."""

    def look() -> dict[str, int]:
        gc.collect()
        now = holding()
        more = {
            **(now.others - before.others),
            "sockets": now.sockets - before.sockets,
            "memory files": now.memory_files,
        }
        return {name: count for name, count in more.items() if count > 0}

    return wait_for_nothing(look)
