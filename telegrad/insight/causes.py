"""From the graph of waits to findings: circles, and what stands at the ends. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from telegrad.insight.finding import NOTE, WEIGHTS, Finding
from telegrad.insight.gatherings import Gathering, gatherings
from telegrad.insight.phrases import (
    BUSY,
    DOES,
    FEW,
    LOCKED,
    Names,
    counted,
    lasting,
    lines_of,
    plural,
    seconds,
    several,
    standing,
)
from telegrad.insight.waits import Call, Edge, Node, Pass, Share, Slots, Task, Waits, Whole, lock_of
from telegrad.witness.account import LEAVING, QUEUED, RUNNING


class Causes:
    def __init__(self, waits: Waits, long: float) -> None:
        self._waits = waits
        self._names = Names(waits)
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
            return what not in ("init_rpc", "store") and (age >= self._long or not (age or known))
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
            sentence, *lines = self._names.waiting(max(lot, key=self._names.age))
            others = len(lot) - 1 + self._beyond(lot[0])
            details += [sentence + (f" (and {others:,} more like it)" if others else ""), *lines]
        rest = [_worker(node) for lot in lots[FEW:] for node in lot] if len(lots) > FEW + 1 else []
        return details + ([f"and {len(rest):,} more wait for it: {counted(rest)}"] if rest else [])

    def _kin(self, node: Node) -> tuple[object, ...]:
        """What makes calls alike: two of one thread, or of none, to one function of one worker."""
        if not isinstance(node, Call):
            return node
        out, came = self._waits.calls_out.get(node), self._waits.calls_in.get(node)
        state = came is not None and came["state"]
        return node.caller, node.to, self._names.function(node), out and out["thread"], state == QUEUED

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
        title: str,
        details: list[str],
        roots: Sequence[Node],
        weight: int | None = None,
        circle: Sequence[Node] = (),
    ) -> Finding:
        self._told.update(roots, circle)
        apart = {*circle, *(node for node in roots if not isinstance(node, Call))}
        waiters = [node for node in self._waiters([*roots, *circle]) if node not in apart]
        tasks = [node for node in (*circle, *roots) if isinstance(node, Task) and node in self._waits.threads]
        tasks += [task for node in waiters[:FEW] if (task := self._thread_of(node)) is not None and task not in tasks]
        return Finding(
            kind,
            WEIGHTS[kind] if weight is None else weight,
            list(dict.fromkeys(workers)),
            list(dict.fromkeys(_worker(node) for node in waiters)),
            max((self._names.age(node) for node in (*roots, *circle, *waiters)), default=0.0),
            title,
            details + self._told_waiters(waiters),
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

    # Circles.

    def _circle(self, lot: list[Node]) -> Finding:
        waits = self._waits
        oldest = max(range(len(lot)), key=lambda at: self._names.age(lot[at]) * isinstance(lot[at], Call))
        lot = lot[oldest:] + lot[:oldest]
        edges = [next(e for e in waits.next(node) if e.to == lot[(at + 1) % len(lot)]) for at, node in enumerate(lot)]
        workers = sorted({_worker(node) for node in lot})
        slots = [node.worker for node in lot if isinstance(node, Slots)]
        locks = [node for node, edge in zip(lot, edges, strict=True) if edge.why == "lock"]
        seems = ", it seems" if any(edge.guess for edge in edges) else ""
        if slots:
            kind, title = "slot deadlock", f"Deadlock through the slots of {several(slots)}{seems}"
            title += ": the calls that have them wait for calls that are queued for one."
        elif locks:
            own = locks[0]
            assert isinstance(own, Task)
            kind, title = "lock deadlock", f"Deadlock through a lock of {own.worker}{seems}: who holds"
            title += f" it ({lock_of(waits.threads[own])}) waits for what needs it."
        else:
            whom = f"{several(workers)} wait for each other" if len(workers) > 1 else f"{workers[0]} waits for itself"
            kind, title = "deadlock", f"Deadlock{seems}: {whom}."
        details: list[str] = []
        for node, edge in zip(lot, edges, strict=True):
            details += self._link(node, edge)
        for name in slots:
            details.append(self._on_slots(name))
        return self._made(kind, workers, title, details, [], circle=lot)

    def _link(self, node: Node, edge: Edge) -> list[str]:
        """What is said of one part of a circle."""
        if isinstance(node, Task) and edge.why == "lock":
            held = self._names.who(edge.to) if isinstance(edge.to, Task) else ""
            sentence, *lines = self._names.waiting(node)
            return [f"{sentence}, which {held.rstrip(',')} holds, it seems", *lines]
        if isinstance(node, Task) and edge.why == "call":
            return []  # the call itself says it
        if isinstance(node, Whole | Share):
            return []
        sentence, *lines = self._names.waiting(node)
        behind = f"{self._names.function(edge.to)} on {edge.to.to}" if isinstance(edge.to, Call) else ""
        seems = {
            "value": f", a value that {behind} is to make, it seems",
            "turn": f", and {behind} goes first, it seems",
            "future": f", and waits for {behind}, it seems",
        }
        return [sentence + seems.get(edge.why, ""), *lines]

    def _on_slots(self, name: str) -> str:
        account = self._waits.accounts[name]
        return (
            f"{name} runs {plural(account['slots'], 'call')} at once (num_worker_threads). Waits of rpc_sync and "
            "of a call's future give a slot back; loops and waits of other kinds keep it"
        )

    # Ends.

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
            gone = {each for account in waits.accounts.values() for each in account["gone"]}
            known = {each for account in waits.accounts.values() for each in account["members"]}
            return "gone" if name in gone else "silent" if name in known else "unknown"
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
        workers = sorted({_worker(node) for node in lot})
        if isinstance(first, Task):
            return self._end_in_thread(kind, first, [node for node in lot if isinstance(node, Task)])
        if isinstance(first, Call):
            return self._made(kind, [first.to], *self._end_in_call(kind, first, len(lot)), lot)
        if isinstance(first, Whole):
            return self._end_in_worker(kind, first)
        title = f"A backward pass waits for {several(workers)}, where no thread is at it, it seems."
        return self._made(kind, workers, title, self._worker_does(first.worker), lot)

    def _end_in_thread(self, kind: str, first: Task, lot: list[Task]) -> Finding:
        waits, names = self._waits, self._names
        thread = waits.threads[first]
        workers = sorted({task.worker for task in lot})
        call = waits.serves.get(first)
        age = lasting(names.age(first))
        doing = names.doing(thread)
        shorts = waits.awaits[first]
        if shorts:
            doing = f"makes one short call after another, now {names.function(shorts[0])} on {shorts[0].to}"
        at = thread["at"]
        run = f"runs {names.function(call)}" if call else f"is in {at['function']}" if at else "is at it"
        subject = first.worker if call is not None or thread["name"] == "MainThread" else names.who(first)
        if len(lot) > 1:
            subject = f"{several(workers)}: {len(lot)} threads {run.replace('runs', 'run').replace('is in', 'are in')}"
            title = f"{subject}{age}, and each {doing}."
        else:
            title = f"{subject} {run}{age}, and {doing}."
        details = lines_of(thread)
        if kind == "lock":
            return self._made(kind, workers, *self._lock(first, title, details), lot)
        if kind == "value":
            title = f"A value is not made, it seems: {title}"
        elif kind == "backward":
            title = f"A backward pass waits for user code on {several(workers)}: {title}"
        elif kind == "shutdown":
            return self._shutdown(first, details)
        return self._made(kind, workers, title, details, lot)

    def _lock(self, holder: Task, title: str, details: list[str]) -> tuple[str, list[str]]:
        sources = [source for source, edge in self._into[holder] if edge.why == "lock"]
        takers = [source for source in sources if isinstance(source, Task)]
        if not takers:
            lock = lock_of(self._waits.threads[holder])
            return (
                f"{self._names.who(holder).rstrip(',')} waits for a lock ({lock}); who holds it is not seen.",
                details,
            )
        lock = lock_of(self._waits.threads[takers[0]])
        waiting = f"{len(takers)} threads of {holder.worker} wait" if len(takers) > 1 else ""
        waiting = waiting or f"{self._names.who(takers[0])} waits"
        return f"{waiting} for a lock ({lock}) that another thread holds, it seems: {title}", details

    def _shutdown(self, main: Task, details: list[str]) -> Finding:
        """One has not called it. Where it is at work, the others may well be its servers: no hang."""
        waits = self._waits
        thread = waits.threads[main]
        at_work = waits.awaits[main] or thread["wait"] is not None or standing(thread) == BUSY
        dynamic = waits.accounts[main.worker]["size"] is None
        doing = self._names.doing(thread)
        title = f"{main.worker} has not called shutdown, for which others wait: its main thread {doing}."
        return self._made("shutdown", [main.worker], title, details, [main], NOTE if at_work or dynamic else None)

    def _end_in_call(self, kind: str, call: Call, count: int) -> tuple[str, list[str]]:
        name, age = self._names.function(call), lasting(self._names.age(call))
        calls = f"{count} calls of {name} on {call.to} have" if count > 1 else f"{name} on {call.to} has"
        if kind == "underway":
            phase = self._waits.accounts[call.to]["phase"]
            return (
                f"{call.to} knows nothing of a call of {name} that {call.caller} made{age.replace(', for', '')} ago.",
                [
                    f"{call.to} answers (it is {phase}): it seems that the call has not arrived, since no connection "
                    "can be made, or that its answer is still on its way"
                ],
            )
        if kind == "turn":
            return f"{calls} not begun to run{age}, though slots are free: it is not its turn, it seems.", []
        if kind == "value":
            return (
                f"{call.caller} wants a value of {call.to} that is not made{age}, and nothing there seems to make it.",
                [],
            )
        if kind == "unfinished":
            return f"{calls} returned a future or a coroutine that does not end{age}.", [
                f"{call.to} knows of no call of its own that this waits for: a future was never set, it seems, or the "
                "coroutine awaits something else"
            ]
        return f"{calls} not ended{age}; which thread runs it is not known.", []

    def _end_in_worker(self, kind: str, whole: Whole) -> Finding:
        name = whole.name
        if kind == "silent":
            why = self._waits.sight.silent.get(name, "nothing is known of it")
            return self._made(kind, [name], f"{name} does not answer: {why}.", [], [whole])
        if kind == "gone":
            why = next(a["gone"][name] for a in self._waits.accounts.values() if name in a["gone"])
            return self._made(kind, [name], f"{name} is gone ({why}), and others still wait for it.", [], [whole])
        if kind == "unknown":
            title = f"{name} is waited for, and no worker of that name has joined."
            return self._made(kind, [name], title, self._who_is_there(), [whole])
        leaving = self._waits.accounts[name]["phase"] == LEAVING
        title = f"{name} has {'called shutdown' if leaving else 'not called shutdown'}, and others wait for it."
        return self._made(kind, [name], title, self._worker_does(name), [whole], NOTE if leaving else None)

    def _who_is_there(self) -> list[str]:
        return [f"These have: {several(sorted(self._waits.accounts))}"]

    def _worker_does(self, name: str) -> list[str]:
        main = self._waits.main(name)
        return self._names.waiting(main) if main is not None and main in self._waits.threads else []

    # What several threads make together.

    def _slots(self, slots: Slots) -> Finding:
        waits, names = self._waits, self._names
        name = slots.worker
        holders = waits.holders(name)
        ends = [task for task in holders if not waits.next(task)]
        oldest = max((names.age(task) for task in holders), default=0.0)
        queued = waits.queues[name]
        title = f"All {plural(waits.accounts[name]['slots'], 'slot')} of {name} are taken by calls that run long"
        title += f" (for {seconds(oldest)})" if oldest else ""
        title += f": {plural(queued, 'call')} wait{'s' if queued == 1 else ''} for one."
        details = []
        for lot in self._alike(list(ends)).values():
            tasks = [task for task in lot if isinstance(task, Task)]
            thread = waits.threads[tasks[0]]
            functions = counted(names.function(waits.serves[task]) for task in tasks)
            details += [f"{functions}: {DOES[standing(thread)]}{lasting(names.age(tasks[0]))}", *lines_of(thread)]
        return self._made("slots", [name], title, [*details, self._on_slots(name)], [slots, *ends])

    def _gathering(self, gathering: Gathering) -> Finding:
        waits = self._waits
        thread = waits.threads[gathering.tasks[0]]
        parties, absent = several(gathering.parties), several(gathering.absent)
        verb = "have" if len(gathering.absent) > 1 else "has"
        title = f"{absent} {verb} not come, it seems, to where {parties} wait for all."
        details = [f"{parties} stand at the same line:", *lines_of(thread)]
        for name in gathering.absent:
            details += self._worker_does(name) or [f"{name} stands at no line of the program: it is idle"]
        return self._made(
            "barrier", gathering.absent, title, details, gathering.tasks, None if gathering.certain else NOTE
        )

    def _without_room(self) -> list[Task]:
        return [
            task
            for task in self.starts
            if isinstance(task, Task) and (self._waits.threads[task]["wait"] or {"what": ""})["what"] == "room"
        ]

    def _room(self, task: Task) -> Finding:
        to = (self._waits.threads[task]["wait"] or {"on": []})["on"]
        flying = sum(out["to"] in to for out in self._waits.accounts[task.worker]["calls_out"])
        title = (
            f"{task.worker} has as many calls in flight to {several(to)} as may be ({flying:,} are told of), and waits."
        )
        hint = f"{several(to)} answers more slowly than {task.worker} calls: wait for some calls before making more"
        return self._made("room", [task.worker], title, [*self._names.waiting(task), hint], [task])


def _worker(node: Node) -> str:
    return node.caller if isinstance(node, Call) else node.name if isinstance(node, Whole) else node.worker
