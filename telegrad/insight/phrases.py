"""How what a group does is said: times, names, lines of programs, and what a thread stands at. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import isinf

from telegrad.insight.waits import GATHER, Call, Pass, Share, Slots, Task, Waits, lock_of, stands_in_its_line
from telegrad.witness.account import QUEUED, Line, Thread

FEW = 4  # that are named one by one
INDENT = "    "  # of a line of a program, below what stands at it
_MAY_SLEEP = re.compile(r"\(|^$|\b(with|await|import|for|yield)\b|[\[.]")  # else it waits for the interpreter at most
_SLEEPS = re.compile(r"\bsleep\(")
_INNER = (
    "/threading.py:",
    "/queue.py:",
    "/concurrent/futures/",
    "/multiprocessing/",
    "/selectors.py:",
    "/subprocess.py:",
)

LOCKED, BUSY, SLEEPS, WAITS, ASLEEP, UNKNOWN = "locked", "busy", "sleeps", "waits", "asleep", "unknown"


def seconds(age: float) -> str:
    if age < 9.95:
        return f"{age:.1f} s"
    whole = round(age)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def lasting(age: float) -> str:
    """ ", for 3 s"; nothing where it is not known."""
    return "" if isinf(age) or age <= 0 else f", for {seconds(age)}"


def several(names: Iterable[str], most: int = 2 * FEW) -> str:
    known = list(dict.fromkeys(names))
    if len(known) > most:
        known = [*known[: most - 1], f"{len(known) - most + 1} others"]
    return " and ".join([", ".join(known[:-1]), known[-1]] if len(known) > 1 else known)


def counted(names: Iterable[str]) -> str:
    """ "worker1 (3), worker2"."""
    return several(f"{name} ({count})" if count > 1 else name for name, count in Counter(names).most_common())


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def line(at: Line) -> str:
    return f"{INDENT}{at['file']}:{at['line']} in {at['function']}" + (f": {at['text']}" if at["text"] else "")


def lines_of(thread: Thread | None) -> list[str]:
    """The line that a thread stands at, if that is known."""
    return [line(thread["at"])] if thread is not None and thread["at"] is not None else []


def standing(thread: Thread) -> str:
    """What a thread is at that waits for nothing of this package."""
    text = thread["at"]["text"] if thread["at"] is not None else ""
    innermost = thread["stack"][-1] if thread["stack"] else ""
    if lock_of(thread) is not None:
        return LOCKED
    if thread["asleep"] is False or (stands_in_its_line(thread) and not _MAY_SLEEP.search(text)):
        return BUSY
    if _SLEEPS.search(text):
        return SLEEPS
    if any(part in innermost for part in _INNER):
        return WAITS
    return ASLEEP if thread["asleep"] else UNKNOWN


DOES = {
    LOCKED: "waits for a lock",
    BUSY: "is at work all the time: it loops, it seems, or computes",
    SLEEPS: "sleeps",
    WAITS: "waits for something in its own process",
    ASLEEP: "stands still, in a wait that is not of Telegrad's",
    UNKNOWN: "has not come further",
}


class Names:
    """What the nodes of a graph are called."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def function(self, call: Call) -> str:
        """The callee's name for it says more, once it has opened the call."""
        came, out = self._waits.calls_in.get(call), self._waits.calls_out.get(call)
        names = [known["function"] for known in (came, out) if known is not None and known["function"]]
        return next((name for name in names if not name.startswith("telegrad.")), names[0] if names else "a call")

    def who(self, task: Task) -> str:
        waits = self._waits
        call = waits.serves.get(task)
        if call is not None:
            return f"{task.worker}, in {self.function(call)} for {call.caller},"
        name = waits.threads[task]["name"]
        return f"{task.worker}'s main thread" if name == "MainThread" else f"{task.worker}'s thread {name}"

    def age(self, node: object) -> float:
        """For how long a node is what it is; 0 where that is not known."""
        waits = self._waits
        if isinstance(node, Call):
            out, came = waits.calls_out.get(node), waits.calls_in.get(node)
            return out["age"] if out is not None else came["age"] if came is not None else 0.0
        if isinstance(node, Pass):
            return max((each["age"] for each in waits.accounts[node.worker]["passes"]), default=0.0)
        return self._age_of(node) if isinstance(node, Task) else 0.0

    def _age_of(self, task: Task) -> float:
        waits = self._waits
        account, wait = waits.accounts[task.worker], waits.threads[task]["wait"]
        if wait is not None:
            if wait.get("age"):
                return wait["age"]
            if wait["what"] in ("shutdown", "init_rpc", "store"):
                return account["phase_age"]
            if wait["what"] == "room":
                return max((out["age"] for out in account["calls_out"] if out["to"] in wait["on"]), default=0.0)
            if wait["what"] == "backward":
                return max((each["age"] for each in account["passes"]), default=0.0)
        call = waits.serves.get(task)
        return waits.calls_in[call]["age"] if call is not None else 0.0

    def waiting(self, node: object) -> list[str]:
        """What waits, as a sentence, and the line of the user's program at which it does."""
        age = self.age(node)
        if isinstance(node, Call):
            return self._waiting_call(node, age)
        if isinstance(node, Pass):
            return [f"{node.worker} drives a backward pass of context {node.context}{lasting(age)}"]
        if isinstance(node, Slots):
            queued = self._waits.queues[node.worker]
            verb = "waits" if queued == 1 else "wait"
            return [f"{plural(queued, 'call')} to {node.worker} {verb} for a free slot there"]
        if isinstance(node, Share):
            return [f"{node.worker} has gradients to work out"]
        if isinstance(node, Task):
            thread = self._waits.threads[node]
            return [f"{self.who(node)} {self.doing(thread)}{lasting(age)}", *lines_of(thread)]
        return [str(node)]

    def doing(self, thread: Thread) -> str:
        wait = thread["wait"]
        if wait is None:
            lock = lock_of(thread)
            return DOES[standing(thread)] + (f" ({lock})" if lock is not None else "")
        on = several(wait["on"])
        return {
            "shutdown": f"is in shutdown, and waits for {on or 'the others'}",
            "rendezvous_again": f"is in rendezvous_again, and waits for {on or 'the others'}",
            "serve": "serves the others",
            "init_rpc": f"joins the group, and waits for {on or 'the others'}",
            "store": "joins the group, and waits for the store",
            "workers": f"waits for {on or wait['about'] or 'workers'} to join",
            "backward": f"waits for a backward pass{' in which ' + on + ' owes something' if on else ''}",
            "future": f"waits for {wait['about'] or 'a future'}",
            "value": f"waits for the value of a reference{', of ' + on if on else ''}",
            GATHER: f"is in _all_gather (shutdown calls it, too), and waits for {on or 'the others'}",
            "room": f"waits for room: as many calls as may be are in flight to {on}",
        }.get(wait["what"]) or f"waits for {wait['about'] or wait['what']}{', of ' + on if on else ''}"

    def _waiting_call(self, call: Call, age: float) -> list[str]:
        waits = self._waits
        out, came = waits.calls_out.get(call), waits.calls_in.get(call)
        what = f"{self.function(call)} on {call.to}"
        queued = ", where it is queued" if came is not None and came["state"] == QUEUED else ""
        task = Task(call.caller, out["thread"]) if out is not None and out["thread"] is not None else None
        if task in waits.threads:
            return [f"{self.who(task)} waits for {what}{lasting(age)}{queued}", *lines_of(waits.threads[task])]
        ago = f" {seconds(age)} ago" if age else ""
        alone = ", and no thread waits for it in place" if out is not None and out["thread"] is None else ""
        return [f"{call.caller} called {what}{ago}{queued}{alone}"]

    def stacks(self, tasks: Sequence[Task]) -> dict[str, list[str]]:
        return {
            f"{task.worker} {self._waits.threads[task]['name']} ({task.thread})": self._waits.threads[task]["stack"]
            for task in tasks
        }
