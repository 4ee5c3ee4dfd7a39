"""Each wait of the public API ends when its worker leaves, on another thread, in a signal handler or in a callback."""

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.forks import outwards
from telegrad.compat import rpc as drop_in
from telegrad.weights import Publisher, Subscriber
from tests.cluster import PATIENCE, in_background, processes, wait_until
from tests.rpc.members import error_of

LIMIT = 5.0  # seconds for the waits to end once the worker has left
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {"world_size": 2},
    "drop-in": {"world_size": 2},
    "dynamic": {},
    "elastic": {"min_workers": 2, "max_workers": 2},
    "next generation": {"min_workers": 2, "max_workers": 2},  # which does not form, since the other worker has left
}
WAITS = {"fixed": ["serve", "shutdown"], "drop-in": ["shutdown"], "dynamic": ["serve", "shutdown"]}
WAITS |= {"elastic": ["serve", "shutdown", "rendezvous_again"], "next generation": ["serve", "rendezvous_again"]}


def module_of(kind: str) -> Any:
    return drop_in if kind == "drop-in" else rpc


def join(kind: str, place: str, name: str, rank: int) -> None:
    module = module_of(kind)
    options = module.TensorPipeRpcBackendOptions(init_method=place, rpc_timeout=PATIENCE)
    module.init_rpc(name, rank=rank, rpc_backend_options=options, **KINDS[kind])
    if "min_workers" in KINDS[kind]:
        rpc.rendezvous_again()


def hold() -> None:
    threading.Event().wait(PATIENCE)


all_may_leave = threading.Event()


def let_leave() -> None:
    all_may_leave.set()


def leave_with_the_other() -> None:
    assert all_may_leave.wait(PATIENCE)
    rpc.shutdown()


def leave_at_once() -> None:
    rpc.shutdown(graceful=False)


def endless() -> Iterator[int]:
    yield 1
    hold()


def wait_for_a_version() -> None:
    publisher = Publisher("weights", {"x": torch.ones(1)})
    publisher.publish()
    Subscriber("a", "weights").at_least(2)


# Waits on threads of the worker: during those in CALLS, calls are in flight, which a graceful shutdown waits for
QUIET: dict[str, Callable[[], Any]] = {"lookup": lambda: rpc.lookup("nothing", PATIENCE)}
CALLS: dict[str, Callable[[], Any]] = {
    "call": lambda: rpc.rpc_sync("b", hold),
    "future": lambda: rpc.rpc_async("b", hold).wait(),
    "stream": lambda: list(rpc.rpc_stream("b", endless)),
    "version": wait_for_a_version,
    "subscriber": lambda: Subscriber("a", "nothing", PATIENCE),
    "barrier": lambda: rpc.group(["a", "b"]).barrier(timeout=PATIENCE),
    "reduction": lambda: rpc.group(["a", "b"]).all_reduce(torch.ones(1), timeout=PATIENCE),
}
QUIET_OF_DYNAMIC = {"members": lambda: rpc.wait_for_workers(3, PATIENCE)}
CALLS_OF_DYNAMIC = {"absent": lambda: rpc.rpc_sync("nobody", int, wait_for_worker=True, timeout=PATIENCE)}


def waits_of(kind: str, graceful: bool) -> dict[str, Callable[[], Any]]:
    of_dynamic = QUIET_OF_DYNAMIC if graceful else QUIET_OF_DYNAMIC | CALLS_OF_DYNAMIC
    waits = QUIET | ({} if graceful else CALLS) | (of_dynamic if kind == "dynamic" else {})
    return {} if kind == "next generation" else waits


def running(thread: threading.Thread) -> set[str]:
    """Return the names of the functions that a thread runs."""
    frame = sys._current_frames().get(thread.ident or 0)
    return {each.f_code.co_name for each in outwards(frame)}


def is_waiting(thread: threading.Thread) -> bool:
    return any(name.startswith("wait") for name in running(thread))


def ends_of_waits(kind: str, wait: str, way: str, graceful: bool) -> dict[str, type[Exception] | None]:
    """Wait on this thread and on others, and leave; return the errors of the waits that have ended in time."""
    waits = waits_of(kind, graceful)
    ended: dict[str, type[Exception] | None] = {}
    main, left = threading.current_thread(), threading.Event()
    inner = "_join_in" if kind == "next generation" else "wait"

    def run(name: str) -> None:
        ended[name] = error_of(waits[name])[0]

    def leave(*_: object) -> None:
        if graceful and kind in ("fixed", "elastic"):
            rpc.rpc_sync("b", let_leave)
        error_of(rpc.shutdown, graceful)  # NotInitialized if the wait on the main thread has ended first
        left.set()

    def begin() -> None:
        wait_until(lambda: running(main) >= {wait, inner} and all(map(is_waiting, threads)))
        if way == "handler":
            signal.pthread_kill(main.ident or 0, signal.SIGUSR1)
        elif way == "callback":
            rpc.rpc_async("a", int).then(leave)
        else:
            leave()

    signal.signal(signal.SIGUSR1, leave)
    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in waits]
    for thread in threads:
        thread.start()
    with in_background(begin):
        ended[wait] = error_of(getattr(module_of(kind), wait))[0]
    assert left.wait(LIMIT)
    until = time.monotonic() + LIMIT
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return ended


CASES = [
    pytest.param(
        *(kind, wait, way, graceful),
        id=f"{kind}-{wait}-{way}-{'graceful' if graceful else 'at once'}",
        marks=[pytest.mark.nightly] if way == "thread" and kind in ("elastic", "next generation") else [],
    )
    for kind, waits in WAITS.items()
    for wait, way, graceful in itertools.product(waits, ["thread", "handler", "callback"], [True, False])
    # A callback cannot leave gracefully. Without calls in flight, `shutdown` of a dynamic group ends at once. In the
    # drop-in mode, all workers must call that mode's function.
    if not (graceful and (way == "callback" or (kind, wait) in [("dynamic", "shutdown"), ("drop-in", "shutdown")]))
    if (kind, way) != ("next generation", "callback")
]


@pytest.mark.parametrize(("kind", "wait", "way", "graceful"), CASES)
def test_each_wait_ends_as_its_worker_leaves(tcp: str, kind: str, wait: str, way: str, graceful: bool) -> None:
    with processes(2) as (a, b):
        a.begin(join, kind, tcp, "a", 0)
        b.run(join, kind, tcp, "b", 1)
        a.end()
        if kind == "next generation":
            b.run(leave_at_once)
        else:
            b.begin(leave_with_the_other)
        a.begin(ends_of_waits, kind, wait, way, graceful)
        ended = a.end()
    assert ended.pop(wait) is (errors.ShutDown if wait == "rendezvous_again" else None)
    assert ended.keys() == waits_of(kind, graceful).keys()
    assert {name: kind for name, kind in ended.items() if kind is not errors.ShutDown} == {}
