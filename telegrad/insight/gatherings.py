"""Places of a program where all workers meet, and who is missing there: guesses, from the lines of threads. Pure.

Those of groups (`Group.barrier` and the like) tell of themselves who is missing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from math import inf
from typing import NamedTuple

from telegrad.insight.phrases import BUSY, standing
from telegrad.insight.waits import Call, Node, Task, Waits
from telegrad.witness.account import MEETINGS, Thread

_MEETS = re.compile(
    r"barrier|init_process_group|all_?reduce|all_?gather|reduce_scatter|all_to_all|broadcast|rendezvous|arrive|store\.(wait|get)"
    r"|\.wait(_for)?\(",
    re.I,
)


class Gathering(NamedTuple):
    tasks: list[Task]  # that stand at one line
    parties: list[str]
    absent: list[str]  # who seem to be meant to come, too
    certain: bool  # as far as this can be
    meeting: str = ""  # what a group's meeting is called


def gatherings(waits: Waits, waiters: Callable[[Collection[Node]], list[Node]], long: float) -> list[Gathering]:
    """Where a worker is missing for so many seconds, as far as these are known: those of calls are."""
    meetings: dict[str, list[Task]] = defaultdict(list)
    lines: dict[tuple[str, int], list[Task]] = defaultdict(list)
    for task, thread in waits.threads.items():
        at, wait = thread["at"], thread["wait"]
        if wait is not None and wait["what"] in MEETINGS and wait["age"] >= long:
            meetings[wait["about"]].append(task)
        elif at is not None and not waits.awaits[task] and not waits.next(task) and _meets(thread):
            lines[at["file"], at["line"]].append(task)
    found = (_gathering(waits, tasks, waiters) for tasks in lines.values() if _age(waits, tasks) >= long)
    told = [_meeting(waits, tasks, what) for what, tasks in meetings.items()]
    return [each for each in (*told, *found) if each is not None]


def _meeting(waits: Waits, tasks: list[Task], what: str) -> Gathering | None:
    """Of a group: whoever waits there knows who is missing, once it has asked."""
    absent = {name for task in tasks for name in (waits.threads[task]["wait"] or {"on": []})["on"]}
    absent -= {task.worker for task in tasks}
    return Gathering(tasks, sorted({task.worker for task in tasks}), sorted(absent), True, what) if absent else None


def _meets(thread: Thread) -> bool:
    at = thread["at"]
    if at is None or thread["wait"] is not None or standing(thread) == BUSY:
        return False
    return _MEETS.search(at["text"]) is not None or _MEETS.search(at["function"]) is not None


def _gathering(waits: Waits, tasks: list[Task], waiters: Callable[[Collection[Node]], list[Node]]) -> Gathering | None:
    hosts = {task.worker for task in tasks}
    parties = {_party(waits, task) for task in tasks} if len(hosts) == 1 else hosts
    held_up = {node.caller if isinstance(node, Call) else getattr(node, "worker", "") for node in waiters(tasks)}
    absent = set(waits.accounts) | waits.gone.keys() | waits.sight.silent.keys()
    absent -= parties | held_up
    if len(absent) > 1:
        absent -= hosts
    if len(parties) < 2 or not absent or len(absent) > len(parties) // 2:
        return None
    mains = [waits.main(name) for name in absent]
    certain = bool(held_up) or not any(main and standing(waits.threads[main]) == BUSY for main in mains)
    return Gathering(tasks, sorted(parties), sorted(absent), certain)


def _age(waits: Waits, tasks: list[Task]) -> float:
    calls = [waits.serves.get(task) for task in tasks]
    return max(waits.calls_in[call]["age"] if call is not None else inf for call in calls)


def _party(waits: Waits, task: Task) -> str:
    """For whom a thread waits there."""
    call = waits.serves.get(task)
    return call.caller if call is not None else task.worker
