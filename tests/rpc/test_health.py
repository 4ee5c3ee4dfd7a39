"""Workers that live and do not run: stopped processes, and interpreters that one thread holds."""

from __future__ import annotations

import ctypes
import logging
import operator
import os
import queue
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.worker.options import TelegradOptions
from tests.cluster import PATIENCE, Process, agents, free_port, group, processes, wait_until

SILENCE = 0.5
SOON = 5.0  # seconds that a loaded machine may take for what is due at once

events: queue.Queue[tuple[Any, ...]] = queue.Queue()
lines: queue.Queue[str] = queue.Queue()


def account() -> None:
    """Keep account of what is told on this worker."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.put(record.getMessage())
    logging.getLogger("telegrad").addHandler(handler)
    rpc.on_leave(lambda worker, how: events.put((how, worker.name)))
    rpc.on_lost(lambda worker, reason: events.put((worker.name, type(reason).__name__, str(reason))))


def next_event() -> tuple[Any, ...]:
    return events.get(timeout=PATIENCE)


def is_quiet() -> bool:
    return events.empty()


def line_with(words: str) -> str:
    while words not in (line := lines.get(timeout=PATIENCE)):
        pass
    return line


def call(to: str, function: Callable[..., Any] = operator.add, args: Any = (1, 2), timeout: float = 0) -> Any:
    return rpc.rpc_sync(to, function, args, timeout=timeout)


def error_of(to: str, function: Callable[..., Any], args: Any, timeout: float = 0) -> tuple[str, str, float]:
    """How a call fails, and after how long."""
    start = time.monotonic()
    try:
        call(to, function, args, timeout)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def hold_the_interpreter(seconds: int) -> None:
    """No other thread of the process runs meanwhile."""
    ctypes.PyDLL(None).usleep(seconds * 1_000_000)


def names() -> list[str]:
    return [worker.name for worker in rpc.workers()]


def test_a_stopped_process_is_told_and_can_be_called_again_once_it_goes_on() -> None:
    with group(3, silence=SILENCE) as workers:
        workers[0].run(account)
        workers[1].run(account)
        assert workers[0].run(call, "worker1") == workers[1].run(call, "worker0") == 3
        workers[0].begin(error_of, "worker1", time.sleep, (PATIENCE,))
        time.sleep(0.2)
        workers[1].kill(signal.SIGSTOP)
        kind, text, seconds = workers[0].end()
        assert kind == "PeerSilent"
        assert f"kill -CONT {workers[1].pid}" in text
        assert "This call of time.sleep was in flight" in text
        assert SILENCE <= seconds < SILENCE + SOON
        told = [workers[0].run(next_event) for _ in range(2)]
        assert told[0] == ("lost", "worker1")
        assert told[1][:2] == ("worker1", "PeerSilent")
        assert "is silent" in workers[0].run(line_with, "worker1")
        assert workers[0].run(names) == ["worker0", "worker2"]
        kind, text, seconds = workers[0].run(error_of, "worker1", operator.add, (1, 2))
        assert kind == "PeerStopped"
        assert "for 0.5 s its process is stopped" in text
        assert seconds < SILENCE + SOON
        assert workers[0].run(call, "worker2") == 3
        time.sleep(1.2)
        workers[1].kill(signal.SIGCONT)
        assert "did not run" in workers[1].run(line_with, "this process")
        assert "because this worker gave no sign of life" in workers[1].run(line_with, "worker0")
        assert workers[0].run(call, "worker1") == workers[1].run(call, "worker0") == 3
        assert workers[1].run(is_quiet)


def test_shutdown_does_not_wait_for_a_stopped_process() -> None:
    with group(3, silence=SILENCE) as workers:
        workers[1].kill(signal.SIGSTOP)  # nobody knows of it yet, nor has a connection to it
        kind, text, seconds = workers[0].run(error_of, "worker1", operator.add, (1, 2))
        assert (kind, "for 0.5 s its process is stopped" in text) == ("PeerStopped", True)
        assert SILENCE <= seconds < SILENCE + SOON
        assert workers[2].run(error_of, "worker1", operator.add, (1, 2))[0] == "PeerStopped"
        began = time.monotonic()
        for each in (workers[0], workers[2]):
            each.begin(rpc.shutdown)
        for each in (workers[0], workers[2]):
            each.end()
        assert time.monotonic() - began < SOON
        workers[1].kill(signal.SIGKILL)


def test_who_only_was_stopped_for_a_moment_or_is_busy_is_not_silent() -> None:
    with group(2, silence=SILENCE) as workers:
        workers[0].run(account)
        for _ in range(3):
            workers[1].kill(signal.SIGSTOP)
            time.sleep(SILENCE / 3)
            workers[1].kill(signal.SIGCONT)
            time.sleep(SILENCE / 3)
        assert workers[0].run(error_of, "worker1", hold_the_interpreter, (1,))[0] == ""
        assert workers[0].run(is_quiet)


@pytest.mark.parametrize("how", ["stopped", pytest.param("busy", marks=pytest.mark.nightly)])
def test_over_tcp_heartbeats_tell(how: str) -> None:
    with group(2, transport="tcp", heartbeat=SILENCE) as workers:
        workers[0].run(account)
        assert workers[0].run(error_of, "worker1", time.sleep, (3 * SILENCE,))[0] == ""
        workers[0].begin(error_of, "worker1", hold_the_interpreter if how == "busy" else time.sleep, (3,))
        if how == "stopped":
            workers[1].kill(signal.SIGSTOP)
        kind, text, seconds = workers[0].end()
        assert kind == "PeerSilent"
        assert "has not answered for 0.5 s" in text
        assert seconds < 3
        workers[1].kill(signal.SIGCONT)
        workers[1].run(operator.add, 1, 2)
        assert workers[0].run(call, "worker1") == 3


@pytest.mark.nightly
def test_without_heartbeats_whoever_cannot_be_seen_is_waited_for() -> None:
    with group(2, transport="tcp", silence=SILENCE) as workers:
        workers[0].begin(error_of, "worker1", time.sleep, (2 * SILENCE,))
        workers[1].kill(signal.SIGSTOP)
        time.sleep(3 * SILENCE)
        workers[1].kill(signal.SIGCONT)
        assert workers[0].end()[0] == ""


def test_of_those_who_die_the_reason_is_told() -> None:
    with group(3) as workers:
        workers[0].run(account)
        assert workers[0].run(call, "worker1") == workers[0].run(call, "worker2") == 3  # there are connections now
        workers[1].kill()
        assert {workers[0].run(next_event)[:2] for _ in range(2)} == {("lost", "worker1"), ("worker1", "PeerLost")}
        workers[2].run(rpc.shutdown, False)
        assert {workers[0].run(next_event)[:2] for _ in range(2)} == {("lost", "worker2"), ("worker2", "LeftEarly")}


def join(name: str, where: str, rank: int = -1) -> None:
    options = TelegradOptions(init_method=where, rpc_timeout=PATIENCE, silence=SILENCE)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    account()


def test_in_a_dynamic_group_another_may_take_the_place_of_who_is_silent() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"  # who is stopped might hold the lock of a file
    with processes(4) as made:
        boss, other, first, second = made
        boss.run(join, "boss", where, 0)
        other.run(join, "other", where)
        first.run(join, "actor", where)
        assert len(boss.run(rpc.wait_for_workers, 3, PATIENCE)) == 3
        first.kill(signal.SIGSTOP)
        for each in (boss, other):
            assert {each.run(next_event)[:2] for _ in range(2)} == {("lost", "actor"), ("actor", "PeerLost")}
        second.run(join, "actor", where)
        assert boss.run(rpc.wait_for_workers, 3, PATIENCE) is not None
        assert boss.run(call, "actor") == 3
        first.kill(signal.SIGCONT)
        assert "'actor' was declared lost" in first.run(line_with, "declared lost")
        assert boss.run(call, "actor", os.getpid, ()) == second.pid
        check_alive(boss, other)


def check_alive(*workers: Process) -> None:
    for worker in workers:
        assert worker.run(is_quiet)


def test_who_serves_the_store_of_a_dynamic_group_may_be_silent_too() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with processes(2) as (boss, other):
        boss.run(join, "boss", where, 0)
        other.run(join, "other", where)
        assert other.run(call, "boss") == 3
        boss.kill(signal.SIGSTOP)
        assert {other.run(next_event)[:2] for _ in range(2)} == {("lost", "boss"), ("boss", "PeerLost")}
        boss.kill(signal.SIGCONT)
        assert "'boss' was declared lost" in boss.run(line_with, "declared lost")


def serve() -> str:
    """How that ends."""
    try:
        rpc.serve()
    except errors.PeerLost as error:
        return str(error)
    return "in order"


def test_who_was_taken_for_dead_serves_no_more() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with processes(2) as (boss, actor):
        boss.run(join, "boss", where, 0)
        actor.run(join, "actor", where)
        assert boss.run(call, "actor") == 3
        actor.begin(serve)
        actor.kill(signal.SIGSTOP)
        assert {boss.run(next_event)[:2] for _ in range(2)} == {("lost", "actor"), ("actor", "PeerLost")}
        actor.kill(signal.SIGCONT)
        assert "was declared lost" in actor.end()
        actor.run(join, "actor", where)
        assert boss.run(call, "actor") == 3


@pytest.mark.parametrize("option", ["silence", "heartbeat"])
def test_times_that_are_none(option: str) -> None:
    for wrong in (-1, "1", float("nan"), float("inf"), None):
        with pytest.raises(errors.UsageError, match=f"{option} must be a number of seconds, 0 for"):
            TelegradOptions(**{option: wrong})  # type: ignore[arg-type]


def test_where_one_is_lost_the_others_are_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | int] = []
    find = DynamicGroup.find

    def seen(self: DynamicGroup, to: str | int) -> Member:
        found.append(to)
        return find(self, to)

    monkeypatch.setattr(DynamicGroup, "find", seen)
    with agents(3, dynamic=True) as (worker, lost, stays):
        for other in (lost, stays):
            assert worker.agent.call(other.me.name, operator.add, (1, 2), None) == 3
        lost.end("")
        with pytest.raises(errors.TelegradError):
            wait_until(lambda: worker.agent.call(lost.me.name, operator.add, (1, 2), None) != 3)
        del found[:]
        assert worker.agent.call(stays.me.name, operator.add, (1, 2), None) == 3
        assert not found, "who could answer late where the store is silent"
