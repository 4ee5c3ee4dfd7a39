"""Who waits for whom in a group, as a graph: pure.

A node is a call, a thread, the slots of a worker, a backward pass, a worker's share of passes, or a worker as such. An
edge leads from what waits to what it waits for; some are guesses, from what a thread's line says. Where a node has no
edge, a wait has come to its end: what stands there is the cause. Edges in a circle are a deadlock.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from telegrad.insight.paths import circles, reached
from telegrad.insight.source import Sight
from telegrad.witness.account import (
    LEAVING,
    MEETINGS,
    MEMBER,
    MOST_ALIKE,
    QUEUED,
    RUNNING,
    Account,
    CallIn,
    CallOut,
    Thread,
)

MOST_GUESSES = 16  # edges from one node that are guesses
AT_REST = ("shutdown", "serve", "init_rpc", "store")  # waits in which a thread holds no lock, and no slot
GATHER = "_all_gather"  # where all workers of a program meet that was written for torch.distributed.rpc
# Waits until other workers have come to something.
_FOR_WORKERS = ("shutdown", "rendezvous_again", "workers", "value", GATHER)
_LOCK = re.compile(r"\bwith (?P<with>[\w.\[\]'\"]+)(?: as \w+)?\s*[:,]|(?P<name>[\w.\[\]'\"]+)\.acquire\(")
_WAITS_FOR_FUTURES = re.compile(r"wait_all|\.wait\(|\.result\(|\.done\(|\bawait\b|collect_all")
_AUTOGRAD = re.compile(r"(^|/)(torch|telegrad)/autograd/")
_PIPELINE = re.compile(r"(^|/)telegrad/nn/")
_OF_PIPELINE = " of a Pipeline"  # in the names of calls that go through a batch
_OF_VALUES = re.compile(r"^(to_here|future)\(\) of a reference")


class Call(NamedTuple):
    caller: str
    to: str
    number: int


class Task(NamedTuple):
    """A thread of a worker."""

    worker: str
    thread: int


class Slots(NamedTuple):
    """That one of a worker's slots becomes free."""

    worker: str
    what: str = "slots"  # so that no two kinds of nodes are equal


class Pass(NamedTuple):
    """A backward pass that a worker drives."""

    worker: str
    context: int
    number: int


class Share(NamedTuple):
    """What a worker has to do for backward passes."""

    worker: str
    what: str = "share"


class Whole(NamedTuple):
    """A worker, or "rank 2" where no name is known: that it comes, answers or leaves."""

    name: str
    what: str = "whole"


Kin = tuple[str, str, str]  # caller, callee and function of calls
Node = Call | Task | Slots | Pass | Share | Whole


class Edge(NamedTuple):
    to: Node
    why: str  # "call", "runs", "slots", "turn", "value", "future", "lock", "pass", "shutdown", "room"
    guess: bool = False


class Waits:
    """The graph. What is younger than `young` seconds is no edge: it comes and goes."""

    def __init__(self, sight: Sight, young: float) -> None:
        self.sight = sight
        self.accounts: dict[str, Account] = {account["worker"]: account for account in sight.accounts}
        self.gone = {
            name: why.removeprefix(f"worker {name!r} ")
            for account in sight.accounts
            for name, why in account["gone"].items()
            if name not in self.accounts  # else it was started anew
        }
        self.threads: dict[Task, Thread] = {}
        self.calls_out: dict[Call, CallOut] = {}
        self.calls_in: dict[Call, CallIn] = {}
        self.serves: dict[Task, Call] = {}  # what a thread runs
        self.awaits: dict[Task, list[Call]] = defaultdict(list)  # what it waits for, of calls
        self.beyond: Counter[Kin] = Counter()  # calls that are like others, and are counted only
        self.queues: Counter[str] = Counter()  # how many calls are queued, by callee
        self._young = young
        self._mains: dict[str, Task] = {}
        self._tasks: dict[str, list[Task]] = defaultdict(list)  # by worker
        self._made: dict[str, list[Call]] = defaultdict(list)  # by caller
        self._came: dict[str, list[Call]] = defaultdict(list)  # by callee
        self._running: dict[str, list[Call]] = defaultdict(list)  # of these
        self._queues: dict[str, set[str]] = defaultdict(set)  # by callee, whose calls are queued
        self._loose: dict[str, list[Call]] = defaultdict(list)  # by caller: without a thread that waits; oldest first
        for account in sight.accounts:
            self._enter(account)
        self._edges: dict[Node, list[Edge]] = {}  # of those nodes that were asked for
        self._late = self._who_is_late()

    def _enter(self, account: Account) -> None:
        me = account["worker"]
        for thread in account["threads"]:
            task = Task(me, thread["number"])
            self.threads[task] = thread
            self._tasks[me].append(task)
            if thread["name"] == "MainThread":
                self._mains[me] = task
        alike: Counter[Kin] = Counter()
        queued: Counter[Kin] = Counter()
        for out in account["calls_out"]:
            kin = me, out["to"], out["function"]
            alike[kin] += out["thread"] is None
            self.beyond[kin] += out.get("more", 0)
            if out["thread"] is None and alike[kin] > MOST_ALIKE:
                self.beyond[kin] += 1
                continue
            call = Call(me, out["to"], out["number"])
            self.calls_out[call] = out
            self._made[me].append(call)
            if out["thread"] is not None:
                self.awaits[Task(me, out["thread"])].append(call)
            else:
                self._loose[me].append(call)
        for came in account["calls_in"]:
            kin = came["caller"], me, came["function"]
            if came["state"] == QUEUED:
                self.queues[me] += 1 + came.get("more", 0)
                queued[kin] += 1
                if queued[kin] > MOST_ALIKE:
                    continue
            call = Call(came["caller"], me, came["number"])
            self.calls_in[call] = came
            self._came[me].append(call)
            if came["state"] == QUEUED:
                self._queues[me].add(came["caller"])
            if came["state"] == RUNNING:
                self._running[me].append(call)
            if came["thread"] is not None:
                self.serves[Task(me, came["thread"])] = call
        self._loose[me].sort(key=lambda call: -self.calls_out[call]["age"])

    # What a node waits for.

    def next(self, node: Node) -> list[Edge]:
        """To what a node waits for."""
        found = self._edges.get(node)
        if found is None:
            found = self._from(node)
            if not found and isinstance(node, Task):
                found = self._to_holders(node)
            self._edges[node] = found
        return found

    def _from(self, node: Node) -> list[Edge]:
        """The same, but for what takes a lock."""
        if isinstance(node, Call):
            return self._from_call(node)
        if isinstance(node, Task):
            return self._from_task(node)
        if isinstance(node, Slots):
            return [Edge(task, "slots") for task in self.holders(node.worker)]
        if isinstance(node, Pass):
            return self._from_pass(node)
        if isinstance(node, Share):
            return [Edge(task, "pass") for task in self._at_gradients(node.worker)]
        return self._from_whole(node.name)

    def _from_call(self, call: Call) -> list[Edge]:
        came = self.calls_in.get(call)
        if came is None:
            if call.to not in self.accounts:
                return [Edge(Whole(call.to), "call")]
            return [Edge(Slots(call.to), "slots")] if self._is_full(call.to) and self._has_queue(call) else []
        if came["state"] == QUEUED:
            if self._is_full(call.to):
                return [Edge(Slots(call.to), "slots")]
            return [Edge(other, "turn", True) for other in self._rivals(call)]
        task = Task(call.to, came["thread"]) if came["thread"] is not None else None
        if task in self.threads:
            return [Edge(task, "runs")]
        if meeting := self._at_meeting(call.caller, came["function"]):
            return [Edge(each, "meeting") for each in meeting]
        if self.is_fetch(call):
            return self._to_makers(call)
        if _OF_PIPELINE in came["function"]:
            return self._to_stages(call)
        return self._to_loose(call.to, came["age"]) if came["state"] != RUNNING else []

    def _from_task(self, task: Task) -> list[Edge]:
        thread = self.threads[task]
        if thread["wait"] is not None and thread["wait"]["what"] in MEETINGS:
            return []  # it is seen together with those of the others
        calls = [call for call in self.awaits[task] if self.calls_out[call]["age"] >= self._young]
        if calls:
            return [Edge(call, "call") for call in calls]
        wait = thread["wait"]
        if wait is None:
            at = thread["at"]
            hopeful = at is not None and _WAITS_FOR_FUTURES.search(at["text"])
            return self._to_loose(task.worker, self._age(task)) if hopeful else []
        what, me = wait["what"], task.worker
        if what == "backward":
            passes = [Pass(me, each["context"], each["number"]) for each in self.accounts[me]["passes"]]
            return [Edge(each, "pass") for each in passes] or [Edge(Share(name), "pass") for name in wait["on"]]
        if what == "future":
            return self._to_loose(me, self._age(task))
        if what == "value" and set(wait["on"]) <= {me}:
            return [Edge(other, "value", True) for other in self._running[me] if self.serves.get(task) != other]
        if what == "room":
            return [Edge(call, "room") for to in wait["on"] for call in self._oldest(me, to)]
        if what == "serve":
            return []
        if what not in (*_FOR_WORKERS, *AT_REST):
            return self._to_loose(me, self._age(task))
        on = wait["on"] or (self._still_there(me) if what == "shutdown" else [])
        return [Edge(Whole(name), what) for name in on if name != me]

    def _from_pass(self, node: Pass) -> list[Edge]:
        """To those who are at it; the others that owe something may well wait for what these send."""
        owing = next(p["owing"] for p in self.accounts[node.worker]["passes"] if same(p, node))
        silent = [name for name in owing if name not in self.accounts]
        busy = [name for name in owing if name in self.accounts and self._at_gradients(name)]
        return [Edge(Whole(name), "pass") for name in silent] + [
            Edge(Share(name), "pass") for name in busy or ([] if silent else owing)
        ]

    def _from_whole(self, name: str) -> list[Edge]:
        """Of a worker that is asked to leave: to what it is still at."""
        account = self.accounts.get(name)
        if account is None:
            return []
        if account["phase"] == LEAVING:
            out = [call for call in self._made[name] if self.calls_out[call]["age"] >= self._young]
            came = [call for call in self._came[name] if self.calls_in[call]["age"] >= self._young]
            return [Edge(call, "shutdown") for call in (*out, *came)]
        main = self.main(name)
        return [Edge(main, "shutdown")] if main is not None else []

    def _still_there(self, me: str) -> list[str]:
        """For whom one waits that leaves: those that do not, or else are at something."""
        account = self.accounts[me]
        if account["missing"] or account["size"] is None:
            return account["missing"]
        return [name for name in self._late if name in account["members"] and name not in account["gone"]]

    def _who_is_late(self) -> list[str]:
        """Members that have not called shutdown, or else whose calls have not ended."""
        members = [name for name, account in self.accounts.items() if account["phase"] == MEMBER]
        leaving = (name for name, account in self.accounts.items() if account["phase"] == LEAVING)
        return [*members, *self.sight.silent] or [name for name in leaving if self._from_whole(name)]

    # Guesses.

    def _rivals(self, call: Call) -> list[Call]:
        """Calls of methods: what waits though slots are free is an actor's method, whose turn it is not."""
        owner = _class_of(self.calls_in[call])
        begun = [other for other in self._came[call.to] if self.calls_in[other]["age"] >= self._young]
        methods = [other for other in begun if _is_class(_class_of(self.calls_in[other]))]
        alike = [other for other in methods if _class_of(self.calls_in[other]) == owner]
        return (alike or methods or begun)[:MOST_GUESSES]

    def _to_makers(self, fetch: Call) -> list[Edge]:
        """Which of the calls at a value's owner makes it; a caller fetches mostly what it has had made."""
        running = [call for call in self._running[fetch.to] if self.calls_in[call]["age"] >= self._young]
        own = [call for call in (*running, *self.queued(fetch.to)) if call.caller == fetch.caller]
        return [Edge(call, "value", True) for call in (own or running)[:MOST_GUESSES]]

    def _to_stages(self, call: Call) -> list[Edge]:
        """A batch waits for whichever stage is at work, on any of its workers."""
        batch = [o for o, c in self.calls_in.items() if o.caller == call.caller and _OF_PIPELINE in c["function"]]
        at_it = [task for name in sorted({other.to for other in batch}) for task in self._inside(name, _PIPELINE)]
        return [Edge(task, "stage") for task in at_it if not set(batch) & set(self.awaits[task])]

    def _to_loose(self, name: str, since: float) -> list[Edge]:
        """To calls of a worker for which no thread waits in place, but a coroutine or a future may."""
        calls = [c for c in self._loose[name] if self._young <= self.calls_out[c]["age"] <= since + 0.1]
        return [Edge(call, "future", True) for call in calls[:MOST_GUESSES]]

    def _to_holders(self, task: Task) -> list[Edge]:
        """Of a thread that takes a lock: to those that seem to hold it."""
        lock = lock_of(self.threads[task])
        if lock is None:
            return []
        others = [other for other in self._tasks[task.worker] if other != task and self._may_hold(other, lock)]
        waiting = [other for other in others if task in reached(_only(other), self._for_certain)]
        at = self.threads[task]["at"]
        file = f"{at['file']}:" if at is not None else ""
        near = [other for other in others if any(frame.startswith(file) for frame in self.threads[other]["stack"])]
        guesses = waiting or near or others
        return [Edge(other, "lock", True) for other in guesses] if len(guesses) <= MOST_GUESSES else []

    def _may_hold(self, other: Task, lock: str) -> bool:
        thread = self.threads[other]
        if thread["at"] is None or lock_of(thread) == lock:
            return False
        return thread["wait"] is None or thread["wait"]["what"] not in AT_REST

    def _for_certain(self, node: Node) -> list[Node]:
        return [edge.to for edge in self._from(node)]

    # Looking up.

    def _age(self, task: Task) -> float:
        """For how long it has been at what it does, at most."""
        call = self.serves.get(task)
        return self.calls_in[call]["age"] if call is not None else float("inf")

    def _oldest(self, caller: str, to: str) -> list[Call]:
        calls = [call for call in self._made[caller] if call.to == to]
        return sorted(calls, key=lambda call: -self.calls_out[call]["age"])[:1]

    def _at_gradients(self, name: str) -> list[Task]:
        """Threads that run user code inside of a backward pass."""
        return self._inside(name, _AUTOGRAD)

    def _at_meeting(self, name: str, what: str) -> list[Task]:
        """Threads of a worker that wait for a meeting of a group: what they have called tells who is missing."""
        waits = ((task, self.threads[task]["wait"]) for task in self._tasks[name])
        return [task for task, wait in waits if wait is not None and wait["what"] in MEETINGS and wait["about"] == what]

    def _inside(self, name: str, code: re.Pattern[str]) -> list[Task]:
        """Threads of a worker that run what code of that kind has called."""
        return [
            task
            for task in self._tasks[name]
            if self.threads[task]["at"] is not None
            and self.threads[task]["wait"] is None
            and any(map(code.search, self.threads[task]["stack"]))
        ]

    def holders(self, name: str) -> list[Task]:
        """Threads that have a slot: whoever waits for a call has given its own back."""
        tasks = [
            Task(name, thread) for call in self._running[name] if (thread := self.calls_in[call]["thread"]) is not None
        ]
        return [
            task for task in tasks if task in self.threads and not self.awaits[task] and not self.threads[task]["wait"]
        ]

    def queued(self, name: str) -> list[Call]:
        return [call for call in self._came[name] if self.calls_in[call]["state"] == QUEUED]

    def _is_full(self, name: str) -> bool:
        return self.accounts[name]["busy"] >= self.accounts[name]["slots"]

    def _has_queue(self, call: Call) -> bool:
        """Whether earlier calls of the same caller are queued: not each that is further behind is told of."""
        return call.caller in self._queues[call.to]

    def is_fetch(self, call: Call) -> bool:
        """Whether a call wants the value of a reference."""
        names = [known["function"] for known in (self.calls_in.get(call), self.calls_out.get(call)) if known]
        return any(_OF_VALUES.match(name) for name in names)

    def main(self, name: str) -> Task | None:
        return self._mains.get(name)

    def tasks(self, name: str) -> list[Task]:
        return self._tasks[name]

    def reached(self, starts: Iterable[Node]) -> dict[Node, None]:
        """All that the starts wait for, they included, in order."""
        return reached(starts, lambda node: [edge.to for edge in self.next(node)])

    def circles(self, nodes: Iterable[Node]) -> list[list[Node]]:
        """Those among the nodes that wait for each other and cannot be freed, each lot in an order of its waits."""
        return circles(nodes, lambda node: [edge.to for edge in self.next(node)], lambda node: isinstance(node, Slots))


def worker_of(node: Node) -> str:
    """Where it waits."""
    return node.caller if isinstance(node, Call) else node.name if isinstance(node, Whole) else node.worker


def lock_of(thread: Thread) -> str | None:
    """The lock that a thread waits for, as its line names it; None where it takes none."""
    at = thread["at"]
    if at is None or thread["wait"] is not None or thread["asleep"] is False:
        return None
    found = _LOCK.search(at["text"])
    here = stands_in_its_line(thread) or not thread["stack"] or "/threading.py:" in thread["stack"][-1]
    return (found["with"] or found["name"]) if found and here else None


def stands_in_its_line(thread: Thread) -> bool:
    """Whether no code in Python is further inside than its line of the user's program."""
    at = thread["at"]
    return at is not None and bool(thread["stack"]) and thread["stack"][-1].startswith(f"{at['file']}:{at['line']} ")


def same(each: object, node: Pass) -> bool:
    return (each["context"], each["number"]) == (node.context, node.number)  # type: ignore[index]


def _only(node: Node) -> list[Node]:
    return [node]


def _class_of(came: CallIn) -> str:
    """Of a method, or the module of a function."""
    return came["function"].rpartition(".")[0]


def _is_class(name: str) -> bool:
    return name.rpartition(".")[2][:1].isupper()
