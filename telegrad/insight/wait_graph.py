"""The graph of waits of a group: which call, thread or worker waits for which. No I/O.

An edge points from a node to the node it waits for. Some edges are guesses, from the line that a thread executes. A
node without edges is the cause of all waits that lead to it, and a cycle is a deadlock.
"""

# Workers report facts only: calls with the threads that wait for them or run them, the lines of threads, waits of this
# package. A call is identified by its caller, its number and its callee, so the reports of both sides fit together. A
# wait that no worker knows, such as for a lock, is guessed from the line of the thread. A guess needs evidence, because
# a wrong holder of a lock misleads more than an unknown one. The reports are not of the same moment: a node may be
# missing in one of them.

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from telegrad import reporting as states
from telegrad.insight.history import GroupSnapshot
from telegrad.reporting import CallIn, CallOut, PassOut, ThreadState, WorkerState

CALL, THREAD = "call", "thread"
SLOTS = "slots"  # the wait until one of a worker's slots is free
PASS = "pass"  # a backward pass that a worker drives
WORK = "work"  # a worker's part in backward passes
WORKER = "worker"  # the wait until a worker joins, answers or leaves; its name may be "rank 2" if unknown

GATHER = "_all_gather"  # programs for torch.distributed.rpc call it before shutdown
MOST_GUESSES = 16  # maximum number of guessed edges of one node
# Waits in which a thread holds neither a lock nor a slot.
AT_REST = ("shutdown", "serve", *states.JOINS, states.BEGIN)
# Waits that name the missing workers.
_FOR_WORKERS = ("shutdown", "rendezvous_again", states.MOVES, "workers", "value", GATHER)
_LOCK = re.compile(r"\bwith (?P<with>[\w.\[\]'\"]+)(?: as \w+)?\s*[:,]|(?P<name>[\w.\[\]'\"]+)\.acquire\(")
# The innermost frame of a thread that waits for a lock of Python's library.
_LIBRARY_LOCK = re.compile(r"(?P<file><frozen importlib\._bootstrap>|\S*/logging/__init__\.py):\d+ (acquire|handle)$")
_OF_LOCKS = re.compile(r"/threading\.py:|/asyncio/locks\.py:\d+ acquire")
_WITHIN = re.compile(r"\.(join|result|get)\(")  # may wait for another thread of the program
_WAITS_FOR_FUTURES = re.compile(r"wait_all|\.wait\(|\.result\(|\.done\(|\bawait\b|collect_all")
_AUTOGRAD = re.compile(r"(^|/)(torch|telegrad)/autograd/")
_PIPELINE = re.compile(r"(^|/)telegrad/pipeline/")
_OF_PIPELINE = " of a Pipeline"  # in the names of calls that run a batch
_OF_VALUES = re.compile(r"^(to_here|future)\(\) of a reference")


class Node(NamedTuple):
    kind: str
    worker: str  # the worker that waits; for a call the caller
    number: int = 0  # of a call, a thread or a pass
    to: str = ""  # for a call: the callee
    context: int = 0  # for a pass: the autograd context


class Edge(NamedTuple):
    to: Node
    why: str  # "call", "runs", "slots", "turn", "value", "future", "lock", "pass", "shutdown", "room", ...
    guess: bool = False


def search(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> dict[Node, Node | None]:
    """Return all nodes reachable from the starts, including them, nearest first, each with its predecessor."""
    found: dict[Node, Node | None] = dict.fromkeys(starts)
    ahead = list(found)
    for node in ahead:
        for after in following(node):
            if after not in found:
                found[after] = node
                ahead.append(after)
    return found


class GroupIndex:
    """The threads and calls of a group, by node."""

    def __init__(self, sight: GroupSnapshot) -> None:
        self.sight = sight
        self.accounts: dict[str, WorkerState] = {account["worker"]: account for account in sight.accounts}
        self.gone = {
            name: why.removeprefix(f"worker {name!r} ")
            for account in sight.accounts
            for name, why in account["gone"].items()
            if name not in self.accounts  # else it was restarted
        }
        self.threads: dict[Node, ThreadState] = {}
        self.threads_of: dict[str, list[Node]] = defaultdict(list)  # by worker
        self.mains: dict[str, Node] = {}
        self.calls_out: dict[Node, CallOut] = {}
        self.calls_of: dict[str, list[Node]] = defaultdict(list)  # by caller
        self.calls_in: dict[Node, CallIn] = {}
        self.passes: dict[Node, PassOut] = {}
        self.serves: dict[Node, Node] = {}  # the call that a thread runs
        self.awaits: dict[Node, list[Node]] = defaultdict(list)  # the calls that a thread waits for
        self.waiters: dict[Node, Node] = {}  # the thread that waits for a call, if known
        self.unattended: dict[str, list[Node]] = {}  # by caller, calls for which no thread waits; oldest first
        for me, account in self.accounts.items():
            for thread in account["threads"]:
                node = Node(THREAD, me, thread["number"])
                self.threads[node] = thread
                self.threads_of[me].append(node)
                if thread["name"] == "MainThread":
                    self.mains[me] = node
            for each in account["passes"]:
                self.passes[Node(PASS, me, each["number"], context=each["context"])] = each
            for out in account["calls_out"]:
                call = Node(CALL, me, out["number"], out["to"])
                self.calls_out[call] = out
                self.calls_of[me].append(call)
                if out["thread"] is not None:
                    waiter = Node(THREAD, me, out["thread"])
                    self.awaits[waiter].append(call)
                    if waiter in self.threads:
                        self.waiters[call] = waiter
            for came in account["calls_in"]:
                call = Node(CALL, came["caller"], came["number"], me)
                self.calls_in[call] = came
                if came["thread"] is not None:
                    self.serves[Node(THREAD, me, came["thread"])] = call
            alone = [call for call in self.calls_of[me] if self.calls_out[call]["thread"] is None]
            self.unattended[me] = sorted(alone, key=self.age, reverse=True)
        self.own = [node for node, thread in self.threads.items() if not thread.get("foreign")]

    def came(self, name: str, *states: str) -> list[Node]:
        """Return the incoming calls of a worker that are in one of these states."""
        calls = self.accounts[name]["calls_in"]
        return [Node(CALL, call["caller"], call["number"], name) for call in calls if call["state"] in states]

    def queued(self, name: str) -> int:
        return states.counts(self.accounts[name]["calls_in"], lambda call: call["state"])[states.QUEUED]

    def holders(self, name: str) -> list[Node]:
        """Return the threads that hold a slot; a thread that waits for a call has released its slot."""
        runs = (Node(THREAD, name, self.calls_in[call]["thread"] or 0) for call in self.came(name, states.RUNNING))
        return [each for each in runs if each in self.threads and not self.awaits[each] and not self.wait(each)]

    def wait(self, thread: Node | None) -> str:
        """Return the kind of a thread's wait, except waits for calls; empty if there is none."""
        return wait["what"] if thread is not None and (wait := self.threads[thread]["wait"]) is not None else ""

    def age(self, node: Node) -> float:
        """Return the seconds that a node has waited; 0 if unknown."""
        if node.kind == CALL:
            call = self.calls_out.get(node) or self.calls_in.get(node)
            return call["age"] if call is not None else 0.0
        if node.kind not in (PASS, THREAD):
            return 0.0
        account = self.accounts[node.worker]
        wait = self.threads[node]["wait"] if node.kind == THREAD else None
        if wait is not None and wait.get("age"):
            return wait["age"]
        if node.kind == PASS or self.wait(node) == "backward":
            return max((each["age"] for each in account["passes"]), default=0.0)
        if wait is not None and wait["what"] in ("shutdown", *states.JOINS):
            return account["phase_age"]
        if wait is not None and wait["what"] == "room":
            return max((out["age"] for out in account["calls_out"] if out["to"] in wait["on"]), default=0.0)
        return self.calls_in[self.serves[node]]["age"] if node in self.serves else 0.0

    def function(self, call: Node) -> str:
        """Return the function of a call. The callee's name is preferred, because it is more specific after decoding."""
        known = (self.calls_in.get(call), self.calls_out.get(call))
        names = [each["function"] for each in known if each is not None and each["function"]]
        return next((name for name in names if not name.startswith("telegrad.")), names[0] if names else "a call")


class WaitGraph(GroupIndex):
    """The nodes that have waited for `long` seconds, and all nodes they wait for."""

    # A wait shorter than half that time is ignored, because it is probably temporary.

    def __init__(self, sight: GroupSnapshot, long: float) -> None:
        super().__init__(sight)
        self.long, self._young = long, long / 2
        self._edges: dict[Node, list[Edge]] = {}
        # Before the first use of `edges`, which needs it for threads in shutdown.
        self._late = self._not_in_shutdown()
        self.starts = self._long_waits()
        self.nodes = search(self.starts, lambda node: [edge.to for edge in self.edges(node)])
        self.into: dict[Node, list[tuple[Node, Edge]]] = defaultdict(list)
        for node in self.nodes:
            for edge in self.edges(node):
                self.into[edge.to].append((node, edge))

    def edges(self, node: Node) -> list[Edge]:
        found = self._edges.get(node)
        if found is None:
            found = self._edges[node] = self._direct(node) or self._to_holders(node)
        return found

    def waiting_for(self, nodes: Collection[Node]) -> list[Node]:
        """Return the nodes that have waited for long for one of these, nearest first."""
        found = search(nodes, lambda node: [source for source, _ in self.into[node]])
        long = set(self.starts)
        return [each for each in found if each in long or (each.kind == CALL and self.age(each)) or self.joined(each)]

    def cycles(self) -> list[list[Node]]:
        """Return the cycles of nodes that wait for each other, each by its shortest path."""
        # One free slot is enough, so a worker's slots are blocked only if all threads that hold them are.
        #
        # First all nodes are removed that have a way out: a node without an edge to a blocked node, and slots of which
        # one holder is not blocked. Removing a node may free others, so this repeats until none is free. The nodes that
        # are left cannot go on: they are those of deadlocks, and those that wait for these.
        blocked = dict.fromkeys(self.nodes)

        def following(node: Node) -> list[Node]:
            return [edge.to for edge in self.edges(node) if edge.to in blocked]

        while True:
            free = [
                node
                for node in blocked
                if not (after := following(node)) or (node.kind == SLOTS and len(after) < len(self.edges(node)))
            ]
            if not free:
                break
            for node in free:
                del blocked[node]
        found = []
        while blocked:
            start = next(iter(blocked))
            # `search` goes by breadth, so the way from `start` back to itself is a shortest one. The nodes that `start`
            # reaches and that reach it are removed with it, because they belong to the same deadlock. A node that only
            # leads to a cycle does not reach itself, and is removed alone.
            before = search(following(start), following)
            way, lot = [start], {start}
            if start in before:
                while (node_before := before[way[-1]]) is not None:
                    way.append(node_before)
                found.append([start, *reversed(way[1:])])
                lot |= before.keys() & search([start], lambda node: [source for source, _ in self.into[node]]).keys()
            for node in lot & blocked.keys():
                del blocked[node]
        return found

    # Long waits

    def _long_waits(self) -> list[Node]:
        # Calls of workers that do not answer are known from their callees only.
        strangers = (call for call in self.calls_in if call.worker not in self.accounts)
        calls = [call for call in (*self.calls_out, *strangers) if self.age(call) >= self.long]
        threads = [thread for thread in self.own if not self.awaits[thread] and self._is_long(thread)]
        # A pass for which a thread waits is reached from that thread, and shown below it. `backward_async` has passes
        # without one.
        waited_for = {edge.to for thread in threads for edge in self.edges(thread)}
        passes = [node for node, each in self.passes.items() if node not in waited_for and each["age"] >= self.long]
        return [*calls, *threads, *passes]

    def _is_long(self, node: Node) -> bool:
        """Return True if a thread has waited for long, or if the age of its wait cannot be known."""
        thread, age = self.threads[node], self.age(node)
        wait = thread["wait"]
        if wait is not None:
            # A thread that serves, or that joins, is no start: the former waits for no worker, and `report.joining`
            # examines the workers that join.
            known = age or "age" in wait or wait["what"] in ("backward", "shutdown", "room")
            return wait["what"] not in ("serve", *states.JOINS) and (age >= self.long or not known)
        edges = (edge for each in search([node], self.joined) for edge in self.edges(each))
        calls = (edge.to for edge in edges if edge.why in ("future", "call"))
        if node not in self.serves and any(self.age(call) >= self.long for call in calls):
            return True
        return lock_of(thread) is not None and (not age or age >= self.long)

    def joined(self, node: Node) -> list[Node]:
        """Return the threads for which a thread waits, as far as its stack shows them."""
        return [edge.to for edge in self.edges(node) if edge.why == "thread" and not edge.guess]

    # Edges

    def _direct(self, node: Node) -> list[Edge]:
        """Return the edges of a node, except those to lock holders."""
        if (of := {CALL: self._of_call, THREAD: self._of_thread, PASS: self._of_pass}.get(node.kind)) is not None:
            return of(node)
        if node.kind == SLOTS:
            return [Edge(thread, "slots") for thread in self.holders(node.worker)]
        if node.kind == WORK:
            return [Edge(thread, "pass") for thread in self._inside(node.worker, _AUTOGRAD)]
        return self._of_worker(node.worker)

    def _of_call(self, call: Node) -> list[Edge]:
        callee, came = self.accounts.get(call.to), self.calls_in.get(call)
        if callee is None:
            return [Edge(Node(WORKER, call.to), "call")]
        is_full = callee["busy"] >= callee["slots"]
        # Of many similar calls the callee lists only some (`reporting.listed`). A call that it does not list is taken
        # to be queued if others of the same caller are; otherwise it is under way.
        if came is None:
            queued = (each["caller"] for each in callee["calls_in"] if each["state"] == states.QUEUED)
            return [Edge(Node(SLOTS, call.to), "slots")] if is_full and call.worker in queued else []
        if came["state"] == states.QUEUED:
            return [Edge(Node(SLOTS, call.to), "slots")] if is_full else _guesses("turn", self._ahead_of(call))
        if came["thread"] is not None and (thread := Node(THREAD, call.to, came["thread"])) in self.threads:
            return [Edge(thread, "runs")]
        for thread in self.threads_of[call.worker]:  # in a meeting the caller knows the missing workers
            wait = self.threads[thread]["wait"]
            if wait is not None and wait["what"] in states.MEETINGS and wait["about"] == came["function"]:
                return [Edge(thread, "meeting")]
        if self.is_fetch(call):
            return _guesses("value", self._makers(call))
        if _OF_PIPELINE in came["function"]:
            return self._to_stages(call)
        return _guesses("future", self._unattended(call.to, call)) if came["state"] != states.RUNNING else []

    def _of_thread(self, node: Node) -> list[Edge]:
        thread, me = self.threads[node], node.worker
        wait, at, what, served = thread["wait"], thread["at"], self.wait(node), self.serves.get(node)
        if what in states.MEETINGS:
            return []  # a rule examines the threads of all workers together
        if calls := [call for call in self.awaits[node] if self.age(call) >= self._young]:
            return [Edge(call, "call") for call in calls]
        joined = [Edge(Node(THREAD, me, number), "thread") for number in thread.get("awaits", [])]
        if wait is None and (known := [edge for edge in joined if edge.to in self.threads]):
            return known
        # User code waits for something that Telegrad does not know: perhaps for the future of a call, or for another
        # thread of the program. A coroutine also needs its event loop.
        if thread["name"] == states.COROUTINE:
            futures = _guesses("future", self._unattended(me, served) if wait is None else [])
            return futures + [Edge(each, "loop", wait is None) for each in self._blocked_loop(me)]
        if wait is None:
            text = at["text"] if at is not None else ""
            within = _WITHIN.search(text) and _OF_LOCKS.search("".join(thread["stack"][-1:]))
            futures = _guesses("future", self._unattended(me, served) if _WAITS_FOR_FUTURES.search(text) else [])
            return futures or _guesses("thread", self._aside(node) if within else [])
        if what == "backward":
            passes = [each for each in self.passes if each.worker == me]
            return [Edge(each, "pass") for each in passes or [Node(WORK, name) for name in wait["on"]]]
        # A reference of this worker has no value yet. The call that is to create it is one of those that run here.
        if what == "value" and set(wait["on"]) <= {me}:
            return [Edge(call, "value", True) for call in self.came(me, states.RUNNING) if call != served]
        if what == "room":
            out = ([call for call in self.calls_of[me] if call.to == to] for to in wait["on"])
            return [Edge(max(calls, key=self.age), "room") for calls in out if calls]
        if what == "future" and wait["on"]:  # the reader of a stream, which perhaps waits, too
            readers = [self.mains[name] for name in wait["on"] if name in self.mains]
            return [Edge(reader, "read", True) for reader in readers if self.awaits[reader]]
        # "future", and waits that are announced to users under the name of a function.
        if what not in (*_FOR_WORKERS, *AT_REST):
            return _guesses("future", self._unattended(me, served)) or _guesses("thread", self._aside(node))
        on = wait["on"] or (self._still_there(me) if what == "shutdown" else [])
        return [Edge(Node(WORKER, name), what) for name in on if name != me]

    def _of_pass(self, node: Node) -> list[Edge]:
        """Return the edges of a pass to the workers that run code in it; the others may be waiting for these."""
        owing = self.passes[node]["owing"]
        silent = [name for name in owing if name not in self.accounts]
        busy = [name for name in owing if name in self.accounts and self._inside(name, _AUTOGRAD)]
        nodes = [Node(WORKER, name) for name in silent]
        return [Edge(each, "pass") for each in nodes + [Node(WORK, each) for each in busy or ([] if silent else owing)]]

    def _of_worker(self, name: str) -> list[Edge]:
        """Return the edges of a worker that should leave: its calls if only these delay it, else its main thread."""
        account = self.accounts.get(name)
        if account is None:
            return []
        if account["phase"] == states.LEAVING or self.wait(self.mains.get(name)) == "serve":
            calls = [*self.calls_of[name], *filter(self._is_old, self.came(name, states.RUNNING, states.UNFINISHED))]
            return [Edge(call, "shutdown") for call in calls if self.age(call) >= self._young]
        return [Edge(self.mains[name], "shutdown")] if name in self.mains else []

    def _still_there(self, me: str) -> list[str]:
        """Return the workers for which a worker in shutdown waits."""
        account = self.accounts[me]
        if account["missing"] or account["size"] is None:
            return account["missing"]
        return [name for name in self._late if name in account["members"] and name not in account["gone"]]

    def _not_in_shutdown(self) -> list[str]:
        """Return the members that have not called shutdown, or else those whose calls have not ended."""
        members = [name for name, account in self.accounts.items() if account["phase"] == states.MEMBER]
        leaving = (name for name, account in self.accounts.items() if account["phase"] == states.LEAVING)
        return [*members, *self.sight.silent] or [name for name in leaving if self._of_worker(name)]

    # Guesses

    def _ahead_of(self, call: Node) -> list[Node]:
        """Return the method calls that began: a call that waits despite free slots waits for its actor."""
        owner = _class_of(self.calls_in[call])
        begun = list(filter(self._is_old, self.came(call.to, states.RUNNING, states.UNFINISHED)))
        methods = [other for other in begun if _class_of(self.calls_in[other]).rpartition(".")[2][:1].isupper()]
        alike = [other for other in methods if _class_of(self.calls_in[other]) == owner]
        return alike or methods or begun

    def _makers(self, fetch: Node) -> list[Node]:
        """Return the calls that may make a value; mostly the fetching worker has made that call."""
        running = list(filter(self._is_old, self.came(fetch.to, states.RUNNING)))
        calls = (*running, *self.came(fetch.to, states.QUEUED))
        return [call for call in calls if call.worker == fetch.worker] or running

    def _is_old(self, came: Node) -> bool:
        return self.calls_in[came]["age"] >= self._young

    def _unattended(self, name: str, served: Node | None) -> list[Node]:
        """Return a worker's calls for which no thread waits, and which its call `served` can have made."""
        # A function cannot have made a call that is older than its own run.
        since = self.calls_in[served]["age"] + 0.1 if served is not None else float("inf")
        calls = [call for call in self.unattended[name] if self._young <= self.calls_out[call]["age"] <= since]
        if served is None or served.worker != name:
            return calls
        # A worker that calls itself: its outgoing calls contain `served` itself, for which no thread may wait. The
        # function does not wait for its own end. Numbers of calls to the same worker grow, so later ones can be of the
        # function.
        return [call for call in calls if call.to != name or call.number > served.number]

    def _aside(self, waiter: Node) -> list[Node]:
        """Return the threads that wait for calls, and those of this package that run user code outside of calls."""
        known = {*self.serves, waiter, self.mains.get(waiter.worker)}
        others = [each for each in self.threads_of[waiter.worker] if each not in known]
        return [each for each in others if self.awaits.get(each) or self.threads[each]["name"].startswith("telegrad-")]

    def _blocked_loop(self, name: str) -> list[Node]:
        """Return the thread of a worker's event loop, if it waits for a call or has not begun a coroutine for long."""
        known, late = self.threads_of[name], (each for each in self.threads_of[name] if self.wait(each) == states.BEGIN)
        loops = [each for each in known if self.threads[each]["name"] == states.EVENT_LOOP]
        held_up = [*late, *(call for each in loops for call in self.awaits[each])]
        return loops if any(self.age(each) >= self._young for each in held_up) else []

    def _to_stages(self, call: Node) -> list[Edge]:
        """Return the edges of a batch to the threads of busy stages, on any of its workers."""
        batch = {o for o, came in self.calls_in.items() if o.worker == call.worker and _OF_PIPELINE in came["function"]}
        at_it = [thread for name in sorted({other.to for other in batch}) for thread in self._inside(name, _PIPELINE)]
        return [Edge(thread, "stage") for thread in at_it if not batch & set(self.awaits[thread])]

    def _to_holders(self, node: Node) -> list[Edge]:
        """Return guessed edges from a thread that takes a lock to threads that may hold it."""
        lock, at = (lock_of(self.threads[node]), self.threads[node]["at"]) if node.kind == THREAD else (None, None)
        if lock is None or at is None:
            return []
        # The rules, from the strongest evidence to the weakest: a thread inside of a `with` of the same name, and among
        # these one that itself waits for this thread; a thread that waits for this one; a thread in code of the same
        # file.
        mine = self.threads[node].get("objects", {}).get(lock)
        others = [
            other
            for other in self.threads_of[node.worker]
            if (thread := self.threads[other])["at"] is not None and other != node
            if lock_of(thread) != lock and self.wait(other) not in AT_REST
            if f"{lock}.wait" not in thread["at"]["text"]  # it waits to be notified, without the lock
            if mine is None or thread.get("objects", {}).get(lock, mine) == mine  # it may lock another of that name
        ]
        inside = [each for each in (*others, node) if lock in self.threads[each].get("holds", [])]
        # Only this thread is inside of such a `with`: it seems to take a lock twice that is not reentrant.
        if inside == [node]:
            return _guesses("lock", inside)
        holders = [other for other in others if other in inside]
        # By `_direct` and not by `edges`, which would call this method for other threads at locks, and these for this
        # one.
        waiting = [
            other for other in others if node in search([other], lambda each: [edge.to for edge in self._direct(each)])
        ]
        library = _LIBRARY_LOCK.search("".join(self.threads[node]["stack"][-1:]))
        file = f"{library['file'] if library else at['file']}:"
        near = [other for other in others if any(frame.startswith(file) for frame in self.threads[other]["stack"])]
        guesses = [other for other in holders if other in waiting] or holders or waiting or near
        # If more threads than that could hold it, none is named.
        return _guesses("lock", guesses) if len(guesses) <= MOST_GUESSES else []

    def _inside(self, name: str, code: re.Pattern[str]) -> list[Node]:
        """Return the threads of a worker that run user functions called from code that matches a pattern."""
        threads = ((node, self.threads[node]) for node in self.threads_of[name] if not self.wait(node))
        return [node for node, one in threads if one["at"] is not None and any(map(code.search, one["stack"]))]

    def is_fetch(self, call: Node) -> bool:
        """Return True if a call fetches the value of a reference."""
        known = (self.calls_in.get(call), self.calls_out.get(call))
        return any(each is not None and _OF_VALUES.match(each["function"]) for each in known)


def _guesses(why: str, nodes: Sequence[Node]) -> list[Edge]:
    return [Edge(node, why, True) for node in nodes[:MOST_GUESSES]]


def _class_of(came: CallIn) -> str:
    """Return the class of a method, or the module of a function."""
    return came["function"].rpartition(".")[0]


def lock_of(thread: ThreadState) -> str | None:
    """Return the lock that a thread waits for, as its line names it; None if it takes none."""
    at = thread["at"]
    if at is None or thread["wait"] is not None or thread["asleep"] is False:
        return None
    if library := _LIBRARY_LOCK.search("".join(thread["stack"][-1:])):
        return "logging's" if "logging" in library["file"] else "Python's, for an import"
    # The line of the user's program may also call a function that blocks for another reason. It waits for the lock only
    # if the thread is in the line itself (a lock in C, which no coroutine awaits), or in the library's code for locks.
    found = _LOCK.search(at["text"])
    in_line = is_innermost(thread) and thread["name"] != states.COROUTINE
    here = in_line or not thread["stack"] or _OF_LOCKS.search(thread["stack"][-1])
    return (found["with"] or found["name"]) if found and here else None


def is_innermost(thread: ThreadState) -> bool:
    """Return True if no Python code runs below the line of the user's program."""
    at = thread["at"]
    return at is not None and bool(thread["stack"]) and thread["stack"][-1].startswith(f"{at['file']}:{at['line']} ")
