"""Functions that worker processes run in the tests of membership: they join, call, and record events."""

import logging
import operator
import queue
from collections.abc import Callable
from typing import Any

import telegrad.rpc as rpc
from telegrad._core.calls.settings import TelegradOptions
from tests.cluster import PATIENCE

events: queue.Queue[tuple[Any, ...]] = queue.Queue()
lines: queue.Queue[str] = queue.Queue()


def join(name: str | None, where: str, rank: int = -1, role: str = "", **options: Any) -> int:
    """Join a dynamic group; return the rank."""
    own = TelegradOptions(init_method=where, **{"rpc_timeout": PATIENCE, **options})
    rpc.init_rpc(name, rank=rank, rpc_backend_options=own, role=role)
    return rpc.get_worker_info().id


def account(joins: bool = True, losses: bool = False) -> None:
    """Record joins, departures and warnings of the log from now on; with `losses` also the reasons of losses."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.put(record.getMessage())
    logging.getLogger("telegrad").addHandler(handler)
    if joins:
        rpc.on_join(lambda worker: events.put(("join", worker.name, rpc.rpc_sync(worker, operator.add, (1, 2)))))
    rpc.on_leave(lambda worker, how: events.put((how, worker.name)))
    if losses:
        rpc.on_lost(lambda worker, reason: events.put((worker.name, type(reason).__name__, str(reason))))


def next_event() -> tuple[Any, ...]:
    return events.get(timeout=PATIENCE)


def is_quiet() -> bool:
    return events.empty()


def line_with(words: str) -> str:
    while words not in (line := lines.get(timeout=PATIENCE)):
        pass
    return line


def wait_for_lines(*each: str) -> None:
    """Wait until each of these texts has been in a line of the log, in any order."""
    missing = set(each)
    while missing:
        line = lines.get(timeout=PATIENCE)
        missing -= {words for words in missing if words in line}


def names() -> list[str]:
    """Return the names of the members, as the directory has them."""
    return [worker.name for worker in rpc.workers()]


def call(to: str | int, function: Callable[..., Any] = operator.add, args: Any = (1, 2), timeout: float = 0) -> Any:
    return rpc.rpc_sync(to, function, args, timeout=timeout)


def error_of(function: Callable[..., object], *args: Any, **named: Any) -> tuple[type[Exception] | None, str]:
    """Return the type and the text of the exception that a function raises."""
    try:
        function(*args, **named)
    except Exception as error:
        return type(error), str(error)
    return None, ""


def check_error(told: tuple[type[Exception] | None, str], kind: type[Exception], part: str) -> None:
    """Check an error as `error_of` has returned it."""
    assert told[0] is kind, told
    assert part in told[1], told


class Counter:
    """A value that calls change."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count
