"""More programs that hang: in waits of Python, torch and the kernel, and in other parts of Telegrad."""

import asyncio
import concurrent.futures
import fcntl
import logging
import multiprocessing
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import telegrad.rpc as rpc
from telegrad.nn import Pipeline, RemoteModule
from telegrad.weights import Publisher, Subscriber
from tests.cluster import next_turn
from tests.insight.hangs import Stage, held, here, lead, leaf, lock, say, slumber, take, values

log = logging.getLogger("hangs")


def call(functions: list[Callable[[], object]], rank: int, stage: Stage) -> None:
    """Have worker0 call functions on worker1."""
    lead(2, lambda: torch.futures.wait_all([rpc.rpc_async("worker1", each) for each in functions]), rank, stage)


def keep(size: int, program: Callable[[], object], rank: int, stage: Stage) -> None:
    """Have worker1 keep the lock while worker0 runs a program."""
    stage.join(rank, size)
    with lock:
        held.wait() if rank else program()


# Waits of Python, in a call


def sleep_in_item() -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # may have children
    for _ in DataLoader(Items(), num_workers=1, multiprocessing_context="fork"):
        pass


class Items(torch.utils.data.Dataset[None]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, _: int) -> None:
        parent = os.getppid()
        say()
        while os.getppid() == parent:  # ends with it
            held.wait(1)


async def keep_lock() -> None:
    values.append(asyncio.Lock())
    async with values[0]:
        say()
        await asyncio.Event().wait()


async def want_lock() -> None:
    while not values:
        await next_turn()
    say()
    async with values[0]:
        pass


async def read_queue() -> None:
    messages: asyncio.Queue[str] = asyncio.Queue()
    say()
    await messages.get()


async def block_loop() -> None:
    say()
    rpc.rpc_sync("worker1", read_queue)


def get_permit() -> None:
    permits = threading.Semaphore(0)
    say()
    permits.acquire()


def read_empty_queue() -> None:
    tasks: queue.Queue[int] = queue.Queue()
    say()
    tasks.get()


def join_thread() -> None:
    thread = threading.Thread(target=held.wait, name="prefetch", daemon=True)
    thread.start()
    say()
    thread.join()


def run_program() -> None:
    values.extend(os.pipe())
    say()
    subprocess.run(["cat"], stdin=values[0], check=True)


def receive() -> None:
    ours, values[:] = socket.socketpair()[0], socket.socketpair()
    say()
    values[0].recv(1)
    ours.close()


def take_twice() -> None:
    with lock:
        take()


def pool_in_pool() -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    say()
    pool.submit(lambda: pool.submit(leaf).result()).result()


def map_in_pool() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda _: slumber(), range(1)))


async def in_thread() -> None:
    await asyncio.to_thread(slumber)


def call_in_pool() -> None:
    concurrent.futures.ThreadPoolExecutor(1).submit(rpc.rpc_sync, "worker1", slumber).result()


def import_slow() -> None:
    folder = pathlib.Path(here[0].pipe).parent
    (folder / "slow_module.py").write_text("from tests.insight.hangs import held, say\nsay()\nheld.wait()\n")
    sys.path.insert(0, str(folder))
    __import__("slow_module")


def import_too() -> None:
    held.wait(0.5)
    say()
    import slow_module  # type: ignore[import-not-found]  # noqa: F401


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        slumber()


def log_slowly() -> None:
    log.addHandler(Handler())
    log.warning("the disk is full")


def log_too() -> None:
    held.wait(0.3)
    say()
    log.warning("the loss is nan")


# Waits of the kernel and torch between workers


def lock_file() -> None:
    with tempfile.NamedTemporaryFile() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rpc.rpc_sync("worker1", lock_same_file, args=(file.name,))


def lock_same_file(name: str) -> None:
    with open(name) as file:
        say()
        fcntl.flock(file, fcntl.LOCK_EX)


def reduce(rank: int, stage: Stage) -> None:
    stage.join(rank, 3)
    dist.init_process_group("gloo", init_method=f"file://{stage.pipe}.store", rank=rank, world_size=3)
    say()
    if rank == 2:
        held.wait()
    dist.all_reduce(torch.ones(2))


# Streams and groups


def stuck_items() -> Iterator[int]:
    yield 1
    slumber()


def stuck_stream() -> None:
    for _ in rpc.rpc_stream("worker1", stuck_items):
        pass


def endless_items() -> Iterator[int]:
    while True:
        yield 1


def unread_stream() -> None:
    stream = rpc.rpc_stream("worker1", endless_items, window=2)
    next(stream)
    slumber()


def group_call() -> None:
    rpc.group().rpc_sync(sleep_on, args=("worker2",))


def sleep_on(name: str) -> None:
    if rpc.get_worker_info().name == name:
        slumber()


# Futures and callbacks


def local_future() -> None:
    ready: torch.futures.Future[int] = torch.futures.Future()
    doubled = ready.then(lambda done: 2 * done.wait())
    say()
    doubled.wait()


def blocking_callback() -> None:
    rpc.rpc_async("worker1", leaf).then(lambda _: slumber()).wait()


# Actors and modules


@rpc.actor
class Account:
    def pay(self, other: str, me: "rpc.RRef[Account]") -> int:
        return rpc.rpc_sync(other, ask_balance, args=(me,))

    def balance(self) -> int:
        return 1


def ask_balance(account: rpc.RRef[Account]) -> int:
    future = rpc.rpc_async("worker0", ask_again, args=(account,))
    say()
    return future.wait()


def ask_again(account: rpc.RRef[Account]) -> int:
    return concurrent.futures.ThreadPoolExecutor(1).submit(account.rpc_sync().balance).result()


def actor_circle() -> None:
    account = rpc.remote("worker1", Account)
    account.rpc_sync().pay("worker0", account)


class Guarded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        take()
        return x


def guarded_module() -> None:
    RemoteModule("worker1", Guarded)(torch.ones(2))


class Stuck(nn.Module):
    def forward(self, _: torch.Tensor) -> torch.Tensor:
        slumber()
        return _


def stuck_stage() -> None:
    stages = [RemoteModule("worker1", nn.Linear, (2, 2)), RemoteModule("worker2", Stuck)]
    Pipeline(stages, chunks=2)(torch.ones(4, 2))


# Weights and published values


def no_publisher(rank: int, stage: Stage) -> None:
    stage.join(rank, 2)
    if rank == 1:
        say()
        Subscriber("worker0", "policy", timeout=0)


def slow_subscriber() -> None:
    publisher = Publisher("policy", {"weight": torch.ones(2)})
    rpc.rpc_sync("worker1", subscribe)
    say()
    publisher.publish(wait=0)


def subscribe() -> None:
    values.append(Subscriber("worker0", "policy"))


def no_version() -> None:
    values.append(Publisher("policy", {"weight": torch.ones(2)}))
    rpc.rpc_sync("worker1", read_version)


def read_version() -> None:
    subscriber = Subscriber("worker0", "policy", timeout=0)
    say()
    subscriber.at_least(3, timeout=0)


def unpublished() -> None:
    say()
    rpc.lookup("replay-buffer", timeout=0)


# Leaving


def leaving_early(rank: int, stage: Stage) -> None:
    stage.join(rank, 2)
    if rank == 0:
        values.append(rpc.rpc_async("worker1", slumber))
    rpc.shutdown()


# Elastic groups


def elastic(count: int, stage: Stage) -> None:
    options = rpc.TelegradOptions(init_method=f"tcp://127.0.0.1:{stage.port}")
    rpc.init_rpc(role="w", min_workers=count, max_workers=count, rpc_backend_options=options)


def spare(_: int, stage: Stage) -> None:
    elastic(2, stage)
    stage.hangs()
    rpc.serve()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def within_step(late: int, act: Callable[[], object], _: int, stage: Stage) -> None:
    """Have the worker of the rank `late` do something else, while the others wait for it."""
    elastic(3, stage)
    rpc.rendezvous_again()
    rpc.rendezvous_again()  # the first one returns at once: perhaps not all have joined
    if rpc.generation().rank == late:
        stage.hangs()
        act()
    rpc.rendezvous_again()
