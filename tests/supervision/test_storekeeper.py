"""Tests of a store keeper of `telegrad run` that is killed, and then all workers."""

import io
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from telegrad.ext import joining, workers
from telegrad.launch import storekeeper, supervisor
from telegrad.launch.children import Output
from telegrad.launch.policy import EndServing, read
from tests.cluster import PATIENCE, wait_until
from tests.supervision.test_run import Launch, Run, launch

__all__ = ["launch"]

PATIENT = 8 * PATIENCE
pytestmark = pytest.mark.timeout(2 * PATIENT)

WORKER = """
import os
import telegrad.rpc as rpc

rpc.init_rpc()
rpc.wait_for_workers(2, timeout=60)
print("all joined", os.getpid(), flush=True)
rpc.serve()
"""


def children(process: int) -> dict[int, str]:
    """Return the processes that a process has started, and their command lines."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process:
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def pids_joined(run: Run, count: int) -> set[int]:
    """Wait until so many processes have printed that all have joined."""

    def logs() -> str:
        return "".join(path.read_text() for path in (run.folder / "logs" / "latest").glob("*.log"))

    def found() -> set[int]:
        return {int(pid) for pid in re.findall(r"all joined (\d+)\n", logs())}

    try:
        wait_until(lambda: len(found()) >= count, PATIENT)
    except AssertionError:
        raise AssertionError(logs()) from None
    return found()


@pytest.mark.nightly
@pytest.mark.parametrize("with_server", [False, True])
def test_a_killed_keeper_is_restarted_and_workers_find_their_group_again(
    launch: Launch, tmp_path: pathlib.Path, with_server: bool
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    run = launch("--role", "a", "--count", "2", "--", "worker.py")
    run.wait_for("the group meets at")
    workers = pids_joined(run, 2)
    for kills_server in (with_server, False):  # the second storekeeper is killed before it serves the store
        wait_until(lambda: "storekeeper" in str(children(run.process.pid)))
        (keeper,) = [pid for pid, command in children(run.process.pid).items() if "storekeeper" in command]
        servers = [pid for pid, command in children(keeper).items() if "directory.directory_server" in command]
        os.kill(keeper, signal.SIGKILL)
        for server in servers if kills_server else ():
            os.kill(server, signal.SIGKILL)
        run.wait_for("it is restarted")
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert len(pids_joined(run, 4)) == 4
    run.send(signal.SIGTERM)
    run.end(PATIENT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_members_that_join_after_the_end_of_the_group_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    threads: list[threading.Thread] = []
    served, twice = threading.Event(), threading.Event()

    def serve_on(_: object) -> tuple[object, int]:
        served.wait(PATIENCE)
        return object(), 0

    def end_group() -> None:
        told.append(bool(storekeeper._served))
        if len(told) == 2:
            threads.append(threading.current_thread())
            twice.set()
            sys.exit()  # ends that thread

    def lines() -> Iterator[str]:
        yield "over\n"  # before the store is served
        served.set()
        twice.wait(PATIENCE)

    for name in ("find_directory", "find_keys", "KeyValueStore", "SealedStore", "SealRenewal"):
        monkeypatch.setattr(joining, name, MagicMock())
    monkeypatch.setattr(workers, "serve_on", serve_on)
    monkeypatch.setattr(storekeeper, "_say_ready", lambda: None)
    monkeypatch.setattr(storekeeper, "_end_group", end_group)
    monkeypatch.setattr(storekeeper, "_served", [])
    monkeypatch.setattr(storekeeper, "AGAIN", 1e-3, raising=False)
    monkeypatch.setattr(os, "_exit", lambda _: None)
    monkeypatch.setattr(sys, "stdin", lines())
    storekeeper.main([str(socket.create_server(("127.0.0.1", 0)).detach()), "127.0.0.1"])
    assert told == [True, True]
    threads[0].join(PATIENCE)


def test_a_restarted_keeper_is_told_that_the_group_ends(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[io.BytesIO] = []

    def popen(*_: object, **__: object) -> SimpleNamespace:
        """Return a process whose output has ended."""
        reader, writer = os.pipe()
        os.close(writer)
        told.append(io.BytesIO())
        return SimpleNamespace(stdin=told[-1], stdout=os.fdopen(reader, "rb"), wait=lambda: -signal.SIGKILL)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(supervisor, "_key_for_children", lambda is_alone: "")
    run = supervisor.Supervisor(read("[a]", {}), "127.0.0.1", 0, 0, Output(str(tmp_path)))
    run._begin_storekeeper()
    run._ready = True
    run._do([EndServing()])
    run._hear_storekeeper()
    assert [each.getvalue() for each in told] == [b"over\n"] * 2
    run._listener.close()
