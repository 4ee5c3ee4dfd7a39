"""Tests of the end of a group: `shutdown` in remote calls, required workers, and log lines of long waits."""

import contextlib
import logging
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core import texts
from telegrad._core.rpc.joint_calls import call_all
from telegrad._core.worker.current import Worker
from telegrad.errors import WorkersFailed
from telegrad.rpc import Future, rpc_async
from tests.cluster import PATIENCE, Process, agents, group, in_background, in_threads, next_turn, run_all, wait_until
from tests.rpc.members import error_of, names

Outcome = tuple[type[Exception] | None, str]

_said: list[str] = []


def listen() -> None:
    """Record the warnings and errors of the log from now on."""
    _said[:] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: _said.append(record.getMessage())
    logging.getLogger("telegrad").addHandler(handler)


def said() -> list[str]:
    return list(_said)


# Functions that end a group, in remote calls


def shut_down() -> None:
    rpc.shutdown()


async def shut_down_in_a_coroutine() -> None:
    await next_turn()
    rpc.shutdown()


@rpc.functions.async_execution
def shut_down_in_a_callback() -> Future[None]:
    return rpc.rpc_async("worker0", int).then(lambda _: rpc.shutdown())


def shut_down_the_drop_in() -> None:
    from telegrad.compat.rpc import api

    api.shutdown()


def serve() -> None:
    rpc.serve()


@pytest.mark.parametrize(
    "function", [shut_down, shut_down_in_a_coroutine, shut_down_in_a_callback, shut_down_the_drop_in, serve]
)
def test_shutdown_by_a_remote_call_is_an_error(workers: list[Process], function: Callable[..., Any]) -> None:
    kind, text = workers[0].run(lambda: error_of(rpc.rpc_sync, "worker1", function, timeout=PATIENCE))
    assert kind is errors.UsageError
    assert "'worker1'" in text
    assert "at the end of the main program" in text
    assert workers[0].run(lambda: rpc.rpc_sync("worker1", int)) == 0  # it is still in the group


def test_a_remote_call_may_shut_a_worker_down_at_once() -> None:
    with group(2) as made:
        kind, _ = made[0].run(error_of, rpc.rpc_sync, "worker1", rpc.shutdown, (False,))
        assert issubclass(kind, errors.PeerError)
        made[0].run(rpc.shutdown)


# Required workers


@pytest.mark.parametrize("require", [True, ["worker0"], [0]], ids=str)
def test_the_death_of_a_required_worker_is_an_error_of_shutdown(require: bool | list[str] | list[int]) -> None:
    with group(3) as made:
        for process in made[1:]:
            process.run(listen)
            process.begin(leaves_with, require)
        made[0].kill()
        for process in made[1:]:
            kind, text, lines = process.end()
            assert kind is errors.PeerLost
            assert "'worker0'" in text
            assert [line for line in lines if "'worker0'" in line]


def test_a_misspelt_required_worker_leaves_the_group_intact() -> None:
    with group(2) as made:
        for name in ("wroker1", "7"):
            for end in (rpc.shutdown, rpc.serve):
                kind, text = made[0].run(partial(error_of, require=["worker1", name]), end)
                assert kind is errors.UnknownWorker
                assert repr(name) in text
        assert made[0].run(rpc.rpc_sync, "worker1", int) == made[1].run(rpc.rpc_sync, "worker0", int) == 0


def leaves_with(require: bool | list[str] | list[int]) -> tuple[type[Exception] | None, str, list[str]]:
    kind, text = error_of(rpc.shutdown, require=require)
    return kind, text, said()


def test_a_death_that_only_the_leader_noticed_is_an_error_at_all_workers() -> None:
    with group(4) as made:
        made[3].kill()
        made[3].join()
        for kind, text in run_all(made[:3], lambda _: error_of(rpc.shutdown, require=["worker3"])):
            assert kind is errors.PeerLost
            assert "'worker3'" in text


def test_workers_that_leave_in_order_are_not_missed_or_logged() -> None:
    def leave_and_tell(_: int) -> list[str]:
        listen()
        rpc.rpc_sync("worker0", int)
        rpc.rpc_sync("worker1", int)
        rpc.shutdown(require=True)
        return said()

    for _ in range(2):
        with group(3) as made:
            assert run_all(made, leave_and_tell) == [[]] * 3


def test_a_required_worker_that_leaves_early_is_an_error() -> None:
    with group(2) as made:
        made[1].run(rpc.rpc_sync, "worker0", int)  # else it may connect while the other leaves
        made[1].begin(error_of, lambda: rpc.shutdown(require=True))
        made[0].run(leave_early)
        kind, text = made[1].end()
        assert kind is errors.PeerLost
        assert "'worker0' left without the others" in text
        assert "graceful=False" in text


def leave_early() -> None:
    rpc.rpc_sync("worker1", int)
    rpc.shutdown(graceful=False)


DRIVER = """
import telegrad.rpc as rpc
options = rpc.TelegradOptions(init_method="file://{store}")
rpc.init_rpc("driver", rank=0, world_size=2, rpc_backend_options=options)
rpc.rpc_sync("w1", rpc.rpc_sync, ("driver", int))  # else that one may be about to connect as this one ends
{end}
"""
WORKER = """
import telegrad.rpc as rpc
options = rpc.TelegradOptions(init_method="file://{store}")
rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=options)
rpc.{end}
"""


@pytest.mark.parametrize(
    ("last", "why", "end"),
    [
        ("1 / 0", "its program ended without rpc.shutdown()", "shutdown(require=['driver'])"),
        pytest.param("import os; os.abort()", "was lost", "serve(require=True)", marks=pytest.mark.nightly),
        pytest.param("rpc.shutdown()", "", "serve(require=True)", marks=pytest.mark.nightly),
    ],
    ids=["raises", "aborts", "in order"],
)
def test_a_worker_whose_driver_failed_exits_with_an_error(
    tmp_path: pathlib.Path, last: str, why: str, end: str
) -> None:
    driver, worker = (
        subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)
        for text in (
            DRIVER.format(store=tmp_path / "store", end=last),
            WORKER.format(store=tmp_path / "store", end=end),
        )
    )
    driver.communicate(timeout=PATIENCE)
    _, text = worker.communicate(timeout=PATIENCE)
    if why:
        assert worker.returncode == 1
        assert why in text
        assert text.count("telegrad: worker 'driver'") == 1  # logged when it happened, without any logging set up
    else:
        assert (worker.returncode, text) == (0, "")


def test_a_lost_worker_is_logged_once() -> None:
    def call_in_vain() -> list[str]:
        with contextlib.suppress(errors.PeerError):
            rpc.rpc_sync("worker1", time.sleep, (PATIENCE,))
        for _ in range(3):
            with contextlib.suppress(errors.PeerError):
                rpc.rpc_sync("worker1", int)
        wait_until(lambda: names() == ["worker0"])  # a line may come until then
        rpc.shutdown()
        return said()

    with group(2) as made:
        made[1].run(lambda: rpc.rpc_sync("worker0", int))  # a connection each way
        made[0].run(listen)
        made[0].begin(call_in_vain)
        made[1].kill()
        (line,) = made[0].end()
        assert "'worker1' was lost" in line


# Long waits

may_end = threading.Event()


def wait_until_it_may_end() -> None:
    assert may_end.wait(PATIENCE)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(texts, "FIRST", 0.1)
    caplog.set_level(logging.INFO, "telegrad")


@pytest.mark.parametrize("who", [0, 1], ids=["the leader", "another"])
def test_shutdown_logs_the_worker_it_waits_for(impatient: None, caplog: pytest.LogCaptureFixture, who: int) -> None:
    with agents(3) as made:
        waits = [worker for worker in made if worker is not made[2]]

        def wait() -> None:
            with contextlib.suppress(errors.CallTimeout):
                made[who].shutdown(True, PATIENCE)

        def end() -> None:
            wait_until(lambda: any("'w2' did not call shutdown" in line for line in caplog.messages))
            for worker in waits:
                if worker is not made[who]:
                    in_threads(partial(worker.shutdown, True, PATIENCE), lambda: made[2].shutdown(True, 0))

        in_threads(wait, end)
    lines = [line for line in caplog.messages if "did not call shutdown" in line]
    assert f"(worker 'w{who}' continues to serve)" in lines[0]
    assert {each.levelno for each in caplog.records if "did not call shutdown" in each.getMessage()} == {logging.INFO}


@pytest.mark.parametrize(("who", "caller"), [(0, 2), (1, 2), (0, 0)], ids=["the leader", "another", "the caller"])
def test_shutdown_logs_where_calls_are_in_flight(
    impatient: None, caplog: pytest.LogCaptureFixture, who: int, caller: int
) -> None:
    may_end.clear()
    with agents(3) as made:
        call = made[caller].agent.call_async(2, wait_until_it_may_end, (), None)
        busy = "'w2'" if caller == 2 else "'w0', 'w2'"

        def end() -> None:
            wait_until(lambda: any(f"calls are in flight on {busy}" in line for line in caplog.messages))
            wait_until(lambda: made[who].leaving.missing() == ["w2"])
            may_end.set()

        in_threads(end, *[partial(worker.shutdown, True, PATIENCE) for worker in made])
        call.wait()


def misses(worker: Worker, name: str) -> bool:
    worker.leaving.ask()
    return worker.leaving.missing() == [name]


def test_a_wait_in_shutdown_reports_the_missing_worker_on_request() -> None:
    with agents(3) as made:
        leaving = [threading.Thread(target=worker.shutdown, args=(True, PATIENCE)) for worker in made]
        for thread in leaving[:2]:
            thread.start()
        for worker in made[:2]:
            wait_until(partial(misses, worker, "w2"))
            assert worker.leaving.awaited().startswith("'w2' did not call shutdown")
        assert {wait.worker for wait in texts.under_way() if wait.what == "shutdown"} >= {"w0", "w1"}
        leaving[2].start()
        for thread in leaving:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in leaving)


# Calls to several workers, and the log lines of slow ones


WORKERS = {"w1": 1, "w2": 2, "w3": 3}
SIZES = {"w1": 2_000_000_000, "w2": 500_000_000, "w3": 500_000_000}


def work(number: int) -> int:
    assert number == 1 or may_end.wait(PATIENCE)
    if number == 4:
        raise ValueError("a bug")
    return number


@pytest.mark.usefixtures("here")
def test_the_progress_of_slow_calls_to_several_workers_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(texts, "FIRST", 0.05)
    may_end.clear()
    seen: list[texts.Wait] = []

    def look_on() -> None:
        wait_until(lambda: any("1 of 3" in line for line in caplog.messages))
        seen[:] = [wait for wait in texts.under_way() if wait.what == "checkpoint.save"]
        missing.extend(seen[0].missing())
        may_end.set()

    missing: list[str] = []
    with in_background(look_on):
        found = call_all(
            WORKERS, lambda worker, number: rpc_async(worker, work, (number,)), "checkpoint.save: writing", SIZES
        )
    assert found == WORKERS
    assert missing == ["w2", "w3"]
    said = "checkpoint.save: writing: 1 of 3 workers are done, with 2.0 of 3.0 GB; waiting for 'w2', 'w3'"
    assert any(line.endswith(said) for line in caplog.messages)
    assert seen[0] not in texts.under_way()


@pytest.mark.usefixtures("here")
def test_failures_are_raised_with_and_without_log_lines_of_progress() -> None:
    may_end.set()
    for doing in ("", "checkpoint.save: writing"):
        with pytest.raises(WorkersFailed) as caught:
            call_all({"w1": 4, "w2": 4, "w3": 3}, lambda worker, number: rpc_async(worker, work, (number,)), doing)
        assert set(caught.value.errors) == {"w1", "w2"}
        assert call_all(dict[str, int](), lambda worker, number: rpc_async(worker, work, (number,)), doing) == {}
