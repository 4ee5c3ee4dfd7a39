"""Findings, each one cause of waits in a group; phrases for times, names, lines, and waits. No I/O."""

import re
from collections import Counter
from collections.abc import Iterable
from math import isinf
from typing import NamedTuple

from telegrad.ext.feedback import plural
from telegrad.insight.wait_graph import CALL, GATHER, PASS, SLOTS, THREAD, WORK, Node, WaitGraph, is_innermost, lock_of
from telegrad.reporting import ASKS, BEGIN, COROUTINE, MEETINGS, MOVES, NEXT, QUEUED, CallOut, ThreadState, WaitState

NOTE = 10  # findings of this weight and below are not hangs

WEIGHTS = {
    "nobody": 100,  # no worker could be asked
    "silent": 95,  # a worker does not answer
    "deadlock": 90,
    "slot deadlock": 90,  # through the slots of a worker
    "lock deadlock": 88,  # through a lock, it seems
    "store": 85,  # no store is served
    "sizes": 85,  # the workers disagree about the group's size
    "missing": 80,  # workers have not joined
    "gone": 75,  # a lost worker that others still wait for
    "unknown": 75,  # no worker of that name ever joined
    "generations": 70,  # the workers belong to several generations of the group
    "barrier": 65,  # a worker has not come to a line where all others wait
    "lock": 60,  # held by another thread, it seems
    "loop": 60,  # the event loop of a worker is blocked, it seems
    "backward": 55,  # a pass waits for user code, or for a worker without a thread in it
    "value": 55,  # of a reference: the call that makes it does not end
    "slots": 50,  # all taken by long calls
    "unfinished": 50,  # a call returned a future or a coroutine that does not end
    "shutdown": 45,  # a worker does not call shutdown
    "busy": 40,  # a call runs for long
    "asleep": 40,  # a call makes no progress
    "underway": 40,  # a call, or its response, has not arrived
    "room": 35,  # the limit of calls in flight is reached
    "turn": 35,  # a call waits for its actor, or to start
    "wait": 30,  # for something else
}

FEW = 4  # waits or names that are listed individually
INDENT = "    "  # of a source line below the sentence about it
# Matches lines that may block: calls, attributes, items, and some statements. Any other line, such as `while True:`,
# can wait for nothing but the interpreter's lock. A thread in a loop, with another one that takes turns with it, is
# asleep in the kernel for much of the time, and counts as busy nevertheless.
_MAY_SLEEP = re.compile(r"\(|^$|\b(with|await|import|for|yield)\b|[\[.]")
_SLEEPS = re.compile(r"\bsleep\(")
_AWAITS_SLEEP = re.compile(r"/asyncio/tasks\.py:\d+ sleep$")
_INNER = ("/threading.py:", "/queue.py:", "/concurrent/futures/")
_OF_PROCESSES = re.compile(r"/multiprocessing/(connection|queues)\.py:|/subprocess\.py:|/popen_\w+\.py:\d+ poll$")

LOCKED, BUSY, SLEEPS, WAITS, AWAY, ASLEEP, UNKNOWN = "locked", "busy", "sleeps", "waits", "away", "asleep", "unknown"


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
    """Return text such as ", for 3 s"; empty if the age is unknown."""
    return "" if isinf(age) or age <= 0 else f", for {seconds(age)}"


def several(names: Iterable[str]) -> str:
    known, most = list(dict.fromkeys(names)), 2 * FEW
    if len(known) > most:
        known = [*known[: most - 1], plural(len(known) - most + 1, "other")]
    return " and ".join([", ".join(known[:-1]), known[-1]] if len(known) > 1 else known)


def counted(names: Iterable[str]) -> str:
    """Return text such as "worker1 (3), worker2"."""
    return several(f"{name} ({count})" if count > 1 else name for name, count in Counter(names).most_common())


def function_label(name: str) -> str:
    """Return the name of a function without its object: "to_here" of "to_here() of <RRef 1.2 on 'worker1'>"."""
    return name.partition("() of ")[0]


def lines_of(thread: ThreadState | None) -> list[str]:
    """Return the line that a thread executes, if it is known."""
    at = thread["at"] if thread is not None else None
    if at is None:
        return []
    return [f"{INDENT}{at['file']}:{at['line']} in {at['function']}" + (f": {at['text']}" if at["text"] else "")]


def thread_state(thread: ThreadState) -> str:
    """Return the state of a thread that is in no wait of this package."""
    text = thread["at"]["text"] if thread["at"] is not None else ""
    innermost = thread["stack"][-1] if thread["stack"] else ""
    # A lock first: such a line contains a call or a `with`, and would fit other rules as well.
    if lock_of(thread) is not None:
        return LOCKED
    if thread["asleep"] is False or (is_innermost(thread) and not _MAY_SLEEP.search(text)):
        return BUSY
    # The line of a coroutine may contain several awaitables, and shows not which of them it awaits.
    if _AWAITS_SLEEP.search(innermost) if thread["name"] == COROUTINE else _SLEEPS.search(text):
        return SLEEPS
    if any(map(_OF_PROCESSES.search, thread["stack"][-3:])):
        return AWAY
    if any(part in innermost for part in _INNER):
        return WAITS
    return ASLEEP if thread["asleep"] else UNKNOWN


DOES = {
    LOCKED: "waits for a lock",
    BUSY: "is busy now: it loops, it seems, or computes",
    SLEEPS: "sleeps",
    WAITS: "waits for something in its own process",
    AWAY: "waits for another process",
    ASLEEP: "sleeps, in a wait outside Telegrad",
    UNKNOWN: "has made no progress",
}


def who(group: WaitGraph, thread: Node) -> str:
    if (call := group.serves.get(thread)) is not None:
        return f"{thread.worker}, in {group.function(call)} for {call.worker},"
    name = group.threads[thread]["name"]
    return f"{thread.worker}'s main thread" if name == "MainThread" else f"{thread.worker}'s thread {name}"


def doing(thread: ThreadState) -> str:
    """Return what a thread waits for, or else does."""
    wait = thread["wait"]
    if wait is None:
        lock = lock_of(thread)
        return DOES[thread_state(thread)] + (f" ({lock})" if lock is not None else "")
    on = several(wait["on"])
    return {
        "shutdown": f"is in shutdown, and waits for {on or 'the others'}",
        "rendezvous_again": f"is in rendezvous_again, and waits for {on or 'the others'}",
        "serve": "serves the others",
        ASKS: "asks for this report",
        "init_rpc": f"joins the group, and waits for {on or 'the others'}",
        "store": "joins the group, and waits for the store",
        MOVES: f"moves to the next generation, and waits for {on or wait['about'] or 'the others'}",
        NEXT: f"waits for the next generation, while that of {on or 'others'} is running",
        "workers": f"waits for {on or wait['about'] or 'workers'} to join",
        "backward": f"waits for a backward pass{' to which ' + on + ' must contribute' if on else ''}",
        "future": f"waits for {wait['about'] or 'a future'}",
        BEGIN: "has not begun, and waits for its event loop",
        "value": f"waits for the value of a reference{', of ' + on if on else ''}",
        GATHER: f"is in _all_gather (shutdown calls it, too), and waits for {on or 'the others'}",
        "room": f"waits for room: the limit of calls in flight to {on} is reached",
    }.get(wait["what"]) or _announced(wait, on)


def _announced(wait: WaitState, on: str) -> str:
    """Describe a wait by its text for users, which may begin with the name of the function."""
    about = wait["about"].removeprefix(f"{wait['what']}: ") or "the others"
    of = f", of {on}" if not all(name in about for name in wait["on"]) else ""
    return f"waits {'for' if wait['what'] in MEETINGS else 'in ' + wait['what'] + ':'} {about}{of}"


def waiting(group: WaitGraph, node: Node) -> list[str]:
    """Return a sentence about a node that waits, and the line of the user's program."""
    if node.kind == THREAD and not group.wait(node) and (calls := group.awaits.get(node)):
        node = max(calls, key=group.age)
    age, queued = group.age(node), group.queued(node.worker) if node.kind == SLOTS else 0
    if node.kind == THREAD:
        thread = group.threads[node]
        guessed = not thread["wait"] and any(edge.why == "future" for edge in group.edges(node))
        does = "waits for calls, it seems" if guessed and thread_state(thread) == ASLEEP else doing(thread)
        if joined := group.joined(node):
            names = several(group.threads[each]["name"] for each in joined)
            does = f"waits for its thread{'s' * (len(joined) > 1)} {names}"
        return [f"{who(group, node)} {does}{lasting(age)}", *lines_of(thread)]
    if node.kind != CALL:
        verb = "waits" if queued == 1 else "wait"
        return [
            {
                PASS: f"{node.worker} drives a backward pass of context {node.context}{lasting(age)}",
                SLOTS: f"{plural(queued, 'call')} to {node.worker} {verb} for a free slot there",
                WORK: f"{node.worker} has gradients to compute",
            }.get(node.kind, node.worker)
        ]
    out, came = group.calls_out.get(node), group.calls_in.get(node)
    what = f"{group.function(node)} on {node.to}"
    where = ", where it is queued" if came is not None and came["state"] == QUEUED else ""
    if (waiter := group.waiters.get(node)) is not None:
        return [f"{who(group, waiter)} waits for {what}{lasting(age)}{where}", *lines_of(group.threads[waiter])]
    ago = f" {seconds(age)} ago" if age else ""
    alone = ", and no thread waits for it" if out is not None and not _is_awaited(group, node, out) else ""
    return [f"{node.worker} called {what}{ago}{where}{alone}"]


def _is_awaited(group: WaitGraph, call: Node, out: CallOut) -> bool:
    """Return True if something may wait for this call; a thread that waits for several waits for them one by one."""
    # A task of the program's event loop may wait for it.
    frames = (frame for thread in group.threads_of[call.worker] for frame in group.threads[thread]["stack"])
    own = (group.calls_out[each] for each in group.calls_of[call.worker])
    alike = any(each["thread"] is not None and each["function"] == out["function"] for each in own)
    return alike or bool(group.into.get(call)) or any("/asyncio/" in frame for frame in frames)


def stacks(group: WaitGraph, threads: Iterable[Node]) -> dict[str, list[str]]:
    known = {node: group.threads[node] for node in threads}
    return {f"{node.worker} {each['name']} ({node.number})": each["stack"] for node, each in known.items()}


class Finding(NamedTuple):
    """One cause, and all nodes that wait for it."""

    kind: str
    weight: int
    workers: list[str]  # workers that have the cause
    waiting: list[str]  # workers that wait for it
    age: float  # seconds of the longest wait; 0 if unknown
    title: str
    details: list[str]
    stacks: dict[str, list[str]]  # of the threads concerned, innermost last
