"""A forked child can take every lock of a module, although any thread of its parent may have held it."""

import contextlib
import functools
import importlib
import inspect
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest

from telegrad._core import forks
from telegrad._core.threads import Exclusive
from tests.cluster import PATIENCE, processes
from tests.test_forked import Hangs, in_child
from tests.test_imports import MODULES

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")

LIMIT = 20.0  # seconds for the work of a child

# Every lock of a module

LOCKS = (
    type(threading.Lock()),
    type(threading.RLock()),
    *(threading.Condition, threading.Event, threading.Semaphore, threading.Barrier),
    *(queue.Queue, queue.SimpleQueue, Exclusive),
)
TAKEN_BY_THE_FORK = {"telegrad.compat._lock"}  # the fork takes it, as its data must be consistent in the child
FORGOTTEN = ("telegrad._core.pickling.main_modules._making.",)  # the child makes new ones


def locks_of(module: ModuleType) -> dict[str, Any]:
    """Return the locks that are reachable from a module's globals through objects of this package."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(thing: Any, path: str) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, LOCKS):
            found[path] = thing
            return
        for name, part in parts_of(thing).items():
            walk(part, f"{path}.{name}")

    for name, value in list(vars(module).items()):
        if name != "__builtins__":
            walk(value, f"{module.__name__}.{name}")
    return found


def parts_of(thing: Any) -> dict[Any, Any]:
    if isinstance(thing, dict):
        return dict(thing)
    if isinstance(thing, list | tuple | set | frozenset):
        return dict(enumerate(thing))
    if isinstance(thing, functools.cached_property):
        return vars(thing)  # has a lock until Python 3.12
    if isinstance(thing, MethodType):
        return {"__self__": thing.__self__}
    if isinstance(thing, FunctionType):
        return dict(inspect.getclosurevars(thing).nonlocals) if is_ours(thing) else {}
    if not is_ours(thing if isinstance(thing, type) else type(thing)):
        return {}
    slots = [name for kind in type(thing).__mro__ if is_ours(kind) for name in vars(kind).get("__slots__", ())]
    return {name: getattr(thing, name, None) for name in slots} | getattr(thing, "__dict__", {})


def is_ours(thing: Any) -> bool:
    return (thing.__module__ or "").partition(".")[0] == "telegrad"


def all_locks() -> dict[str, Any]:
    found: dict[int, tuple[str, Any]] = {}
    for name in MODULES:
        if ".boot" not in name:
            with contextlib.suppress(ImportError):  # modules of missing extras
                locks = locks_of(importlib.import_module(name))
                found |= {id(lock): (path, lock) for path, lock in locks.items()}
    return {
        path: lock for path, lock in found.values() if path not in TAKEN_BY_THE_FORK and not path.startswith(FORGOTTEN)
    }


def test_every_lock_of_a_module_is_renewed_in_a_forked_child() -> None:
    locks = all_locks()
    assert len(locks) > 20
    assert [path for path, lock in locks.items() if lock not in forks._locks] == [], "make it by forks.renewed"


def test_locks_are_found_in_all_kinds_of_objects() -> None:
    module = ModuleType("planted")

    class Slotted:
        __slots__ = ("lock",)

        def __init__(self) -> None:
            self.lock = threading.Event()

    class Holder:
        lock = threading.Lock()
        cached = functools.cached_property(len)

        def __init__(self) -> None:
            self.lock_of_its_own = threading.RLock()
            self.slotted = Slotted()

        def method(self) -> None: ...

    def closed_over(lock: Any) -> Callable[[], Any]:
        return lambda: lock

    function = closed_over(threading.Condition())
    for each in (Slotted, Holder, function):
        each.__module__ = "telegrad.planted"
    made = {"plain": threading.Lock(), "listed": [Holder()], "kind": Holder}
    vars(module).update(made, bound=Holder().method, inner=function)
    paths = {"planted.plain", "planted.kind.lock", "planted.inner.lock"}
    for path in ("listed.0", "bound.__self__"):
        paths |= {f"planted.{path}.lock_of_its_own", f"planted.{path}.slotted.lock"}
    if sys.version_info < (3, 12):
        paths.add("planted.kind.cached.lock")
    assert locks_of(module).keys() == paths


def holding_of(lock: Any) -> contextlib.AbstractContextManager[Any]:
    return lock._cond if isinstance(lock, threading.Event) else lock  # type: ignore[attr-defined]


def take(lock: Any) -> None:
    with holding_of(lock):
        pass


@contextlib.contextmanager
def elsewhere(act: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Keep another thread inside of the context manager that `act` returns."""
    is_in, done = threading.Event(), threading.Event()

    def run() -> None:
        with act():
            is_in.set()
            done.wait(PATIENCE)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_in.wait(PATIENCE)
        yield
    finally:
        done.set()
        thread.join()


def outcome(act: Callable[[], Any]) -> Any:
    """Return the result of `act`, or a text of its failure."""
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        return act()
    except Hangs:
        return "hangs"
    except BaseException as error:
        return f"raises {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def import_all() -> None:
    all_locks()


def locks_that_hang() -> list[str]:
    locks = all_locks()

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for lock in locks.values():
                stack.enter_context(holding_of(lock))
            yield

    with elsewhere(held):
        told: list[str] = in_child(
            lambda: [path for path, lock in locks.items() if outcome(functools.partial(take, lock)) is not None]
        )
    return told


@pytest.mark.timeout(2 * PATIENCE)
def test_a_forked_child_takes_each_lock_that_another_thread_held() -> None:
    with processes(1) as (process,):
        process.run(import_all)  # in a run of its own, as it takes long
        assert process.run(locks_that_hang) == []


def test_a_reentrant_lock_of_the_forking_thread_stays_its_own() -> None:
    lock, exclusive = forks.renewed(threading.RLock()), forks.renewed(Exclusive("a test"))

    def release() -> tuple[str, bool]:
        lock.release()
        told = outcome(exclusive.__enter__)
        exclusive.__exit__()
        return told[:17], lock._is_owned()  # type: ignore[attr-defined]

    with lock, exclusive:
        assert in_child(release) == ("raises UsageError", False)
    assert in_child(lambda: exclusive._is_owned()) is False
