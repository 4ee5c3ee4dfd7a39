"""How many functions of this package a call goes through, since each of them takes about 0.1 us of some 30."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

from telegrad.rpc import api, current
from tests.cluster import agents
from tests.rpc.test_calls import echo

CALLS = 200
MOST = 80  # of both workers, for one call: 66, and some more where a program uses actors
# How often a thread looks whether something has come depends on the machine, and locks are checked in tests only.
LOOKS = (
    "contracts.py",
    "spinning.py",
    "poller.py",
    "reading.py",
    "waker.py",
    "clock.py",
    "health.py",
    "agent/pending.py",
)
LOOKING = frozenset(
    ("read", "_read", "buffer", "on_readable", "stop_reading", "_poll", "_spin", "receive", "_wait", "wait_readable")
)


def test_a_call_goes_through_few_functions() -> None:
    passed: Counter[str] = Counter()
    counts = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        if counts and event == "call":
            code = frame.f_code
            file = code.co_filename.replace("\\", "/")
            if "/telegrad/" in file and not file.endswith(LOOKS) and code.co_name not in LOOKING:
                passed[f"{file.rpartition('/telegrad/')[2]} {code.co_name}"] += 1

    before = threading.getprofile(), sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with agents(2, transport="unix") as (worker, _):
            current.enter(worker)
            for number in range(20):
                api.rpc_sync("w1", echo, (number,))
            counts = True
            for number in range(CALLS):
                api.rpc_sync("w1", echo, (number,))
            counts = False
            current.enter(None)
    finally:
        threading.setprofile(before[0])
        sys.setprofile(before[1])
    found = sum(count for count in passed.values() if count > CALLS / 2) / CALLS
    assert found <= MOST, "\n".join(f"{count / CALLS:.2f} {name}" for name, count in passed.most_common())
