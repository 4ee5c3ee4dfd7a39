"""Make groups of workers for tests: in this process (milliseconds), and in processes forked from a warm parent."""

import asyncio
import contextlib
import multiprocessing as mp
import os
import pathlib
import random
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import cloudpickle

from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.interrupts import install
from telegrad._core.rpc.cluster import start
from telegrad._core.security.keyring import Keyring, find_keys
from telegrad._core.stores.sealed_store import SealedStore
from telegrad._core.stores.stores import RendezvousStore, open_store
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from tests import locks  # noqa: F401 - checks what locks guard

PATIENCE = 30.0  # seconds after which a test counts as hanging
KILL = 9  # SIGKILL, which has no name on Windows
GRACE = 1.0  # seconds for a process to write its coverage, if that is measured

Three = tuple[Worker, Worker, Worker]


def free_port() -> int:
    """Return a port outside of the ephemeral range, which another connection cannot get by chance."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


KEYS = Keyring([b"tgk1-" + 43 * b"A"])  # the same keys in all processes of a test


def sealed(store: Any, keys: Keyring = KEYS) -> SealedStore:
    """Return a store of torch as the group layer uses it."""
    return SealedStore(store, keys)


def opened(url: str, rank: int, size: int | None, timeout: float, keys: Keyring = KEYS) -> RendezvousStore:
    """Open a store with a key that all tests of this process and its forked processes share."""
    return open_store(url, rank, size, keys, timeout)


@contextlib.contextmanager
def agents(
    count: int,
    dynamic: bool = False,
    of_rank: Callable[[int], dict[str, Any]] = lambda _: {},
    role_of: Callable[[int], str] = lambda _: "",
    **options: Any,
) -> Iterator[list[Worker]]:
    """Make a group of `count` workers in this process, and close them abruptly; `of_rank` gives options of a worker."""
    install()  # init_rpc would do this
    with tempfile.TemporaryDirectory() as folder:

        def begin(rank: int) -> Worker:
            own = TelegradOptions(**{"rpc_timeout": PATIENCE, **options, **of_rank(rank)})
            keys = find_keys(own.key)
            meet = partial(open_store, f"file://{folder}/store", rank, None if dynamic else count, keys)
            return start(f"w{rank}", meet, own, current.enter, role=role_of(rank))

        with ThreadPoolExecutor(count) as pool:
            workers = list(pool.map(begin, range(count)))
        try:
            yield workers
        finally:
            for worker in workers:
                worker.end("")


def wait_until(holds: Callable[[], object], limit: float = PATIENCE) -> None:
    """Wait until a condition holds; fail once the test counts as hanging."""
    ends = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < ends, "it did not come to hold"
        time.sleep(1e-3)


@contextlib.contextmanager
def takes_less_than(seconds: float) -> Iterator[None]:
    """Check the time that the block takes."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def pause(seconds: float) -> None:
    """Sleep until the next event of a schedule, such as that of random kills."""
    time.sleep(max(0.0, seconds))


def is_over(pid: int) -> bool:
    """Return True if the process has ended."""
    try:
        return "State:\tZ" in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Run the jobs in threads; return their results, or raise the first error."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(job) for job in jobs]]


@contextlib.contextmanager
def in_background(job: Callable[..., Any], *args: Any, after: float = 0.0) -> Iterator[None]:
    """Run the job on a thread while the block runs, from so many seconds after its beginning."""
    thread = threading.Timer(after, job, args)
    thread.daemon = True
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE)
    assert not thread.is_alive(), "the job did not end"


@contextlib.contextmanager
def agents_here(count: int, **options: Any) -> Iterator[list[Worker]]:
    """Make `agents`; this thread uses the first of them."""
    with agents(count, **options) as workers:
        current.enter(workers[0])
        try:
            yield workers
        finally:
            current.enter(None)


async def next_turn() -> None:
    """Let the other tasks of the event loop run once."""
    await asyncio.sleep(0)


class Process:
    """A worker process that runs functions which it gets over a pipe."""

    def __init__(self, context: Any, name: str) -> None:
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name=name, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send_bytes(cloudpickle.dumps((function, args)))

    def end(self, patience: float = PATIENCE) -> Any:
        if not self._pipe.poll(patience):
            raise TimeoutError(f"{self.name} did not answer within {patience} s")
        worked, value = cloudpickle.loads(self._pipe.recv_bytes())
        if worked:
            return value
        raise AssertionError(f"on {self.name}:\n{value}")

    def run(self, function: Callable[..., Any], *args: Any, patience: float = PATIENCE) -> Any:
        self.begin(function, *args)
        return self.end(patience)

    def kill(self, how: int = KILL) -> None:
        os.kill(self.pid, how)

    def join(self, patience: float = PATIENCE) -> int | None:
        self._process.join(patience)
        return self._process.exitcode

    def stop(self) -> None:
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(GRACE)
            self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Any) -> None:
    while True:
        try:
            function, args = cloudpickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(cloudpickle.dumps(answer))


_context: Any = None
_context_lock = threading.Lock()


def context() -> Any:
    """Return the context that forks processes from a parent which has imported torch."""
    global _context
    with _context_lock:
        if _context is None:
            forked = "forkserver" in mp.get_all_start_methods()
            _context = mp.get_context("forkserver" if forked else "spawn")
            _context.set_forkserver_preload(["tests.warm"])
        return _context


@contextlib.contextmanager
def processes(count: int) -> Iterator[list[Process]]:
    """Start fresh processes, which are not in a group."""
    made = [Process(context(), f"worker{rank}") for rank in range(count)]
    try:
        yield made
    finally:
        for process in made:
            process.stop()


def run_all(group: list[Process], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(rank, *args)` in all processes at once; return the results."""
    for rank, process in enumerate(group):
        process.begin(function, rank, *args)
    return [process.end() for process in group]


def init(rank: int, count: int, port: int, **options: Any) -> None:
    """Join a group over a store on this host."""
    import telegrad.rpc as rpc

    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=count,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            **{"rpc_timeout": PATIENCE, "init_method": f"tcp://127.0.0.1:{port}", **options}
        ),
    )


@contextlib.contextmanager
def group(count: int, **options: Any) -> Iterator[list[Process]]:
    """Start fresh processes that have joined a group."""
    with processes(count) as made:
        port = free_port()
        for rank, process in enumerate(made):
            process.begin(partial(init, **options), rank, count, port)
        for process in made:
            process.end()
        yield made
