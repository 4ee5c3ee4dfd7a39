"""Timeline of one training step: `python -m benchmarks.timeline`.

A step is an autograd context with forward and backward of one remote `add`. Functions of both workers record
timestamps by the host's clock, which are merged into one timeline. Prints the medians of the steps with the most common
order of events.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from time import perf_counter
from typing import Any

import torch

from benchmarks.groups import Group
from benchmarks.measuring import OTHER, TELEGRAD

STEPS, WARM = 300, 500
BETWEEN = 3  # steps before each measured step, because fetching the other worker's timestamps disturbs the next step
PATIENCE = 120.0

_marks: list[tuple[float, str]] = []


def _mark(where: Any, name: str, *labels: str) -> None:
    """Patch a function to record its start and, with two labels, its end."""
    function = getattr(where, name)

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        _marks.append((perf_counter(), labels[0]))
        result = function(*args, **kwargs)
        _marks.extend((perf_counter(), label) for label in labels[1:])
        return result

    setattr(where, name, marked)


def mark_all(worker: str) -> None:
    """Patch all measured functions of this process."""
    from telegrad._core.agent import call_server, incoming, pending_call
    from telegrad._core.transport.link import Link
    from telegrad.autograd import contexts, engine, pass_parts

    for where, name, *texts in (
        (Link, "_take", "a frame has come"),
        (Link, "send", "writes a frame", "has written"),
        (pending_call, "encode_call", "encodes the call"),
        (incoming.Layers, "take_tensors", "takes tensors out of a message"),
        (call_server.Server, "_run", "begins the call"),
        (incoming.Answers, "made_of", "has run the function"),
        (contexts, "receive", "gives tensors a history", "has given"),
        (engine, "run_backward", "enters torch's engine", "leaves torch's engine"),
        (pass_parts.LocalParts, "_work", "begins its part of the pass", "has ended it"),
        (contexts.Contexts, "release", "releases the context", "has released it"),
    ):
        _mark(where, name, *(f"{worker} {text}" for text in texts))


def take_marks() -> list[tuple[float, str]]:
    """Return and clear the recorded timestamps."""
    taken = list(_marks)
    _marks.clear()
    return taken


def trace(rpc: Any) -> float:
    """Measure steps on worker 0. Return the µs of the median step."""
    import telegrad.autograd as autograd

    one, other = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)

    def step() -> None:
        _marks.append((perf_counter(), "A begins the step"))
        with autograd.context() as context:
            value = rpc.rpc_sync(OTHER, torch.add, (one, other)).sum()
            _marks.append((perf_counter(), "A has the sum"))
            autograd.backward(context, [value])
        _marks.append((perf_counter(), "A has ended the step"))

    mark_all("A")
    rpc.rpc_sync(OTHER, mark_all, ("B",))
    for _ in range(WARM):
        step()
    courses: dict[tuple[str, ...], list[list[float]]] = defaultdict(list)
    for _ in range(STEPS):
        for _ in range(BETWEEN):
            step()
        take_marks()
        step()
        own = take_marks()
        begun, ended = own[0][0], own[-1][0]
        line = sorted(own + [mark for mark in rpc.rpc_sync(OTHER, take_marks) if begun <= mark[0] <= ended])
        courses[tuple(label for _, label in line)].append([(when - begun) * 1e6 for when, _ in line])
    return show(courses)


def show(courses: dict[tuple[str, ...], list[list[float]]]) -> float:
    """Print the most common order of events. Return its total time."""
    course = max(courses, key=lambda each: len(courses[each]))
    medians = [statistics.median(each) for each in zip(*courses[course], strict=True)]
    count, steps = len(courses[course]), sum(map(len, courses.values()))
    print(f"{count} of {steps} steps; A called backward\n\n    µs since begin  since last")
    for label, now, before in zip(course, medians, [0.0, *medians], strict=False):
        print(f"    {now:14.0f}  {now - before:10.0f}  {label}")
    return float(medians[-1])


def main() -> None:
    from benchmarks import timeline  # imported by the name under which workers find it

    group = Group(TELEGRAD, "host", 2)
    try:
        group.measure(timeline.trace, PATIENCE)
    finally:
        group.kill()


if __name__ == "__main__":
    main()
