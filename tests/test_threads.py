"""Threads of this package start when they are first needed, and torch has the configured number of threads."""

import os
import pathlib
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from telegrad._core import threads
from telegrad._core.threads import Background, Exclusive, results, wait_for_torch
from telegrad.errors import UsageError
from tests.cluster import PATIENCE, in_threads


def test_a_failing_function_does_not_prevent_calls_of_others(caplog: pytest.LogCaptureFixture) -> None:
    assert list(results([lambda number: number + 1, lambda number: number / 0, lambda number: 2 * number], 4)) == [5, 8]
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_thread_that_many_request_is_started_once() -> None:
    runs: list[str] = []
    gate = threading.Event()

    def run() -> None:
        runs.append(threading.current_thread().name)
        gate.wait(PATIENCE)

    thread = Background("wanted", run)
    thread.join(0)  # the thread was not requested yet
    in_threads(*[thread.want] * 8)
    gate.set()
    thread.join(PATIENCE)
    assert runs == ["wanted"]


def test_torch_prints_nothing_about_a_store_whose_server_has_ended(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    threads._torchs_level.cache_clear()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(2))
    wait_for_torch(PATIENCE, first.set, "key", "value")
    del server
    with pytest.raises(RuntimeError):
        wait_for_torch(PATIENCE, first.compare_set, "key", "", "other")
    assert capfd.readouterr().err == ""
    with pytest.raises(RuntimeError):
        second.compare_set("key", "", "other")
    assert "TCPStore.cpp" in capfd.readouterr().err


def test_a_lock_refuses_the_thread_that_holds_it_and_no_other() -> None:
    lock = Exclusive("a look")
    with lock, pytest.raises(UsageError, match="a signal handler interrupted a look"), lock:
        pass

    def take() -> None:
        with lock:
            pass

    in_threads(*[take] * 4)


def test_a_thread_that_could_not_start_starts_at_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    thread = Background("wanted", lambda: runs.append(True))

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            thread.want()
    thread.want()
    thread.join(PATIENCE)
    assert runs == [True]


def test_the_end_of_threads_at_exit_calls_no_hook_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    thread = threads.Thread(sys.exit, "ends")
    thread.start()
    thread.join(PATIENCE)
    assert not failed


def test_a_thread_does_not_wait_for_itself() -> None:
    ended = threading.Event()

    def run() -> None:
        thread.join(PATIENCE)
        ended.set()

    thread = Background("wanted", run)
    thread.want()
    assert ended.wait(PATIENCE)


PROGRAM = """
import os, threading
import torch
import telegrad.rpc as rpc
from tests.cluster import free_port

def begun_by_torch():
    before = set(os.listdir("/proc/self/task"))
    layer, inputs = torch.nn.Linear(128, 128), torch.ones(32, 128)
    for _ in range(10):
        torch.relu(layer(inputs)).sum().backward()
    begun = len(set(os.listdir("/proc/self/task")) - before)
    return threading.current_thread() is threading.main_thread(), begun

torch.set_num_threads(1)
options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}")
rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
assert rpc.rpc_sync("w0", begun_by_torch) == (False, 0)
rpc.shutdown()
"""


@pytest.mark.nightly
@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="nothing tells of a process's threads")
def test_torch_has_the_programs_number_of_threads_beside_a_call() -> None:
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent.parent)}
    environment.pop("OMP_NUM_THREADS", None)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert ran.returncode == 0, ran.stderr


def test_the_start_of_a_thread_that_never_runs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LONGEST_START", 0.1)
    monkeypatch.setattr(threads.Thread, "_bootstrap", lambda _: None)  # as if the thread ended before its first step
    with pytest.raises(RuntimeError, match="is enough memory left for it"):
        threads.Thread(lambda: None, "one").start()
