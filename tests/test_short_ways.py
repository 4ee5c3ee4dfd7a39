"""Operations take few steps: calls of Python functions of this package, files, and steps from file to file.

They are counted on two warm workers, one operation at a time; the shortest of many counts.
"""

import collections
import functools
import operator
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

import pytest
import torch
from torch import nn

import telegrad
from telegrad import autograd, rpc
from telegrad.nn import Pipeline, RemoteModule
from telegrad.weights import Publisher, Subscriber
from tests.cluster import PATIENCE, Process, free_port, processes

ROOT = f"{pathlib.Path(telegrad.__file__).parent}/"
MANY = 1000
UNRELATED = {"_core/reactor/leader_threads.py", "_core/agent/agent.py:<lambda>"}  # begin periodic work

Step = tuple[int, bool, str, str]  # thread, True for a call, file, function
steps: list[Step] = []
traced = threading.Event()


class Length(NamedTuple):
    calls: int
    files: int
    crossings: int


def note(frame: FrameType, event: str, _: object) -> None:
    if event in ("call", "return") and traced.is_set() and frame.f_code.co_filename.startswith(ROOT):
        file = frame.f_code.co_filename.removeprefix(ROOT)
        steps.append((threading.get_ident(), event == "call", file, frame.f_code.co_name))


def join(rank: int, port: int) -> None:
    threading.setprofile(note)
    sys.setprofile(note)
    options = rpc.TelegradOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=PATIENCE)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options)


class Node(NamedTuple):
    """A call of a function, with its inner calls. Equal calls count once, as a thread may look again."""

    file: str
    name: str
    made: "dict[Node, None]"

    def __hash__(self) -> int:
        return hash((self.file, self.name, tuple(self.made)))

    def total(self) -> tuple[int, int, set[str]]:
        """Return the number of calls, of those from file to file, and the files."""
        calls, crossings, files = 1, 0, {self.file}
        for each in self.made:
            inner = each.total()
            calls += inner[0]
            crossings += inner[1] + (each.file != self.file)
            files |= inner[2]
        return calls, crossings, files


def trees(events: list[Step]) -> Iterator[Node]:
    """Yield the outermost calls of all threads, without periodic work."""
    stacks: dict[int, list[Node]] = collections.defaultdict(list)
    for thread, is_call, file, name in events:
        stack = stacks[thread]
        if is_call:
            stack.append(Node(file, name, {}))
        elif stack:
            ended = stack.pop()
            if stack:
                stack[-1].made[ended] = None
            elif not {file, f"{file}:{name}"} & UNRELATED:
                yield ended
    for stack in stacks.values():  # unfinished calls
        while len(stack) > 1:
            ended = stack.pop()
            stack[-1].made[ended] = None
        yield from stack


def begin() -> None:
    steps.clear()
    traced.set()


def end() -> Length:
    traced.clear()
    totals = [each.total() for each in dict.fromkeys(trees(list(steps)))]
    files = set().union(*(total[2] for total in totals))
    return Length(sum(total[0] for total in totals), len(files), sum(total[1] for total in totals))


def empty() -> None:
    pass


def repeat(act: Callable[[], object], times: int) -> None:
    for _ in range(times):
        act()


def call() -> None:
    rpc.rpc_sync("w1", empty)


ONES = torch.ones(2)
WEIGHT = torch.ones(2, requires_grad=True)


def remote() -> None:
    rpc.remote("w1", torch.add, (ONES, 3)).to_here()


def backward() -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", torch.add, (WEIGHT, 3)).sum()])


kept: list[rpc.RRef[Subscriber]] = []


@functools.cache
def publisher() -> Publisher:
    made = Publisher("policy", nn.Linear(64, 64))
    made.publish()
    kept.append(rpc.remote("w1", Subscriber, ("w0", "policy")))
    return made


def publish() -> None:
    publisher().publish()


@functools.cache
def stages() -> Pipeline:
    return Pipeline([RemoteModule(worker, nn.Linear, (8, 8)) for worker in ("w1", "w2")], chunks=2)


def batch() -> None:
    with autograd.context() as context_id:
        stages().forward_backward(context_id, torch.ones(4, 8), torch.ones(4, 8), nn.functional.mse_loss)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Process]]:
    """Start the caller, the callee, and one more worker."""
    with processes(3) as made:
        port = free_port()
        for rank, process in enumerate(made):
            process.begin(join, rank, port)
        for process in made:
            process.end()
        yield made[:2]


def lengths(pair: list[Process], act: Callable[[], object]) -> Iterator[tuple[Length, Length]]:
    """Yield the steps of an operation at its caller and at its callee, each number the smallest of more and more runs.

    On a busy machine, most runs take a longer way: another thread has to read, or to send what waits.
    """
    pair[0].run(repeat, act, 100)
    found: list[list[Length]] = [[], []]
    for _ in range(MANY):
        for process in pair:
            process.run(begin)
        pair[0].run(repeat, act, 1)
        for lengths_there, process in zip(found, pair, strict=True):
            lengths_there.append(process.run(end))
        caller, callee = (Length(*map(min, *each, each[0])) for each in found)
        yield caller, callee


# The present numbers; they may only decrease.
MOST = {
    call: (Length(26, 10, 17), Length(28, 10, 17)),
    remote: (Length(95, 19, 57), Length(88, 19, 58)),
    backward: (Length(206, 30, 118), Length(175, 25, 102)),  # the callee alone 150, 23, 88
    publish: (Length(45, 11, 14), Length(40, 13, 20)),
    batch: (Length(270, 38, 150), Length(290, 41, 172)),  # alone 250, 37, 139 and 267, 39, 156
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("act", MOST, ids=lambda act: act.__name__)
def test_operations_take_few_steps(pair: list[Process], act: Callable[[], None]) -> None:
    most = [*MOST[act][0], *MOST[act][1]]
    for caller, callee in lengths(pair, act):
        if all(map(operator.le, (*caller, *callee), most)):
            return
    raise AssertionError((caller, callee))
