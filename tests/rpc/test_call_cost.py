"""How many functions of this package a call goes through, since each of them takes about 0.1 us of some 30."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

from telegrad._core.rpc import api
from telegrad._core.worker import current
from tests.cluster import agents
from tests.rpc.test_calls import echo

BATCHES = 20
CALLS = 20  # of one batch
MOST = 80  # of both workers, for one call: 71, and some more where a program uses actors
CLOCK = "telegrad-clock"  # the thread whose work depends on the time that passes, not on the calls
# How often a thread looks whether something has come depends on the machine, and locks are checked in tests only.
LOOKS = (
    "contracts.py",
    "spinning.py",
    "poller.py",
    "reading.py",
    "waker.py",
    "timer.py",
    "health.py",
)
LOOKING = frozenset(
    (
        *("read", "_read", "buffer", "on_readable", "stop_reading", "poll", "_spin", "receive", "_wait"),
        *("wait_readable", "_use_waker", "_wait_done", "notify_waiter"),
    )
)


def test_a_call_goes_through_few_functions() -> None:
    """Count in batches, of which the least counts: on a busy machine some calls are handed to other threads."""
    batches: list[Counter[str]] = [Counter()]

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or threading.current_thread().name == CLOCK:
            return
        code = frame.f_code
        file = code.co_filename.replace("\\", "/")
        if "/telegrad/" in file and not file.endswith(LOOKS) and code.co_name not in LOOKING:
            batches[-1][f"{file.rpartition('/telegrad/')[2]} {code.co_name}"] += 1

    before = threading.getprofile(), sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with agents(2, transport="unix") as (worker, _):
            current.enter(worker)
            for _ in range(1 + BATCHES):
                batches.append(Counter())
                for number in range(CALLS):
                    api.rpc_sync("w1", echo, (number,))
            batches.append(Counter())  # of the end
            current.enter(None)
    finally:
        threading.setprofile(before[0])
        sys.setprofile(before[1])
    least = min(batches[2:-1], key=Counter.total)  # not the start, nor the first calls, which make what later ones use
    found = least.total() / CALLS
    assert found <= MOST, "\n".join(f"{count / CALLS:.2f} {name}" for name, count in least.most_common())
