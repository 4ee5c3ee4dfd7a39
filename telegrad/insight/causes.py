"""From the graph of waits to findings: circles, and what stands at the ends. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from telegrad.insight.finding import WEIGHTS, Finding
from telegrad.insight.gatherings import Gathering, gatherings
from telegrad.insight.phrases import BUSY, FEW, LOCKED, Names, counted, standing
from telegrad.insight.stories import Said, Stories
from telegrad.insight.waits import Call, Edge, Node, Pass, Slots, Task, Waits, Whole, lock_of, worker_of
from telegrad.witness.account import QUEUED, RUNNING


class Causes:
    def __init__(self, waits: Waits, long: float) -> None:
        self._waits = waits
        self._names = Names(waits)
        self._stories = Stories(waits, self._names, long)
        self._long = long
        self.starts = self._starts()
        self._long_ones = set(self.starts)
        reached = waits.reached(self.starts)
        self._reached = reached
        self._into: dict[Node, list[tuple[Node, Edge]]] = defaultdict(list)
        for node in reached:
            for edge in waits.next(node):
                self._into[edge.to].append((node, edge))
        self._told: set[Node] = set()  # which a finding names as its cause

    def _starts(self) -> list[Node]:
        """What has waited for long."""
        waits, names = self._waits, self._names
        calls = [call for call in waits.calls_out if names.age(call) >= self._long]
        strange = [
            call for call in waits.calls_in if call.caller not in waits.accounts and names.age(call) >= self._long
        ]
        passes = [
            Pass(name, each["context"], each["number"])
            for name, account in waits.accounts.items()
            for each in account["passes"]
            if each["age"] >= self._long
        ]
        tasks = [task for task, thread in waits.threads.items() if not waits.awaits[task] and self._is_long(task)]
        return [*calls, *strange, *tasks, *(each for each in passes if not self._has_thread(each, tasks))]

    def _is_long(self, task: Task) -> bool:
        """A wait whose age cannot be known is taken to be long."""
        thread = self._waits.threads[task]
        age = self._names.age(task)
        if thread["wait"] is not None:
            what = thread["wait"]["what"]
            known = "age" in thread["wait"] or what in ("backward", "shutdown", "room")
            return what not in ("init_rpc", "store", "serve") and (age >= self._long or not (age or known))
        if task not in self._waits.serves:
            futures = [edge.to for edge in self._waits.next(task) if edge.why == "future"]
            if any(self._names.age(call) >= self._long for call in futures):
                return True
        return lock_of(thread) is not None and (not age or age >= self._long)

    def _has_thread(self, each: Pass, tasks: list[Task]) -> bool:
        return any(Edge(each, "pass") in self._waits.next(task) for task in tasks)

    def find(self) -> list[Finding]:
        found = [self._circle(lot) for lot in self._waits.circles(self._reached)]
        ends = [node for node in self._reached if not self._waits.next(node)]
        found += [self._gathering(gathering) for gathering in gatherings(self._waits, self._waiters, self._long)]
        taken = [node for node in self._reached if isinstance(node, Slots)]
        found += [self._slots(slots) for slots in taken if slots not in self._told]
        lots = self._alike([node for node in ends if node not in self._told])
        found += [self._end(kind, lot) for (kind, _), lot in lots.items()]
        return found + [self._room(task) for task in self._without_room()]

    # Who waits.

    def _waiters(self, roots: Collection[Node]) -> list[Node]:
        """What has waited for long for one of these, nearest first."""
        seen = set(roots)
        ahead = list(roots)
        for node in ahead:
            fresh = [source for source, _ in self._into[node] if source not in seen]
            seen.update(fresh)
            ahead += dict.fromkeys(fresh)
        return [node for node in ahead if node in self._long_ones or (isinstance(node, Call) and self._names.age(node))]

    def _told_waiters(self, waiters: Sequence[Node]) -> list[str]:
        """A few in full, alike ones once, and the rest by their names."""
        alike: dict[tuple[object, ...], list[Node]] = defaultdict(list)
        for node in waiters:
            alike[self._kin(node)].append(node)
        details: list[str] = []
        lots = list(alike.values())
        for lot in lots[: FEW if len(lots) > FEW + 1 else None]:
            oldest = max(lot, key=self._names.age)
            sentence, *lines = self._names.waiting(oldest)
            details += [sentence + self._others(oldest, lot), *lines]
        rest = [worker_of(node) for lot in lots[FEW:] for node in lot] if len(lots) > FEW + 1 else []
        return details + ([f"and {len(rest):,} more wait for it: {counted(rest)}"] if rest else [])

    def _others(self, first: Node, lot: list[Node]) -> str:
        count = len(lot) - 1 + self._beyond(first)
        names = [worker_of(node) for node in lot if node is not first]
        which = f": {counted(names)}" if {*names} - {worker_of(first)} else ""
        return f" (and {count:,} more like it{which})" if count else ""

    def _kin(self, node: Node) -> tuple[object, ...]:
        """What makes waits alike: they are for the same, at one line of whatever worker, or at none of one worker."""
        task = self._thread_of(node)
        thread = self._waits.threads[task] if task is not None else None
        at = thread["at"] if thread is not None else None
        where = (at["file"], at["line"]) if at is not None else (worker_of(node),)
        if isinstance(node, Call):
            came = self._waits.calls_in.get(node)
            queued = came is not None and came["state"] == QUEUED
            return node.to, self._names.function(node), queued, *where
        if isinstance(node, Task) and thread is not None:
            return self._names.doing(thread), *where
        return node

    def _beyond(self, node: Node) -> int:
        """How many more there are than are told of one by one; of those that are queued, if any are."""
        out = self._waits.calls_out.get(node) if isinstance(node, Call) else None
        if not isinstance(node, Call) or out is None or out["thread"] is not None:
            return 0
        came = self._waits.calls_in.get(node)
        is_last = came is None or came["state"] == QUEUED or not self._waits.queues[node.to]
        return self._waits.beyond[node.caller, node.to, out["function"]] if is_last else 0

    def _made(
        self,
        kind: str,
        workers: Sequence[str],
        said: Said,
        roots: Sequence[Node],
        circle: Sequence[Node] = (),
    ) -> Finding:
        self._told.update(roots, circle)
        apart = {*circle, *(node for node in roots if not isinstance(node, Call))}
        waiters = [node for node in self._waiters([*roots, *circle]) if node not in apart]
        tasks = [node for node in (*circle, *roots) if isinstance(node, Task) and node in self._waits.threads]
        tasks += [task for node in waiters[:FEW] if (task := self._thread_of(node)) is not None and task not in tasks]
        return Finding(
            kind,
            WEIGHTS[kind] if said.weight is None else said.weight,
            list(dict.fromkeys(workers)),
            list(dict.fromkeys(worker_of(node) for node in waiters)),
            max((self._names.age(node) for node in (*roots, *circle, *waiters)), default=0.0),
            said.title,
            said.details + self._told_waiters(waiters),
            self._names.stacks(tasks),
        )

    def _thread_of(self, node: Node) -> Task | None:
        if isinstance(node, Task):
            return node
        out = self._waits.calls_out.get(node) if isinstance(node, Call) else None
        task = Task(node.caller, out["thread"]) if out and out["thread"] is not None else None  # type: ignore[union-attr]
        return task if task in self._waits.threads else None

    def _via(self, node: Node) -> set[str]:
        """How it is waited for."""
        serves = self._waits.serves.get(node) if isinstance(node, Task) else None
        return {edge.why for each in (node, serves) if each is not None for _, edge in self._into[each]}

    # Which kind it is.

    def _circle(self, lot: list[Node]) -> Finding:
        oldest = max(range(len(lot)), key=lambda at: self._names.age(lot[at]) * isinstance(lot[at], Call))
        lot = lot[oldest:] + lot[:oldest]
        following = [*lot[1:], lot[0]]
        edges = [
            next(edge for edge in self._waits.next(node) if edge.to == after)
            for node, after in zip(lot, following, strict=True)
        ]
        workers = sorted({worker_of(node) for node in lot})
        if any(isinstance(node, Slots) for node in lot):
            return self._made("slot deadlock", workers, self._stories.slot_circle(lot, edges), [], lot)
        if any(edge.why == "lock" for edge in edges):
            return self._made("lock deadlock", workers, self._stories.lock_circle(lot, edges), [], lot)
        return self._made("deadlock", workers, self._stories.circle(lot, edges), [], lot)

    def _alike(self, ends: list[Node]) -> dict[tuple[str, str], list[Node]]:
        """By kind, and by what makes them one finding."""
        lots: dict[tuple[str, str], list[Node]] = defaultdict(list)
        for node in ends:
            kind = self._kind(node)
            if isinstance(node, Task):
                at = self._waits.threads[node]["at"]
                where = f"{at['file']}:{at['line']}" if at is not None else repr(node)
            elif isinstance(node, Call):
                where = f"{node.to} {self._names.function(node)}"
            else:
                where = repr(node)
            lots[kind, where].append(node)
        return lots

    def _kind(self, node: Node) -> str:
        waits = self._waits
        if isinstance(node, Task):
            return self._kind_of_task(node)
        if isinstance(node, Call):
            came = waits.calls_in.get(node)
            if came is None:
                return "underway"
            return {QUEUED: "turn", RUNNING: "busy"}.get(
                came["state"], "value" if waits.is_fetch(node) else "unfinished"
            )
        if isinstance(node, Whole):
            name = node.name
            if name in waits.sight.silent:
                return "silent"
            if name in waits.accounts:
                return "shutdown"
            known = {each for account in waits.accounts.values() for each in account["members"]}
            return "gone" if name in waits.gone else "silent" if name in known else "unknown"
        return "slots" if isinstance(node, Slots) else "backward"

    def _kind_of_task(self, task: Task) -> str:
        thread = self._waits.threads[task]
        via = self._via(task)
        for why, kind in (("lock", "lock"), ("value", "value"), ("pass", "backward")):
            if why in via:
                return kind
        if "shutdown" in via and task == self._waits.main(task.worker):
            return "shutdown"
        if thread["wait"] is not None:
            return {"future": "unfinished", "value": "value", "backward": "backward"}.get(
                thread["wait"]["what"], "wait"
            )
        does = standing(thread)
        return "lock" if does == LOCKED else "busy" if does == BUSY else "asleep"

    def _end(self, kind: str, lot: list[Node]) -> Finding:
        first = max(lot, key=self._names.age)
        workers = sorted({worker_of(node) for node in lot})
        if isinstance(first, Task):
            tasks = [node for node in lot if isinstance(node, Task)]
            takers = [node for node, edge in self._into[first] if edge.why == "lock" and isinstance(node, Task)]
            return self._made(kind, workers, self._stories.thread(kind, first, tasks, takers), lot)
        if isinstance(first, Call):
            return self._made(kind, [first.to], self._stories.call(kind, first, len(lot)), lot)
        if isinstance(first, Whole):
            return self._made(kind, workers, self._stories.worker(kind, first.name), lot)
        return self._made(kind, workers, self._stories.share(workers), lot)

    def _slots(self, slots: Slots) -> Finding:
        holders = self._waits.holders(slots.worker)
        ends = [task for task in holders if not self._waits.next(task)]
        lots = [[task for task in lot if isinstance(task, Task)] for lot in self._alike(list(ends)).values()]
        said = self._stories.slots(slots.worker, holders, lots)
        return self._made("slots", [slots.worker], said, [slots, *ends])

    def _gathering(self, found: Gathering) -> Finding:
        return self._made("barrier", found.absent, self._stories.gathering(found), found.tasks)

    def _without_room(self) -> list[Task]:
        return [
            task
            for task in self.starts
            if isinstance(task, Task) and (self._waits.threads[task]["wait"] or {"what": ""})["what"] == "room"
        ]

    def _room(self, task: Task) -> Finding:
        return self._made("room", [task.worker], self._stories.room(task), [task])
