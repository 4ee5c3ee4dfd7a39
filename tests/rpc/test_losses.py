"""Tests of lost members: processes that end, are stopped, or do not run."""

import ctypes
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.rpc.idempotency import IdempotentCalls
from telegrad._core.stores import find_directory
from telegrad._core.worker import current
from tests.cluster import PATIENCE, Process, agents, group, in_threads, processes, run_all, takes_less_than, wait_until
from tests.rpc import members
from tests.rpc.members import call, check_error, error_of, is_quiet, line_with, names, next_event, wait_for_lines
from tests.rpc.test_reference_faults import hold_remote, use_held

SILENCE = 3.0
SHORT = 0.5
AT_ONCE = 2.0  # seconds on a busy machine, less than the silence; an idle one needs some milliseconds
COUNT = 5


def join(where: str, rank: int, name: str = "") -> None:
    members.join(name or f"w{rank}", where, rank, silence=SILENCE)


def view() -> list[str]:
    """Return the members without asking the directory."""
    return [worker.name for worker in current.here().membership.view().workers]


@pytest.fixture
def five(tcp: str) -> Iterator[list[Process]]:
    """Start members that make no calls."""
    with processes(COUNT) as made:
        for rank, process in enumerate(made):
            process.run(join, tcp, rank)
        for process in made:
            process.run(rpc.wait_for_workers, COUNT, PATIENCE)
        yield made


def wait_for(made: list[Process], wanted: list[str], limit: float) -> None:
    """Wait until all these workers see the wanted members."""
    wait_until(lambda: all(process.run(view) == wanted for process in made), limit)


# Processes that end


@pytest.mark.parametrize("dead", [(4,), (1, 2, 3), (0,)], ids=["one", "several", "the keeper of the directory"])
def test_the_death_of_workers_without_calls_is_noticed_at_once(five: list[Process], dead: tuple[int, ...]) -> None:
    for rank in dead:
        five[rank].kill()
    rest = [rank for rank in range(COUNT) if rank not in dead]
    wait_for([five[rank] for rank in rest], [f"w{rank}" for rank in rest], AT_ONCE)
    for rank in rest:
        assert five[rank].run(names) == [f"w{rank}" for rank in rest]
        assert five[rank].run(call, f"w{rest[0]}") == 3


def test_workers_without_calls_have_few_connections(five: list[Process]) -> None:
    assert all(1 <= process.run(lambda: len(current.here().agent._connections._peers)) <= 2 for process in five)


@pytest.mark.nightly
def test_a_death_is_noticed_without_a_directory(five: list[Process]) -> None:
    """The member with the next lower rank notices it, once its request to remove the dead worker has failed."""
    pid = five[0].run(lambda: current.here().directory._keeping._keeper.pid)
    five[0].kill()
    five[0].join()
    os.kill(pid, signal.SIGKILL)
    five[3].kill()
    wait_for([five[2]], ["w1", "w2", "w4"], find_directory.PATIENCE + AT_ONCE)
    assert five[1].run(call, "w4") == 3
    with takes_less_than(3 * AT_ONCE):
        in_threads(*[lambda process=process: process.run(rpc.shutdown) for process in (five[1], five[2], five[4])])


# Processes that are stopped


def test_a_stopped_worker_is_lost_with_its_lease_and_ends(five: list[Process], tcp: str) -> None:
    boss, *_, stopped = five
    assert boss.run(call, "w4") == 3
    stopped.kill(signal.SIGSTOP)
    wait_for(five[:4], ["w0", "w1", "w2", "w3"], SILENCE + 2)
    stopped.kill(signal.SIGCONT)
    calls = [stopped.run(error_of, call, "w0")]
    while "declared lost" not in calls[-1][1]:
        assert calls[-1][0] is not None
        calls.append(stopped.run(error_of, call, "w0"))
    assert calls[-1][0] is errors.PeerLost
    check_error(stopped.run(error_of, rpc.wait_for_workers, 9), errors.PeerLost, "declared lost")
    kind, _ = boss.run(error_of, call, "w4")
    assert kind in (errors.UnknownWorker, errors.PeerLost)
    for process in five[:4]:
        assert process.run(view) == ["w0", "w1", "w2", "w3"]
    assert stopped.run(error_of, rpc.shutdown)[0] is errors.PeerLost
    assert five[1].run(names) == ["w0", "w1", "w2", "w3"]
    stopped.run(join, tcp, 4)  # anew, under its old name
    assert boss.run(call, "w4") == 3


def error_of_ending_while_declared_lost(end: Callable[[], None]) -> tuple[type[Exception] | None, str]:
    """Return the error of `end` while this worker's calls fail already, but the process has not left its group."""
    own = current.here()
    own.at_declared_lost = lambda error: None
    own.directory._declared_lost("a test")
    return error_of(end)


@pytest.mark.parametrize("end", [rpc.shutdown, rpc.serve])
def test_shutdown_and_serve_of_a_worker_declared_lost_raise(tcp: str, end: Callable[[], None]) -> None:
    with processes(1) as (process,):
        process.run(join, tcp, 0)
        check_error(process.run(error_of_ending_while_declared_lost, end), errors.PeerLost, "declared lost (a test)")


def test_a_worker_that_was_stopped_for_less_than_its_lease_goes_on(five: list[Process]) -> None:
    five[2].kill(signal.SIGSTOP)
    time.sleep(SILENCE / 3)
    five[2].kill(signal.SIGCONT)
    assert five[2].run(call, "w1") == five[1].run(call, "w2") == 3
    assert five[0].run(names) == [f"w{rank}" for rank in range(COUNT)]


def test_a_stopped_worker_of_a_fixed_group_is_lost_and_comes_back() -> None:
    everyone = ["worker0", "worker1", "worker2"]
    with group(3, silence=SHORT) as made:
        caller, other, stopped = made
        assert caller.run(call, "worker2") == 3
        for _ in range(2):
            stopped.kill(signal.SIGSTOP)
            wait_until(lambda: caller.run(error_of, call, "worker2")[0] is errors.PeerSilent)
            wait_for([caller], everyone[:2], PATIENCE)
            wait_until(lambda: caller.run(refuses_calls))
            stopped.kill(signal.SIGCONT)
            for worker in everyone[:2]:
                assert stopped.run(lambda to: rpc.rpc_sync(to, operator.add, (1, 2), idempotent=True), worker) == 3
            wait_until(lambda: caller.run(error_of, call, "worker2")[0] is None)
            wait_for(made, everyone, PATIENCE)
        for process in (caller, other):
            process.begin(rpc.shutdown)
        # The others do not leave without it.
        assert stopped.run(lambda: [call("worker0") for _ in range(500)]) == [3] * 500
        stopped.run(rpc.shutdown)
        for process in (caller, other):
            process.end()


def refuses_calls() -> bool:
    """Return True once idempotent calls of a lost worker would be refused."""
    table = current.here().attached(IdempotentCalls)._table
    return any(map(table.is_dead, table._callers))


def test_the_group_goes_on_while_the_keeper_of_the_directory_is_stopped(tcp: str) -> None:
    with processes(4) as (boss, x, y, again):
        boss.run(join, tcp, 0, "boss")
        x.run(join, tcp, 1)
        y.run(join, tcp, 2)
        x.run(rpc.wait_for_workers, 3, PATIENCE)
        boss.kill(signal.SIGSTOP)
        wait_for([x, y], ["w1", "w2"], SILENCE + 2)
        assert x.run(call, "w2") == 3
        boss.kill(signal.SIGCONT)
        wait_until(lambda: boss.run(error_of, call, "w1")[0] is errors.PeerLost)
        again.run(join, tcp, 0, "boss")
        x.run(rpc.wait_for_workers, ["boss"], PATIENCE)
        assert x.run(call, "boss") == again.run(call, "w2") == 3


def test_a_server_that_was_declared_lost_ends_with_that_error(five: list[Process]) -> None:
    five[2].begin(error_of, rpc.serve)
    five[2].kill(signal.SIGSTOP)
    wait_for([five[0]], ["w0", "w1", "w3", "w4"], SILENCE + 2)
    five[2].kill(signal.SIGCONT)
    kind, text = five[2].end()
    assert kind is errors.PeerLost
    assert "start it again" in text.lower()


# Workers that do not run: stopped processes, and interpreters that one thread holds


SOON = 5.0  # seconds that an immediate event may take on a busy machine


def account() -> None:
    members.account(joins=False, losses=True)


def failure_of(to: str, function: Callable[..., Any], args: Any, timeout: float = 0) -> tuple[str, str, float]:
    """Return the type and the text of a call's error, and the seconds until it."""
    start = time.monotonic()
    kind, text = error_of(call, to, function, args, timeout)
    return kind.__name__ if kind else "", text, time.monotonic() - start


begun = threading.Event()


def stand() -> None:
    begun.set()
    threading.Event().wait(PATIENCE)


def has_begun() -> bool:
    return begun.wait(PATIENCE)


def hold_the_interpreter(seconds: int) -> None:
    """Sleep while holding the GIL, so that no other thread of the process runs."""
    ctypes.PyDLL(None).usleep(seconds * 1_000_000)


def test_a_stopped_process_is_lost_and_can_be_called_once_it_resumes() -> None:
    with group(3, silence=SHORT) as workers:
        workers[0].run(account)
        workers[1].run(account)
        workers[0].run(hold_remote, "worker1")
        assert workers[0].run(call, "worker1") == workers[1].run(call, "worker0") == 3
        workers[0].begin(failure_of, "worker1", stand, ())
        assert workers[1].run(has_begun)
        workers[1].kill(signal.SIGSTOP)
        kind, text, seconds = workers[0].end()
        assert kind == "PeerSilent"
        assert f"kill -CONT {workers[1].pid}" in text
        assert ".stand was in flight" in text
        assert SHORT <= seconds < SHORT + SOON
        told = [workers[0].run(next_event) for _ in range(2)]
        assert told[0] == ("lost", "worker1")
        assert told[1][:2] == ("worker1", "PeerSilent")
        assert "is silent" in workers[0].run(line_with, "worker1")
        assert workers[0].run(names) == ["worker0", "worker2"]
        kind, text, seconds = workers[0].run(failure_of, "worker1", operator.add, (1, 2))
        assert kind == "PeerStopped"
        assert "for 0.5 s its process is stopped" in text
        assert seconds < SHORT + SOON
        assert workers[0].run(call, "worker2") == 3
        time.sleep(2.5)  # longer than two ticks
        workers[1].kill(signal.SIGCONT)
        workers[1].run(wait_for_lines, "this process did not run", "because this worker gave no sign of life")
        assert workers[0].run(call, "worker1") == workers[1].run(call, "worker0") == 3
        assert workers[1].run(is_quiet)
        why = "could not be reached for a time, which ended the reference, and is back. Create the value again"
        wait_until(lambda: all(why in text for _, text in workers[0].run(use_held)))


def test_shutdown_does_not_wait_for_a_stopped_process() -> None:
    with group(3, silence=SHORT) as workers:
        workers[1].kill(signal.SIGSTOP)  # no worker has noticed it, or has a connection to it
        kind, text, seconds = workers[0].run(failure_of, "worker1", operator.add, (1, 2))
        assert (kind, "for 0.5 s its process is stopped" in text) == ("PeerStopped", True)
        assert SHORT <= seconds < SHORT + SOON
        assert workers[2].run(failure_of, "worker1", operator.add, (1, 2))[0] == "PeerStopped"
        with takes_less_than(SOON):
            run_all([workers[0], workers[2]], lambda _: rpc.shutdown())
        workers[1].kill(signal.SIGKILL)


def test_a_worker_stopped_for_a_moment_or_busy_is_not_silent() -> None:
    with group(2, silence=SHORT) as workers:
        workers[0].run(account)
        for _ in range(3):
            workers[1].kill(signal.SIGSTOP)
            time.sleep(SHORT / 3)
            workers[1].kill(signal.SIGCONT)
            assert workers[0].run(call, "worker1") == 3
        assert workers[0].run(failure_of, "worker1", hold_the_interpreter, (1,))[0] == ""
        assert workers[0].run(is_quiet)


@pytest.mark.parametrize("how", ["stopped", pytest.param("busy", marks=pytest.mark.nightly)])
def test_heartbeats_over_tcp_detect_a_silent_worker(how: str) -> None:
    with group(2, transport="tcp", heartbeat=SHORT) as workers:
        workers[0].run(account)
        assert workers[0].run(failure_of, "worker1", time.sleep, (3 * SHORT,))[0] == ""
        workers[0].begin(failure_of, "worker1", hold_the_interpreter if how == "busy" else time.sleep, (3,))
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
def test_without_heartbeats_a_call_over_tcp_waits_for_a_stopped_worker() -> None:
    with group(2, transport="tcp", silence=SHORT) as workers:
        workers[0].begin(failure_of, "worker1", time.sleep, (2 * SHORT,))
        workers[1].kill(signal.SIGSTOP)
        time.sleep(3 * SHORT)
        workers[1].kill(signal.SIGCONT)
        assert workers[0].end()[0] == ""


def join_and_account(name: str, where: str, rank: int = -1) -> None:
    members.join(name, where, rank, silence=SHORT)
    account()


def test_a_new_worker_may_take_the_name_of_a_silent_one(tcp: str) -> None:
    with processes(4) as (boss, other, first, second):
        boss.run(join_and_account, "boss", tcp, 0)
        other.run(join_and_account, "other", tcp)
        first.run(join_and_account, "actor", tcp)
        assert len(boss.run(rpc.wait_for_workers, 3, PATIENCE)) == 3
        first.kill(signal.SIGSTOP)
        for each in (boss, other):
            assert {each.run(next_event)[:2] for _ in range(2)} == {("lost", "actor"), ("actor", "PeerLost")}
        second.run(join_and_account, "actor", tcp)
        assert boss.run(rpc.wait_for_workers, 3, PATIENCE) is not None
        assert boss.run(call, "actor") == 3
        first.kill(signal.SIGCONT)
        assert "'actor' was declared lost" in first.run(line_with, "declared lost")
        assert boss.run(call, "actor", os.getpid, ()) == second.pid
        for each in (boss, other):
            assert each.run(is_quiet)


def test_the_loss_of_a_worker_causes_no_lookups_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
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
