"""Made-up states of workers."""

from typing import Any

from telegrad.reporting import MEMBER, RUNNING, CallIn, CallOut, PassOut, ThreadState, WaitState, WorkerState

DAY = 1_790_000_000.0  # the time of day when the clocks of workers show START
START = 5000.0


def account(worker: str, clock: float = START, **known: Any) -> WorkerState:
    """Return the state of an idle worker, except for the `known` fields."""
    blank: WorkerState = {
        "worker": worker, "rank": 0, "group": "g", "pid": 100, "host": "node", "program": "train.py", "clock": clock,
        "time": DAY + clock - START, "phase": MEMBER, "phase_age": clock - START + 60, "idle": 0.5, "missing": [],
        "place": "tcp://node:29500", "size": 4, "generation": 1, "members": {}, "gone": {}, "threads": [],
        "calls_out": [], "calls_in": [], "slots": 16, "busy": 0, "passes": [], "contexts": 0, "references": {},
        "bytes_out": {}, "bytes_in": {}, "calls_done": 0, "memory": 300 * 2**20, "shared": 0,
    }  # fmt: skip
    return blank | known  # type: ignore[return-value]


def made_up() -> WorkerState:
    """Return the state of a busy worker."""
    waits = WaitState(what="backward", on=[], about="")
    calls = enumerate([("worker1", 3.0), ("worker1", 1.0), ("worker2", 0.5)])
    return account(
        "worker0", group="b7", pid=4711, host="here", phase_age=12.5, gone={"worker3": "it died"}, busy=1, contexts=2,
        members={"worker0": "here", "worker1": "here", "worker2": "there"}, references={"owners": 5, "users": 3},
        threads=[
            ThreadState(number=1, name="main", at=None, stack=[], wait=waits, asleep=True),
            ThreadState(number=2, name="other", at=None, stack=[], wait={**waits, "what": "asks"}, asleep=None),
        ],
        calls_out=[CallOut(to=to, number=n, function="f", age=age, timeout=0, thread=None) for n, (to, age) in calls],
        calls_in=[CallIn(caller="worker1", number=7, function="g", age=1.0, state=RUNNING, thread=2)],
        passes=[PassOut(context=1, number=1, age=0.1, owing=["worker1"])],
        bytes_out={"worker1": 1000, "worker2": 10}, bytes_in={"worker1": 2000}, calls_done=99,
        memory=1 << 30, shared=1 << 20,
    )  # fmt: skip
