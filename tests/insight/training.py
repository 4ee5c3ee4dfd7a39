"""A made-up group that trains, where something is wrong; and pictures of how it is shown:

.venv/bin/python -m tests.insight.training    # writes docs/insight/top.svg and top-worker.svg
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Mapping
from typing import Any

from telegrad.insight.source import Sight
from telegrad.insight.terminal.app import Top
from telegrad.instruments import CALLED, RAN, Event
from telegrad.witness.account import QUEUED, RUNNING, Account, CallIn, CallOut, Line, Thread
from tests.insight.group import START, account

HOSTS = {"ps": "node0", "trainer1": "node1", "trainer2": "node1", "trainer3": "node2", "trainer10": "node2"}
FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "insight"
REFUSED = "no answer within 1.5 s; its process 204 is stopped (SIGSTOP)"
WHY = """\
trainer3 waits for ps since 12.4 s:
  Server.push(...) at train.py:88 in step: loss = push(grads)
ps runs it, and waits for trainer10, which does not answer: its process 204 is stopped.
"""


class Training:
    """A parameter server and four trainers, of which the last has fallen silent; a second passes from look to look."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since START
        self.looks = 0
        self.failure: Exception | None = None
        self.silent = {"trainer10": REFUSED}

    def look(self) -> Sight:
        self.looks += 1
        self.now += 1.0
        if self.failure is not None:
            raise self.failure
        return Sight([self._account(name) for name in HOSTS if name not in self.silent], dict(self.silent))

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        trainers = [name for name in HOSTS if name not in ("ps", *self.silent)]
        found: dict[str, list[Event]] = {name: [] for name in after}
        for rank, name in enumerate(trainers, 1):
            for number in range(int((self.now + 10) * 20)):
                ended = START - 10 + number / 20
                function = "Server.push" if number % 4 else "Server.pull"
                length = 0.002 * rank + (0.09 if number % 50 == 7 else 0.0)
                failure = "ValueError" if number % 100 == 8 else ""
                if ended > after[name]:
                    called = (CALLED, ended - length, ended, "ps", number, function, 4096, failure)
                    found[name].append(called)
                if ended > after.get("ps", self.now + START):
                    found["ps"].append((RAN, ended - length + 0.001, ended, name, number, function, failure))
        return found

    def _account(self, name: str) -> Account:
        rank = list(HOSTS).index(name)
        known: dict[str, Any] = {
            "rank": rank,
            "pid": 200 + rank,
            "host": HOSTS[name],
            "members": HOSTS,
            "generation": 2,
            "contexts": 2,
            "memory": (900 + 350 * rank) * 2**20,
            "shared": rank * 96 * 2**20,
            "references": {"owners": 12 // (rank + 1), "shared_owners": 1, "forks": 3, "users": 4 * rank},
        }
        clock = START + self.now
        seen = {other: int(self.now * (5 - at) * 1_300_000) for at, other in enumerate(HOSTS) if at}
        if name == "ps":
            known |= _server()
            known |= {"calls_done": int(self.now * 60), "bytes_out": seen, "bytes_in": seen}
        else:
            known |= _trainer(rank)
            known |= {"bytes_out": {"ps": seen[name]}, "bytes_in": {"ps": seen[name]}}
        return account(name, clock, **known)


def _server() -> dict[str, Any]:
    line = Line(file="/home/me/server.py", line=41, function="push", text="    others = gather(workers)")
    calls: list[CallIn] = [
        {
            "caller": f"trainer{number}",
            "number": 900 + number,
            "function": "Server.push",
            "age": 12.4 / number if number < 3 else 0.0,
            "state": RUNNING if number < 3 else QUEUED,
            "thread": 50 + number if number < 3 else None,
        }
        for number in (1, 2, 3)
    ]
    out: CallOut = {
        "to": "trainer10",
        "number": 31,
        "function": "Trainer.gradients",
        "age": 12.3,
        "timeout": 60.0,
        "thread": 51,
    }
    threads = [_thread(51, "call-0", line), _thread(52, "call-1", line)]
    return {"calls_in": calls, "calls_out": [out], "threads": threads, "busy": 16, "program": "server.py"}


def _trainer(rank: int) -> dict[str, Any]:
    line = Line(file="/home/me/train.py", line=88, function="step", text="    loss = push(grads)")
    main = _thread(1, "MainThread", line)
    calls: list[CallOut] = [
        {
            "to": "ps",
            "number": 900 + rank + at,
            "function": "Server.push",
            "age": 12.4 / (rank + at),
            "timeout": 60.0 if at else 0.0,
            "thread": None if at else 1,
        }
        for at in range(rank)
    ]
    waits = _thread(7, "reader", None) | {"wait": {"what": "future", "on": ["ps"], "about": "a value"}}
    passes = [{"context": 4, "number": 1, "age": 0.02, "owing": ["ps"]}]
    return {"calls_out": calls, "threads": [main, waits], "busy": 1, "passes": passes}


def _thread(number: int, name: str, line: Line | None) -> Thread:
    stack = [f"{line['file']}:{each} {line['function']}" for each in range(70, line["line"] + 1, 2)] if line else []
    return {"number": number, "name": name, "at": line, "stack": stack, "wait": None, "asleep": True}


async def _picture(file: str, keys: list[str], size: tuple[int, int]) -> None:
    source = Training()
    top = Top(source, lambda sight: WHY, interval=60.0)
    async with top.run_test(size=size) as pilot:
        for looks in (1, 2):  # rates are known from the second on
            while source.looks < looks or top.view is None or top.asking:
                await pilot.pause(0.01)
            await pilot.press("space")
        top.interval = 1.0
        await pilot.press(*keys)
        top.renew()
        await pilot.pause()
        (FOLDER / file).write_text(top.export_screenshot(simplify=True))


if __name__ == "__main__":
    asyncio.run(_picture("top.svg", [], (132, 20)))
    asyncio.run(_picture("top-worker.svg", ["down", "down", "down", "enter"], (80, 24)))
