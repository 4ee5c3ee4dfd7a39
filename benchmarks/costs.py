"""The largest costs of rows that miss their targets; docs/performance.md has the measurements."""

from __future__ import annotations

from benchmarks.results import Result

_COSTS = {  # the first words that are in "transport: name" count
    "rpc_async": "100 small calls of Python for each remote call, at both ends, and the garbage collector",
    "remote, to_here": "Python: two messages, the reference, and its end",
    "8 hops": "wake-ups: each hop blocks a thread, and each answer wakes two",
    "optimizer step": "wake-ups of four processes on two cores",
    "over 4 owners": "wake-ups of four processes on two cores, and Python on both sides",
    "backward": "Python on both sides: docs/decisions/backward.md",
    "tcp: ": "encryption, and copies into and out of the kernel, on two cores that do the work of both hosts",
    "hosts: ": "encryption, and copies into and out of the kernel, on two cores that do the work of both hosts",
    "list of": "a pickle in pieces, between which other threads run",
    "p99": "wake-ups on a machine that is shared with others",
    "torch.add": "Python for the message and each tensor, at both ends",
    "1 KB": "Python for the message and each tensor, at both ends",
    "in the time of a": "the copy into a fresh object at the receiver: docs/performance.md",
    "timeout": "the timer, which may be some milliseconds late",
    "recorded": "Python for each recorded event",
    "OpenTelemetry": "its SDK, which is Python: two spans, and the context that is sent with the call",
    "idle worker": "modules and threads of Python",
    "of one": "readers that share two cores",
    "16 MB in": "Python for each tensor",
    "MB echo": "two copies, and the second process fetches the data from the other core's cache, or from memory",
    "16 MB": "the second process fetches the data from the other core's cache, or from memory",
    "start of": "the import of telegrad.rpc in each worker",
    "shutdown": "two rounds of messages among processes that sleep",
    "sleep": "messages and wake-ups between the sleeps",
    "RemoteModule": "Python on both sides: docs/decisions/backward.md",
    "parameter server": "Python on both sides: docs/decisions/backward.md",
    "pipeline": "Python for each message, and the walk over each micro-batch's graph",
    "workers, ": "processes that share two cores: a connection of its own for each call",
}


def largest_cost(result: Result) -> str:
    name = f"{result.way}: {result.name}"
    return next((cost for words, cost in _COSTS.items() if words in name), "not known")
