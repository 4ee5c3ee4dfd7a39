"""The rules that find causes in the graph of waits, and the text of each. No I/O.

A text says "it seems" if the cause was inferred from a line of the program, not from state that Telegrad has.
"""

# The order of the rules matters. Each rule claims the nodes that it explains, and `_ends`, which describes every node
# from which nothing leads on, leaves the claimed ones out. So threads at a barrier are reported once, with the worker
# that is missing there, and not again as threads that sleep.

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from telegrad.ext.feedback import plural
from telegrad.insight.phrases import (
    BUSY,
    DOES,
    FEW,
    LOCKED,
    NOTE,
    WEIGHTS,
    Finding,
    counted,
    doing,
    lasting,
    lines_of,
    seconds,
    several,
    stacks,
    thread_state,
    waiting,
    who,
)
from telegrad.insight.wait_graph import CALL, GATHER, SLOTS, THREAD, WORK, WORKER, Edge, Node, WaitGraph, lock_of
from telegrad.reporting import COROUTINE, LEAVING, MEETINGS, MOVES, QUEUED, RUNNING, ThreadState, counts

LULL = 60.0  # seconds that a worker may be idle and still counts as busy
# The action that a late worker has not done, by the kind of wait of the workers that wait for it.
_CALLED = {GATHER: "reached shutdown's _all_gather", "shutdown": "called shutdown"}
_CALLED |= dict.fromkeys(("rendezvous_again", MOVES), "called rendezvous_again")

_MEETS = re.compile(
    r"barrier|init_process_group|all_?reduce|all_?gather|reduce_scatter|all_to_all|broadcast|rendezvous|arrive|store\.(wait|get)"
    r"|\.wait(_for)?\(",
    re.I,
)


class Causes:
    """The rules, in their order: a node that is the cause of one finding cannot cause a later one."""

    def __init__(self, graph: WaitGraph) -> None:
        self._graph = graph
        self._causes: set[Node] = set()

    def find(self) -> Iterator[Finding]:
        for rule in (self._cycles, self._barriers, self._slots, self._ends, self._room):
            yield from rule()

    # Cycles

    def _cycles(self) -> Iterator[Finding]:
        graph = self._graph
        for nodes in graph.cycles():
            # The text begins with the call that has waited longest.
            oldest = max(range(len(nodes)), key=lambda at: graph.age(nodes[at]) * (nodes[at].kind == CALL))
            nodes = nodes[oldest:] + nodes[:oldest]
            links = [
                (node, next(edge for edge in graph.edges(node) if edge.to == after))
                for node, after in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
            ]
            # A call that is in the way of others holds its callee, and its caller need not be part of the circle.
            workers = sorted({edge.to.to if edge.why in ("turn", "value") else edge.to.worker for _, edge in links})
            seems = ", it seems" if any(edge.guess for _, edge in links) else ""
            details = [line for node, edge in links for line in self._link(node, edge)]
            full = [node.worker for node in nodes if node.kind == SLOTS]
            taker = next((node for node, edge in links if edge.why == "lock"), None)
            if full:
                kind, title = "slot deadlock", f"Deadlock through the slots of {several(full)}{seems}: the calls"
                title += " that hold them wait for calls that are queued for one."
                details += map(self._on_slots, full)
            elif taker is not None:
                lock, thread = lock_of(graph.threads[taker]), "a thread that needs it" if len(nodes) > 1 else "it, too"
                kind, title = "lock deadlock", f"Deadlock through a lock of {taker.worker}{seems}: the thread"
                title += f" that holds it ({lock}) waits for {thread}."
            else:
                whom = "wait for each other" if len(workers) > 1 else "waits for itself"
                kind, title = "deadlock", f"Deadlock{seems}: {several(workers)} {whom}."
            yield self._finding(kind, workers, title, details, nodes)

    def _link(self, node: Node, edge: Edge) -> list[str]:
        if node.kind in (WORKER, WORK) or (node.kind == THREAD and edge.why == "call"):  # the call's own line says it
            return []
        sentence, *lines = waiting(self._graph, node)
        if node.kind == THREAD and edge.why in ("lock", "loop") and edge.to != node:
            does = "holds, it seems" if edge.why == "lock" else "blocks"
            return [f"{sentence}, which {who(self._graph, edge.to).rstrip(',')} {does}", *lines]
        behind = f"{self._graph.function(edge.to)} on {edge.to.to}" if edge.to.kind == CALL else ""
        seems = {
            "value": f", a value that {behind} is to create, it seems",
            "turn": f", and {behind} goes first, it seems",
            "future": f", and waits for {behind}, it seems",
        }
        return [sentence + seems.get(edge.why, ""), *lines]

    # Workers that are missing where the others wait

    def _barriers(self) -> Iterator[Finding]:
        """Find threads in a meeting, which knows the missing workers, and threads that wait at the same line."""
        graph = self._graph
        meetings: dict[str, list[Node]] = defaultdict(list)
        lines: dict[tuple[str, int], list[Node]] = defaultdict(list)
        for node in graph.own:
            thread = graph.threads[node]
            at, wait = thread["at"], thread["wait"]
            if wait is not None and wait["what"] in MEETINGS and wait["age"] >= graph.long:
                meetings[wait["about"]].append(node)
            elif at is not None and not graph.awaits[node] and not graph.edges(node) and _meets(thread):
                lines[at["file"], at["line"]].append(node)
        for meeting, nodes in meetings.items():
            here = {node.worker for node in nodes}
            missing = {name for node in nodes for name in (graph.threads[node]["wait"] or {"on": []})["on"]} - here
            if missing:
                yield self._barrier(nodes, sorted(here), sorted(missing), meeting)
        for nodes in lines.values():
            calls = [graph.serves.get(node) for node in nodes]
            if max(graph.age(call) if call is not None else inf for call in calls) >= graph.long:
                yield from self._at_one_line(nodes)

    def _at_one_line(self, nodes: list[Node]) -> Iterator[Finding]:
        # Workers that meet by other means, such as a barrier of torch.distributed, tell Telegrad nothing. But most of
        # them are at one line, and a few are not. The meeting may also be an object of one worker, which the others
        # call: then all threads are on that worker, and the callers have arrived. That worker itself need not take
        # part.
        graph, hosts = self._graph, {node.worker for node in nodes}
        arrived = hosts
        if len(hosts) == 1:
            arrived = {graph.serves[node].worker if node in graph.serves else node.worker for node in nodes}
        # A worker that waits for one of these threads is not missing: they keep it from coming.
        held_up = {node.worker for node in graph.waiting_for(nodes)}
        missing = {*graph.accounts, *graph.gone, *graph.sight.silent} - arrived - held_up
        if len(missing) > 1:
            missing -= hosts
        # Two threads at one line are no meeting if many workers are elsewhere. A missing worker that computes may still
        # come, so it is a note.
        if len(arrived) >= 2 and 0 < len(missing) <= len(arrived) // 2:
            at_work = any(
                thread_state(graph.threads[graph.mains[name]]) == BUSY for name in missing & graph.mains.keys()
            )
            weight = NOTE if at_work and not held_up else None
            yield self._barrier(nodes, sorted(arrived), sorted(missing), "", weight)

    def _barrier(
        self, nodes: list[Node], arrived: list[str], missing: list[str], meeting: str, weight: int | None = None
    ) -> Finding:
        graph, there = self._graph, several(arrived)
        have, wait = "have" if len(missing) > 1 else "has", "wait" if len(arrived) > 1 else "waits"
        title = f"{several(missing)} {have} not arrived, it seems, where {there} {wait} for all workers."
        details = [f"{there} are at the same line:", *lines_of(graph.threads[nodes[0]])]
        if meeting:
            title = f"{several(missing)} {have} not arrived at {meeting}, where {there} {wait}."
            details = waiting(graph, nodes[0])
        for name in missing:
            if name in graph.sight.silent:
                details.append(f"{name} does not answer: {graph.sight.silent[name]}")
            elif name in graph.accounts:
                details += self._main_of(name) or [f"{name} runs no line of the program: it is idle"]
            elif name in graph.gone:
                details.append(f"{name} is no longer in the group: {graph.gone[name]}")
            # The waiting thread names it. No worker that has answered has it as a member any more, or yet.
            else:
                details.append(f"nothing is known about {name}")
        return self._finding("barrier", missing, title, details, nodes, weight)

    # Slots, and limits of calls in flight

    def _slots(self) -> Iterator[Finding]:
        graph = self._graph
        for node in graph.nodes:
            if node.kind != SLOTS or node in self._causes:
                continue
            name, holders = node.worker, graph.holders(node.worker)
            queued, oldest = graph.queued(name), max(map(graph.age, holders), default=0.0)
            how = f"by long-running calls (for {seconds(oldest)})"
            if oldest < graph.long:
                how = "by short calls, and more arrive than it can run"
            title = f"All {plural(graph.accounts[name]['slots'], 'slot')} of {name} are taken {how}"
            title += f": {plural(queued, 'call')} wait{'s' if queued == 1 else ''} for one."
            # Holders that wait for other nodes are no causes: the ends of their chains are findings of their own.
            ends, details = [each for each in holders if not graph.edges(each)], []
            for nodes in self._alike(ends).values():
                thread = graph.threads[nodes[0]]
                functions = counted(graph.function(graph.serves[each]) for each in nodes)
                does = f"{DOES[thread_state(thread)]}{lasting(graph.age(nodes[0]))}"
                details += [f"{functions}: {does}", *lines_of(thread)]
            yield self._finding("slots", [name], title, [*details, self._on_slots(name)], [node, *ends])

    def _on_slots(self, name: str) -> str:
        return (
            f"{name} runs {plural(self._graph.accounts[name]['slots'], 'call')} at once (num_worker_threads). Waiting "
            "in rpc_sync or for a call's future frees the slot; loops and other waits keep it"
        )

    def _room(self) -> Iterator[Finding]:
        graph = self._graph
        for node in graph.starts:
            if node.kind != THREAD or graph.wait(node) != "room":
                continue
            to = (graph.threads[node]["wait"] or {"on": []})["on"]
            out = counts(graph.accounts[node.worker]["calls_out"], lambda call: call["to"])
            title = f"{node.worker} has reached the limit of calls in flight to {several(to)}"
            title += f" ({sum(out[name] for name in to):,} are reported)."
            hint = f"{several(to)} answers more slowly than {node.worker} calls: wait for some calls before making more"
            yield self._finding("room", [node.worker], title, [*waiting(graph, node), hint], [node])

    # Ends of chains of waits

    def _ends(self) -> Iterator[Finding]:
        graph = self._graph
        ends = [node for node in graph.nodes if not graph.edges(node) and node not in self._causes]
        for (kind, _), nodes in self._alike(ends).items():
            first = max(nodes, key=graph.age)
            workers = sorted({node.worker for node in nodes})
            weight = None
            if first.kind == THREAD:
                title, details, weight = self._thread(kind, first, nodes)
                if kind == "wait" and (on := (graph.threads[first]["wait"] or {"on": []})["on"]):
                    workers = on
                    idle = {*on} - {each.worker for each in graph.waiting_for(nodes)}
                    details += [line for name in sorted(idle) for line in self._main_of(name)]
            elif first.kind == WORKER and kind == "shutdown":
                is_leaving = graph.accounts[first.worker]["phase"] == LEAVING
                serves = graph.wait(graph.mains.get(first.worker)) == "serve"
                state = "serves" if serves else f"has {'' if is_leaving else 'not '}called shutdown"
                title = f"{first.worker} {state}, and others wait for it."
                details, weight = self._main_of(first.worker), NOTE if is_leaving or serves else None
            elif first.kind in (CALL, WORKER):
                workers = [first.to or first.worker]
                title, *details = self._texts(kind, first, len(nodes))
            else:
                title = f"A backward pass waits for {several(workers)}, where no thread works on it, it seems."
                details = self._main_of(workers[0])
            yield self._finding(kind, workers, title, details, nodes, weight)

    def _alike(self, nodes: Iterable[Node]) -> dict[tuple[str, str], list[Node]]:
        """Group the nodes by kind of finding, and by what makes them one finding."""
        lots: dict[tuple[str, str], list[Node]] = defaultdict(list)
        for node in nodes:
            at = self._graph.threads[node]["at"] if node.kind == THREAD else None
            where = f"{node.to} {self._graph.function(node)}" if node.kind == CALL else repr(node)
            lots[self._kind(node), f"{at['file']}:{at['line']}" if at is not None else where].append(node)
        return lots

    def _kind(self, node: Node) -> str:
        graph = self._graph
        if node.kind == CALL:
            if (came := graph.calls_in.get(node)) is None:
                return "underway"
            ended = "value" if graph.is_fetch(node) else "unfinished"
            return {QUEUED: "turn", RUNNING: "busy"}.get(came["state"], ended)
        if node.kind == WORKER:
            if node.worker in graph.accounts and node.worker not in graph.sight.silent:
                return "shutdown"
            known = {name for account in graph.accounts.values() for name in account["members"]}
            is_lost = node.worker in graph.gone and node.worker not in graph.sight.silent
            return "gone" if is_lost else "silent" if node.worker in {*graph.sight.silent, *known} else "unknown"
        if node.kind != THREAD:
            return "slots" if node.kind == SLOTS else "backward"
        sources = (node, graph.serves.get(node))
        reasons = {edge.why for each in sources if each is not None for _, edge in graph.into[each]}
        for why, kind in (("lock", "lock"), ("loop", "loop"), ("value", "value"), ("pass", "backward")):
            if why in reasons:
                return kind
        if "shutdown" in reasons and node == graph.mains.get(node.worker):
            return "shutdown"
        if what := graph.wait(node):
            # With names, the thread waits for the reader of a stream, which may sleep.
            if what == "future" and not (graph.threads[node]["wait"] or {"on": []})["on"]:
                return "unfinished"
            return what if what in ("value", "backward") else "wait"
        return {LOCKED: "lock", BUSY: "busy"}.get(thread_state(graph.threads[node]), "asleep")

    def _texts(self, kind: str, node: Node, count: int) -> list[str]:
        """Return the title and details for calls or a worker, from which nothing leads on."""
        graph, to, worker, age = self._graph, node.to, node.worker, lasting(self._graph.age(node))
        function = graph.function(node)
        calls = f"{count} calls of {function} on {to} have" if count > 1 else f"{function} on {to} has"
        match kind:
            case "underway":
                title = f"{to} has no record of a call of {function} that {worker} made {seconds(graph.age(node))} ago."
                hint = f"{to} answers (it is {graph.accounts[to]['phase']}): it seems that the call has not arrived,"
                return [title, f"{hint} because no connection can be made, or that its answer is still on the way"]
            case "turn":
                return [f"{calls} not started{age}, although slots are free: other calls go first, it seems."]
            case "value":
                title = f"{worker} waits for a value of {to} that has not been created{age}; nothing there seems to"
                return [f"{title} create it."]
            case "unfinished":
                hint = f"{to} has no call of its own that this waits for: a future was never set, it seems, or the"
                title = f"{calls} returned a future or a coroutine that has not finished{age}."
                return [title, f"{hint} coroutine awaits something else"]
            case "busy":
                return [f"{calls} not finished{age}; the thread that runs it is not known."]
            case "silent":
                why = graph.sight.silent.get(worker, "nothing is known about it")
                return [f"{worker} does not answer: {why}."]
            case "gone":
                return [f"{worker} is no longer in the group ({graph.gone[worker]}), and others still wait for it."]
        title = f"Others wait for {worker}, and no worker of that name has joined."
        return [title, f"These workers have: {several(sorted(graph.accounts))}"]

    def _thread(self, kind: str, first: Node, nodes: list[Node]) -> tuple[str, list[str], int | None]:
        """Return the title and details for threads at the same line, and a weight if it differs from the kind's."""
        graph, thread = self._graph, self._graph.threads[first]
        at, age, does = thread["at"], lasting(graph.age(first)), doing(thread)
        details = lines_of(thread)
        if kind == "shutdown":
            return self._late(first)
        if short := graph.awaits[first]:
            does = f"makes one short call after another, now {graph.function(short[0])} on {short[0].to}"
        call = graph.serves.get(first)
        where = graph.function(call) if call is not None else f"in {at['function']}" if at is not None else "running"
        if len(nodes) > 1:
            workers, verb = several(sorted(node.worker for node in nodes)), "run" if call is not None else "are"
            title = f"{workers}: {self._counted(nodes)} {verb} {where}{age}, and each {does}."
        else:
            subject = first.worker if call is not None or thread["name"] == "MainThread" else who(graph, first)
            title = f"{subject} {'runs' if call is not None else 'is'} {where}{age}, and {does}."
        if ways := [edge for _, edge in graph.into[first] if edge.why == "thread"]:
            title = f"A thread waits for this one{', it seems' if all(way.guess for way in ways) else ''}: {title}"
        elif kind == "loop":
            title = f"The event loop of {first.worker} is blocked, it seems: {title}"
        elif kind == "value":
            title = f"A value has not been created, it seems: {title}"
        elif kind == "backward":
            title = f"A backward pass waits for user code on {several(node.worker for node in nodes)}: {title}"
        elif kind == "lock":
            takers = [node for node, edge in graph.into[first] if edge.why == "lock"]
            if not takers:
                owner = who(graph, first).rstrip(",")
                details += ["Perhaps this thread itself holds it, or no thread is left that releases it"]
                return f"{owner} waits for a lock ({lock_of(thread)}); its holder is not known.", details, None
            wait = f"{who(graph, takers[0])} waits"
            if len(takers) > 1:
                wait = f"{self._counted(takers)} of {first.worker} wait"
            lock = lock_of(graph.threads[takers[0]])
            kind = self._counted([first]).removeprefix("1 ")
            title = f"{wait} for a lock ({lock}) that another {kind} holds, it seems: {title}"
        return title, details, None

    def _counted(self, nodes: Sequence[Node]) -> str:
        are_coroutines = all(self._graph.threads[node]["name"] == COROUTINE for node in nodes)
        return plural(len(nodes), COROUTINE if are_coroutines else "thread")

    def _late(self, main: Node) -> tuple[str, list[str], int | None]:
        """Describe a worker that has not called shutdown. If it is busy, the others may just serve it: no hang."""
        graph, thread, account = self._graph, self._graph.threads[main], self._graph.accounts[main.worker]
        since = max((graph.age(node) for node in graph.threads if graph.wait(node) in _CALLED), default=0.0)
        reasons = {edge.why for _, edge in graph.into[Node(WORKER, main.worker)]}
        done = next((said for what, said in _CALLED.items() if what in reasons), "called shutdown")
        # The state is that of one moment, and a driver between two steps may be asleep. So a recent call, pass or step
        # counts as work as well. In a dynamic group, unlike an elastic one, workers do not wait for each other's
        # shutdown.
        at_work = graph.awaits[main] or thread["wait"] is not None or thread_state(thread) == BUSY
        if at_work or account["idle"] < min(since, LULL) or not (account["size"] or account["generation"]):
            title = f"{main.worker} is busy, and has not {done} yet; others have, and serve calls meanwhile."
            return f"{title} Its main thread {doing(thread)}.", lines_of(thread), NOTE
        title = f"{main.worker} has not {done}, for which others wait: its main thread {doing(thread)}."
        return title, lines_of(thread), None

    def _main_of(self, name: str) -> list[str]:
        main = self._graph.mains.get(name)
        return waiting(self._graph, main) if main is not None else []

    # Findings

    def _finding(
        self,
        kind: str,
        workers: list[str],
        title: str,
        details: list[str],
        causes: list[Node],
        weight: int | None = None,
    ) -> Finding:
        graph = self._graph
        self._causes.update(causes)
        # The nodes of a cycle are described in it. Otherwise a call that is a cause is listed among the waits, too,
        # because the line of its caller is there.
        in_circle = kind.endswith("deadlock")
        apart = {node for node in causes if node.kind != CALL or in_circle}
        stuck = [node for node in causes if in_circle and node.worker not in workers]
        waiters = [node for node in graph.waiting_for(causes) if node not in apart]
        threads = [node for node in causes if node.kind == THREAD]
        threads += filter(None, (node if node.kind == THREAD else graph.waiters.get(node) for node in waiters[:FEW]))
        return Finding(
            kind,
            WEIGHTS[kind] if weight is None else weight,
            list(dict.fromkeys(workers)),
            list(dict.fromkeys(node.worker for node in (*stuck, *waiters))),
            max(map(graph.age, (*causes, *waiters))),
            title,
            details + self._told(waiters),
            stacks(graph, threads),
        )

    def _told(self, waiters: Sequence[Node]) -> list[str]:
        """Describe a few of the waits in full, similar ones once, and name the workers of the others."""
        graph, alike = self._graph, defaultdict[object, list[Node]](list)
        for node in waiters:
            alike[self._key(node)].append(node)
        lots, details = list(alike.values()), list[str]()
        shown = len(lots) if len(lots) <= FEW + 1 else FEW
        for lot in lots[:shown]:
            oldest = max(lot, key=graph.age)
            count = len(lot) - 1 + sum(graph.calls_out[node].get("more", 0) for node in lot if node in graph.calls_out)
            names = [node.worker for node in lot if node is not oldest]
            which = f": {counted(names)}" if {*names} - {oldest.worker} else ""
            sentence, *lines = waiting(graph, oldest)
            details += [sentence + (f" (and {count:,} more like it{which})" if count else ""), *lines]
        rest = [node.worker for lot in lots[shown:] for node in lot]
        return details + ([f"and {len(rest):,} more wait for it: {counted(rest)}"] if rest else [])

    def _key(self, node: Node) -> object:
        """Return the key of similar waits: the target, and the line, or the worker if its line is unknown."""
        graph = self._graph
        waiter = node if node.kind == THREAD else graph.waiters.get(node)
        at = graph.threads[waiter]["at"] if waiter is not None else None
        where = (at["file"], at["line"]) if at is not None else node.worker
        if node.kind == THREAD:
            return doing(graph.threads[node]), where
        if node.kind == CALL:
            came = graph.calls_in.get(node)
            return node.to, graph.function(node), came is not None and came["state"] == QUEUED, where
        return node


def _meets(thread: ThreadState) -> bool:
    """Return True if a thread seems to wait at a line where several workers synchronize."""
    at = thread["at"]
    if at is None or thread["wait"] is not None or thread_state(thread) == BUSY:
        return False
    return _MEETS.search(at["text"]) is not None or _MEETS.search(at["function"]) is not None
