"""What is said of each kind of cause: a title, and what stands below it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from telegrad.insight.finding import NOTE
from telegrad.insight.gatherings import Gathering
from telegrad.insight.phrases import BUSY, DOES, Names, counted, lasting, lines_of, plural, seconds, several, standing
from telegrad.insight.waits import GATHER, Call, Edge, Node, Share, Slots, Task, Waits, Whole, lock_of, worker_of
from telegrad.witness.account import LEAVING, counts

LULL = 60.0  # seconds for which a worker may do nothing that is seen, and count as being at work


class Said(NamedTuple):
    title: str
    details: list[str]
    weight: int | None = None  # where it is not that of its kind


class Stories:
    def __init__(self, waits: Waits, names: Names, long: float) -> None:
        self._waits = waits
        self._names = names
        self._long = long

    # Circles.

    def slot_circle(self, lot: list[Node], edges: list[Edge]) -> Said:
        names = [node.worker for node in lot if isinstance(node, Slots)]
        title = f"Deadlock through the slots of {several(names)}{_seems(edges)}"
        title += ": the calls that have them wait for calls that are queued for one."
        return Said(title, [*self._round(lot, edges), *map(self._on_slots, names)])

    def lock_circle(self, lot: list[Node], edges: list[Edge]) -> Said:
        own = next(node for node, edge in zip(lot, edges, strict=True) if edge.why == "lock" and isinstance(node, Task))
        title = f"Deadlock through a lock of {own.worker}{_seems(edges)}: who holds it"
        title += f" ({lock_of(self._waits.threads[own])}) waits for what needs it."
        return Said(title, self._round(lot, edges))

    def circle(self, lot: list[Node], edges: list[Edge]) -> Said:
        workers = sorted({worker_of(node) for node in lot})
        whom = f"{several(workers)} wait for each other" if len(workers) > 1 else f"{workers[0]} waits for itself"
        return Said(f"Deadlock{_seems(edges)}: {whom}.", self._round(lot, edges))

    def _round(self, lot: list[Node], edges: list[Edge]) -> list[str]:
        return [line for node, edge in zip(lot, edges, strict=True) for line in self._link(node, edge)]

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

    def thread(self, kind: str, first: Task, lot: list[Task], takers: list[Task]) -> Said:
        """Threads that stand at one line; `takers` wait for a lock that they hold, it seems."""
        if kind == "shutdown":
            return self._late(first)
        title = self._at_it(first, lot)
        details = lines_of(self._waits.threads[first])
        if kind == "lock":
            title = self._lock(first, takers, title)
        elif kind == "value":
            title = f"A value is not made, it seems: {title}"
        elif kind == "backward":
            title = f"A backward pass waits for user code on {several(task.worker for task in lot)}: {title}"
        return Said(title, details)

    def _at_it(self, first: Task, lot: list[Task]) -> str:
        names = self._names
        thread, call = self._waits.threads[first], self._waits.serves.get(first)
        age, at, doing, shorts = names.age(first), thread["at"], names.doing(thread), self._waits.awaits[first]
        if shorts:
            doing = f"makes one short call after another, now {names.function(shorts[0])} on {shorts[0].to}"
        runs, where = ("runs", names.function(call)) if call else ("is", f"in {at['function']}" if at else "at it")
        if len(lot) > 1:
            many = {"runs": "run", "is": "are"}[runs]
            workers = several(sorted(task.worker for task in lot))
            return f"{workers}: {len(lot)} threads {many} {where}{lasting(age)}, and each {doing}."
        subject = first.worker if call is not None or thread["name"] == "MainThread" else names.who(first)
        return f"{subject} {runs} {where}{lasting(age)}, and {doing}."

    def _lock(self, holder: Task, takers: list[Task], title: str) -> str:
        if not takers:
            who = self._names.who(holder).rstrip(",")
            return f"{who} waits for a lock ({lock_of(self._waits.threads[holder])}); who holds it is not seen."
        waiting = f"{self._names.who(takers[0])} waits"
        if len(takers) > 1:
            waiting = f"{len(takers)} threads of {holder.worker} wait"
        lock = lock_of(self._waits.threads[takers[0]])
        return f"{waiting} for a lock ({lock}) that another thread holds, it seems: {title}"

    def _late(self, main: Task) -> Said:
        """One has not called shutdown. Where it is at work, the others may well be its servers: no hang."""
        thread, account = self._waits.threads[main], self._waits.accounts[main.worker]
        waits = {task: each["wait"]["what"] for task, each in self._waits.threads.items() if each["wait"] is not None}
        parting = [task for task, what in waits.items() if what in ("shutdown", GATHER)]
        since = max(map(self._names.age, parting), default=0.0)
        done = "come to shutdown's _all_gather" if GATHER in map(waits.get, parting) else "called shutdown"
        at_work = self._waits.awaits[main] or thread["wait"] is not None or standing(thread) == BUSY
        at_work = at_work or account["idle"] < min(since, LULL)
        title = f"{main.worker} has not {done}, for which others wait: its main thread {self._names.doing(thread)}."
        if at_work or account["size"] is None:
            title = (
                f"{main.worker} is at work, and has not {done} yet; others have, and serve meanwhile. Its main thread"
            )
            return Said(f"{title} {self._names.doing(thread)}.", lines_of(thread), NOTE)
        return Said(title, lines_of(thread))

    def call(self, kind: str, call: Call, count: int) -> Said:
        name, age = self._names.function(call), lasting(self._names.age(call))
        calls = f"{count} calls of {name} on {call.to} have" if count > 1 else f"{name} on {call.to} has"
        if kind == "underway":
            phase = self._waits.accounts[call.to]["phase"]
            ago = seconds(self._names.age(call))
            title = f"{call.to} knows nothing of a call of {name} that {call.caller} made {ago} ago."
            why = (
                f"{call.to} answers (it is {phase}): it seems that the call has not arrived, since no connection "
                "can be made, or that its answer is still on its way"
            )
            return Said(title, [why])
        if kind == "turn":
            return Said(f"{calls} not begun to run{age}, though slots are free: it is not its turn, it seems.", [])
        if kind == "value":
            title = f"{call.caller} wants a value of {call.to} that is not made{age}; nothing there seems to make it."
            return Said(title, [])
        if kind == "unfinished":
            why = (
                f"{call.to} knows of no call of its own that this waits for: a future was never set, it seems, or the "
                "coroutine awaits something else"
            )
            return Said(f"{calls} returned a future or a coroutine that does not end{age}.", [why])
        return Said(f"{calls} not ended{age}; which thread runs it is not known.", [])

    def worker(self, kind: str, name: str) -> Said:
        accounts = self._waits.accounts
        if kind == "silent":
            why = self._waits.sight.silent.get(name, "nothing is known of it")
            return Said(f"{name} does not answer: {why}.", [])
        if kind == "gone":
            return Said(f"{name} is gone ({self._waits.gone[name]}), and others still wait for it.", [])
        if kind == "unknown":
            there = f"These have: {several(sorted(accounts))}"
            return Said(f"{name} is waited for, and no worker of that name has joined.", [there])
        leaving = accounts[name]["phase"] == LEAVING
        title = f"{name} has {'called shutdown' if leaving else 'not called shutdown'}, and others wait for it."
        return Said(title, self._main_of(name), NOTE if leaving else None)

    def share(self, workers: list[str]) -> Said:
        title = f"A backward pass waits for {several(workers)}, where no thread is at it, it seems."
        return Said(title, self._main_of(workers[0]))

    def _main_of(self, name: str) -> list[str]:
        main = self._waits.main(name)
        return self._names.waiting(main) if main is not None else []

    # What several threads make together.

    def slots(self, name: str, holders: Sequence[Task], lots: Sequence[Sequence[Task]]) -> Said:
        """`lots`: of those that hold one, at each line."""
        names, queued = self._names, self._waits.queues[name]
        oldest = max((names.age(task) for task in holders), default=0.0)
        how = f"by calls that run long (for {seconds(oldest)})"
        if oldest < self._long:
            how = "by short calls, and more come than it can do"
        title = f"All {plural(self._waits.accounts[name]['slots'], 'slot')} of {name} are taken {how}"
        title += f": {plural(queued, 'call')} wait{'s' if queued == 1 else ''} for one."
        details = []
        for tasks in lots:
            thread = self._waits.threads[tasks[0]]
            functions = counted(names.function(self._waits.serves[task]) for task in tasks)
            details += [f"{functions}: {DOES[standing(thread)]}{lasting(names.age(tasks[0]))}", *lines_of(thread)]
        return Said(title, [*details, self._on_slots(name)])

    def gathering(self, gathering: Gathering) -> Said:
        parties, absent = several(gathering.parties), several(gathering.absent)
        verb = "have" if len(gathering.absent) > 1 else "has"
        waits = "wait" if len(gathering.parties) > 1 else "waits"
        title = f"{absent} {verb} not come, it seems, to where {parties} {waits} for all."
        details = [f"{parties} stand at the same line:", *lines_of(self._waits.threads[gathering.tasks[0]])]
        if gathering.meeting:
            title = f"{absent} {verb} not come to {gathering.meeting}, where {parties} {waits}."
            details = self._names.waiting(gathering.tasks[0])
        for name in gathering.absent:
            details += self._instead(name)
        return Said(title, details, None if gathering.certain else NOTE)

    def _instead(self, name: str) -> list[str]:
        """What one is at who has not come."""
        if name in self._waits.sight.silent:
            return [f"{name} does not answer: {self._waits.sight.silent[name]}"]
        if name not in self._waits.accounts:
            return [f"{name} is gone: {self._waits.gone[name]}"]
        return self._main_of(name) or [f"{name} stands at no line of the program: it is idle"]

    def room(self, task: Task) -> Said:
        to = (self._waits.threads[task]["wait"] or {"on": []})["on"]
        out = counts(self._waits.accounts[task.worker]["calls_out"], lambda call: call["to"])
        flying = sum(out[name] for name in to)
        title = f"{task.worker} has as many calls in flight to {several(to)} as may be ({flying:,} are told of)."
        hint = f"{several(to)} answers more slowly than {task.worker} calls: wait for some calls before making more"
        return Said(title, [*self._names.waiting(task), hint])


def _seems(edges: list[Edge]) -> str:
    return ", it seems" if any(edge.guess for edge in edges) else ""
