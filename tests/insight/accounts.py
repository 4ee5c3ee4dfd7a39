"""An account that a worker could give."""

from __future__ import annotations

from telegrad.reporting.worker_state import MEMBER, RUNNING, CallIn, CallOut, PassOut, Thread, Wait, WorkerState


def made_up() -> WorkerState:
    """Of a worker in the midst of its work."""
    return WorkerState(
        worker="worker0",
        rank=0,
        group="b7",
        pid=4711,
        host="here",
        program="train.py",
        clock=100.0,
        time=1e9,
        phase=MEMBER,
        phase_age=12.5,
        idle=2.0,
        missing=[],
        place="tcp://here:29500",
        size=4,
        generation=1,
        members={"worker0": "here", "worker1": "here", "worker2": "there"},
        gone={"worker3": "it died"},
        threads=[
            Thread(number=1, name="main", at=None, stack=[], wait=Wait(what="backward", on=[], about=""), asleep=True),
            Thread(number=2, name="other", at=None, stack=[], wait=None, asleep=None),
        ],
        calls_out=[
            CallOut(to=to, number=number, function="f", age=age, timeout=0, thread=None)
            for number, (to, age) in enumerate([("worker1", 3.0), ("worker1", 1.0), ("worker2", 0.5)])
        ],
        calls_in=[CallIn(caller="worker1", number=7, function="g", age=1.0, state=RUNNING, thread=2)],
        slots=16,
        busy=1,
        passes=[PassOut(context=1, number=1, age=0.1, owing=["worker1"])],
        contexts=2,
        references={"owners": 5, "users": 3},
        bytes_out={"worker1": 1000, "worker2": 10},
        bytes_in={"worker1": 2000},
        calls_done=99,
        memory=1 << 30,
        shared=1 << 20,
    )
