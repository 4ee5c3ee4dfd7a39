"""Programs that hang, each in its own way, with the expected finding.

They use public names only. Each worker runs `run(rank, stage)` and calls `stage.hangs()` before it waits in vain. After
`signals` such calls the group hangs until it is killed.
"""

import asyncio
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import telegrad.rpc as rpc
from telegrad import autograd
from telegrad.compat.rpc.api import _all_gather
from telegrad.rpc import functions
from tests.cluster import init


class Stage:
    """The surroundings of a program: the port of its group's store, and the pipe for reports of its progress."""

    def __init__(self, port: int, pipe: str) -> None:
        self.port = port
        self.pipe = pipe

    def join(self, rank: int, count: int, **options: Any) -> None:
        here.append(self)
        init(rank, count, self.port, rpc_timeout=0, **options)

    def hangs(self) -> None:
        with open(self.pipe, "wb", buffering=0) as pipe:
            pipe.write(b"!")


class Hang(NamedTuple):
    size: int  # the size of the group
    run: Callable[[int, Stage], None]
    kind: str  # the kind of the finding; empty if there is none
    workers: tuple[str, ...]  # the workers with the cause
    words: tuple[str, ...]  # words of the report
    signals: int = 1


here: list[Stage] = []  # the stages of this process
lock = threading.Lock()
held = threading.Event()
everybody = threading.Condition()
came: list[str] = []
values: list[Any] = []


def say() -> None:
    here[0].hangs()


def lead(size: int, program: Callable[[], object], rank: int, stage: Stage, **options: Any) -> None:
    """Have worker0 run a program."""
    stage.join(rank, size, **options)
    if rank == 0:
        program()


def sync(size: int, function: Callable[[], Any], rank: int, stage: Stage, **options: Any) -> None:
    """Have worker0 wait for a function on worker1."""
    lead(size, lambda: rpc.rpc_sync("worker1", function), rank, stage, **options)


def forget(size: int, program: Callable[[], object], rank: int, stage: Stage) -> None:
    """Have all workers but the last run a program."""
    stage.join(rank, size)
    if rank == size - 1:
        load_data()
    say()
    program()


# Slots


def outer() -> None:
    future = rpc.rpc_async("worker0", inner)
    while not future.done():
        pass


def inner() -> None:
    say()
    rpc.rpc_sync("worker1", leaf)


def leaf() -> None:
    pass


def used_up() -> None:
    spinning = [rpc.rpc_async("worker1", spin) for _ in range(2)]
    quick = [rpc.rpc_async("worker1", leaf) for _ in range(3)]
    torch.futures.wait_all([*spinning, *quick])


def spin() -> None:
    say()
    while True:
        pass


# Circles


def circle() -> None:
    values.append(rpc.remote("worker1", make_of_part))
    values[0].to_here()


def make_of_part() -> int:
    return 1 + rpc.rpc_sync("worker0", part)


def part() -> int:
    say()
    return values[0].to_here()


def hold_and_call() -> None:
    with lock:
        rpc.rpc_sync("worker0", call_back)


def call_back() -> None:
    rpc.rpc_sync("worker1", take)


def take() -> None:
    say()
    with lock:
        pass


# A worker that others wait for


def loop(rank: int, stage: Stage) -> None:
    stage.join(rank, 3)
    if rank != 1:
        rpc.rpc_sync("worker1", spin)


def slumber() -> None:
    say()
    held.wait()


def stop() -> None:
    say()
    signal.raise_signal(signal.SIGSTOP)
    held.wait()


def match() -> None:
    say()
    re.match(r"(a+)+$", "a" * 64 + "b")


# Endless work


def value_never_made() -> None:
    rpc.remote("worker1", slumber).to_here()


async def listen() -> None:
    values.append(asyncio.Event())
    say()
    await values[0].wait()


@functions.async_execution
def promise() -> torch.futures.Future[None]:
    values.append(torch.futures.Future())
    say()
    return values[0]


def hook_that_sleeps() -> None:
    with autograd.context() as context:
        x = torch.ones(3, requires_grad=True)
        autograd.backward(context, [rpc.rpc_sync("worker1", double, args=(x,)).sum()])


def double(x: torch.Tensor) -> torch.Tensor:
    doubled = 2 * x
    doubled.register_hook(hook)
    return doubled


def hook(_: torch.Tensor) -> None:
    say()
    held.wait()


def waits_for_all() -> None:
    torch.futures.wait_all([rpc.rpc_async("worker1", leaf), rpc.rpc_async("worker2", slumber)])


# Joining and leaving


def missing(rank: int, stage: Stage) -> None:
    if rank == 1:
        stage.hangs()
        held.wait()
    stage.hangs()
    stage.join(rank, 3)


def no_store(rank: int, stage: Stage) -> None:
    stage.hangs()
    stage.join(rank + 1, 3)


def never_joined(rank: int, stage: Stage) -> None:
    here.append(stage)
    options = rpc.TelegradOptions(init_method=f"tcp://127.0.0.1:{stage.port}")
    rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=options)
    if rank == 0:
        stage.hangs()
        rpc.wait_for_workers(["worker7"])


def forgotten_barrier(rank: int, stage: Stage) -> None:
    stage.join(rank, 4)
    if rank == 3:
        load_data()
    rpc.rpc_sync("worker0", arrive, args=(f"worker{rank}",))


def arrive(name: str) -> None:
    with everybody:
        came.append(name)
        everybody.notify_all()
        say()
        everybody.wait_for(lambda: len(came) == 4)


def load_data() -> None:
    say()
    held.wait()


def meet() -> None:
    rpc.group().barrier("epoch")


def gather() -> None:
    _all_gather(None, {"worker0", "worker1", "worker2"}, timeout=0)


# Full queues and slots


def no_room() -> None:
    values.extend(rpc.rpc_async("worker1", wait_for_gate) for _ in range(32_768))
    say()
    rpc.rpc_async("worker1", wait_for_gate)


def wait_for_gate() -> None:
    held.wait()


# No hang


def idle(rank: int, stage: Stage) -> None:
    stage.join(rank, 2)
    stage.hangs()


def work(rank: int, stage: Stage) -> None:
    stage.join(rank, 3)
    stage.hangs()
    if rank:
        rpc.shutdown()
    while True:
        with autograd.context() as context:
            x = torch.ones(3, requires_grad=True)
            losses = [rpc.rpc_async(f"worker{to}", torch.add, args=(x, to)) for to in (1, 2)]
            kept = [rpc.remote(f"worker{to}", torch.mul, args=(x, to)) for to in (1, 2)]
            total: Any = sum(loss.wait().sum() for loss in losses) + sum(each.to_here().sum() for each in kept)
            autograd.backward(context, [total])


def led(
    program: Callable[[], Any],
    kind: str,
    workers: str,
    *words: str,
    size: int = 2,
    by: Callable[..., None] = lead,
    signals: int = 1,
    **options: Any,
) -> Hang:
    """Return the hang of a program that some of the workers run."""
    return Hang(size, partial(by, size, program, **options), kind, tuple(workers.split()), words, signals)


def forgotten(size: int, program: Callable[[], Any], kind: str, *words: str) -> Hang:
    """Return the hang of a program that the last worker does not run, since it loads data."""
    return Hang(size, partial(forget, size, program), kind, (f"worker{size - 1}",), ("in load_data", *words), size)


HANGS = {
    "nested": led(
        *(outer, "slot deadlock", "worker0 worker1", "leaf", 'rpc.rpc_sync("worker1", leaf)'),
        by=sync,
        num_worker_threads=1,
    ),
    "used up": led(
        *(used_up, "slots", "worker1", "All 2 slots of worker1", "spin (2)", "3 calls wait"),
        signals=2,
        num_worker_threads=2,
    ),
    "circle": led(circle, "deadlock", "worker0 worker1", "make_of_part", "return values[0].to_here()"),
    "lock across a call": led(
        hold_and_call, "lock deadlock", "worker0 worker1", "hold_and_call", "with lock:", "it seems", by=sync
    ),
    "loop": Hang(3, loop, "busy", ("worker1",), ("spin", "main thread waits for", "(and 1 more like it: worker"), 2),
    "stopped": led(
        stop, "silent", "worker1", "worker1 does not answer", "SIGSTOP", 'rpc.rpc_sync("worker1", function)', by=sync
    ),
    "held interpreter": led(
        match, "silent", "worker1", "holds the interpreter", "in match", 'rpc.rpc_sync("worker1", function)', by=sync
    ),
    "value never made": led(value_never_made, "value", "worker1", "to_here()", "in slumber: held.wait", size=3),
    "coroutine": led(listen, "asleep", "worker1", "runs tests.insight.hangs.listen", "await values[0].wait()", by=sync),
    "future never set": led(promise, "unfinished", "worker1", "promise", "never set", by=sync),
    "hook": led(hook_that_sleeps, "backward", "worker1", "in hook: held.wait", "autograd.backward("),
    "wait for all": led(waits_for_all, "asleep", "worker2", "in slumber: held.wait", "futures.wait_all(", size=3),
    "missing": Hang(3, missing, "missing", ("rank 1",), ("rank 1 is missing: the group of 3",), 3),
    "no store": Hang(2, no_store, "store", ("worker1", "worker2"), ("No store answers", "rank 0"), 2),
    "never joined": Hang(2, never_joined, "unknown", ("worker7",), ("worker7", "rpc.wait_for_workers([")),
    "barrier": Hang(4, forgotten_barrier, "barrier", ("worker3",), ("worker3 has not arrived", "in load_data"), 4),
    "meeting": forgotten(
        4, meet, "barrier", "worker3 has not arrived at barrier 'epoch' of the group (everybody)", 'barrier("epoch")'
    ),
    "no shutdown": forgotten(3, rpc.shutdown, "shutdown", "worker2 has not called shutdown"),
    "no gather": forgotten(3, gather, "shutdown", "worker2 has not reached shutdown's _all_gather"),
    "no room": led(no_room, "slots", "worker1", "held.wait()", "the limit of calls in flight to worker1 (32,768"),
    "idle": Hang(2, idle, "", (), ("Nothing waits for long",), 2),
}
