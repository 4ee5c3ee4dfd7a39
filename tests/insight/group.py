"""A made-up group of four workers that train, for tests of displays."""

from collections.abc import Mapping
from typing import Any

from benchmarks.schedule_simulation import simulate
from telegrad._core.events import BACKWARD_PASS, BACKWARD_TASKS, CALLED, RAN, STAGED, STEPPED, Event
from telegrad.insight.history import GroupSnapshot
from telegrad.pipeline.pipeline_schedule import plan
from telegrad.reporting import RUNNING, WorkerState
from tests.insight import accounts
from tests.insight.accounts import START

WORKERS = ["trainer", "stage1", "stage2", "stage3"]


def account(worker: str, clock: float = START, **known: Any) -> WorkerState:
    return accounts.account(worker, clock, **{"rank": WORKERS.index(worker) if worker in WORKERS else 0, **known})


class Group:
    """Four workers, of which one drives a pipeline over all; a source of their states."""

    def __init__(self, step: float = 0.4) -> None:
        self.step = step  # seconds from a batch to the next
        self.now = 0.0  # seconds since START
        self.silent: dict[str, str] = {}
        self.looks = 0
        self.failure: Exception | None = None

    def look(self) -> GroupSnapshot:
        self.looks += 1
        self.now += 1.0
        if self.failure is not None:
            raise self.failure
        return GroupSnapshot([self._account(worker) for worker in WORKERS if worker not in self.silent], self.silent)

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        found = {}
        for worker in WORKERS:
            since = after.get(worker, START - 20) - START
            own = (event for batch in self._batches(since) for event in self._batch(batch).get(worker, []))
            found[worker] = sorted((e for e in own if since < e[2] - START <= self.now), key=lambda event: event[2])
        return found

    def _batches(self, since: float) -> range:
        return range(int(since / self.step) - 2, int(self.now / self.step) + 1)

    def _account(self, worker: str) -> WorkerState:
        rank = WORKERS.index(worker)
        done = int((self.now + 60) / self.step)
        neighbours = [WORKERS[at] for at in (rank - 1, rank + 1) if 0 <= at < len(WORKERS)]
        calls = [] if rank else WORKERS[1:3]
        return account(
            worker,
            START + self.now,
            pid=100 + rank,
            busy=2 if rank else 0,
            contexts=1,
            calls_out=[{**_call(number, 1.0), "to": to, "timeout": 60.0} for number, to in enumerate(calls)],
            calls_in=[{**_call(rank - 1, 0.9), "caller": "trainer", "state": RUNNING}] if rank in (1, 2) else [],
            references={"owners": 3 * rank, "users": 6 if not rank else 1, "forks": 3, "pending_users": 0},
            bytes_out=dict.fromkeys(neighbours, done * 3000000 * (rank + 1)),
            bytes_in=dict.fromkeys(neighbours, done * 2000000),
            calls_done=done * 9 if rank else 0,
            memory=int((300 + 90 * rank + 12 * (self.now % 9)) * 2**20),
            shared=rank * 4 * 2**20,
            processor=self.now * (0.5 + rank),
            devices={"cuda:0": 2**30} if rank else {},
            kinds=[{"kind": "torch.Tensor", "number": 3, "age": 90.0, "line": "train.py:9 in load"}] if rank else [],
            log=[_logged(1, "first"), _logged(2, "<b>second</b>")] if rank == 1 else [],
        )

    def _batch(self, number: int) -> dict[str, list[Event]]:
        begun = START + number * self.step
        scale = self.step * 0.75 / _TIMELINE.length
        found: dict[str, list[Event]] = {worker: [] for worker in WORKERS}
        for worker, spans in zip(WORKERS, _TIMELINE.spans, strict=True):
            for action, start, end in spans:
                times = begun + start * scale, begun + end * scale
                found[worker].append((STAGED, *times, f"p {number}", action.kind, *action[1:]))
            call = (begun, begun + self.step * 0.8)
            failure = "ValueError" if number % 40 == 7 and worker == "stage2" else ""
            if worker != "trainer":
                found["trainer"].append((CALLED, *call, worker, number, "Pipeline.batch", 0, failure))
                found[worker].append(
                    (RAN, call[0] + 0.002, call[1] - 0.002, "trainer", number, "Pipeline.batch", failure)
                )
            for each in range(6):
                at = begun + each * self.step / 6
                length = 0.002 + 0.004 * ((number * 7 + each * 3) % 5) ** 2 / 4
                other = WORKERS[(WORKERS.index(worker) + 1) % len(WORKERS)]
                found[worker].append((CALLED, at, at + length, other, each, "torch.add", 4096, ""))
                found[other].append((RAN, at + 0.0005, at + length - 0.0005, worker, each, "torch.add", ""))
            at = begun + self.step * 0.8
            found[worker].append((BACKWARD_TASKS, at, at + self.step * 0.08, number, "trainer", 1))
            found[worker].append((STEPPED, at + self.step * 0.08, at + self.step * 0.15, number, "Adam"))
        found["trainer"].append((BACKWARD_PASS, begun + self.step * 0.8, begun + self.step * 0.9, number, 1, ""))
        return found


def _call(number: int, age: float) -> dict[str, Any]:
    return {"number": number, "function": "torch.add", "age": age, "thread": None}


def _logged(number: int, text: str) -> dict[str, Any]:
    return {"number": number, "age": 9.0 - number, "level": "WARNING", "logger": "telegrad", "text": text}


_RUNNERS = tuple(range(len(WORKERS)))
_TIMELINE = simulate(plan("1f1b", _RUNNERS, 6), _RUNNERS, 6)
