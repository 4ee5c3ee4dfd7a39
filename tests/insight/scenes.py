"""Made-up states of groups, written in a few lines."""

from typing import Any

from telegrad.insight.history import GroupSnapshot
from telegrad.reporting import LEAVING, QUEUED, RUNNING, UNFINISHED, SourceLine, ThreadState, WaitState, WorkerState
from tests.insight.accounts import account

FOLDER = "/home/ann/project"


def at(place: str) -> SourceLine:
    """Return the source line of "train.py:12 main: text"."""
    where, _, text = place.partition(": ")
    file, function = where.split(" ")
    name, number = file.split(":")
    return SourceLine(file=f"{FOLDER}/{name}", line=int(number), function=function, text=text)


class Scene:
    def __init__(self, *names: str, slots: int = 16) -> None:
        self.accounts = {name: _account(name, rank, names, slots) for rank, name in enumerate(names)}
        self.silent: dict[str, str] = {}
        self._numbers = 0

    def __getitem__(self, name: str) -> WorkerState:
        return self.accounts[name]

    def thread(self, worker: str, place: str = "", **more: Any) -> int:
        """Add a thread at a place, with frames `inside` of that line; return its number."""
        threads = self[worker]["threads"]
        line, number, waits = at(place) if place else None, self._number(), more.get("wait")
        stack = [f"{line['file']}:{line['line']} {line['function']}"] if line else []
        stack = [*more.get("outside", []), *stack, *more.get("inside", [])]
        name, asleep = more.get("name", "telegrad-worker" if threads else "MainThread"), more.get("asleep", True)
        threads.append(ThreadState(number=number, name=name, at=line, stack=stack, wait=waits, asleep=asleep))
        threads[-1]["holds"], threads[-1]["objects"] = more.get("holds", []), more.get("objects", {})
        return number

    def call(self, caller: str, to: str, function: str, age: float, **more: Any) -> int | None:
        """Add a call in flight: `by` is the waiting thread, `runs` the place of the thread that runs it, or its state.

        Return the thread that runs it.
        """
        number = self._number()
        if caller in self.accounts:
            out = {"to": to, "number": number, "function": function, "age": age, "timeout": 0.0}
            out |= {"thread": more.pop("by", None)}
            self[caller]["calls_out"].append(out)  # type: ignore[arg-type]
        if to not in self.accounts or more.pop("lost", False):
            return None
        thread = self.thread(to, more.pop("runs"), name="telegrad-worker", **more) if "runs" in more else None
        state = more.get("state", RUNNING if thread is not None else QUEUED)
        came = {"caller": caller, "number": number, "function": function, "age": 0.0 if state == QUEUED else age}
        self[to]["calls_in"].append({**came, "state": state, "thread": thread})  # type: ignore[typeddict-item]
        if state == RUNNING:
            self[to]["busy"] += 1
        return thread

    @property
    def sight(self) -> GroupSnapshot:
        return GroupSnapshot(list(self.accounts.values()), self.silent)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def wait(what: str, *on: str, about: str = "", age: float = 0) -> WaitState:
    made = WaitState(what=what, on=list(on), about=about)
    if age:
        made["age"] = age
    return made


def _account(name: str, rank: int, names: tuple[str, ...], slots: int) -> WorkerState:
    return account(
        name, rank=rank, pid=100 + rank, host="hosta", phase_age=100.0, idle=100.0, place="tcp://127.0.0.1:29500",
        size=len(names), members=dict.fromkeys(names, "hosta"), slots=slots,
    )  # fmt: skip


__all__ = ["LEAVING", "QUEUED", "RUNNING", "UNFINISHED", "Scene", "at", "wait"]
