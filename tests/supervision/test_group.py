"""Tests of groups of workers under `telegrad run`: a killed worker comes back under its name, and all end in order."""

import json
import pathlib
import re
from typing import Any

import pytest

from tests.cluster import PATIENCE, free_port
from tests.supervision.test_run import Launch, launch

__all__ = ["launch"]

PATIENT = 8 * PATIENCE  # several interpreters import torch, one after the other, on a machine that may be busy
pytestmark = pytest.mark.timeout(2 * PATIENT)

PS = """
import time
begun = time.monotonic()
import telegrad.rpc as rpc
imports = time.monotonic() - begun

if __name__ == "__main__":
    rpc.init_rpc()
    rpc.serve(require=True)
"""

SEEN = """
import os, sys, time

def imports():
    return sys.modules["__main__"].imports

def restarts():
    return int(os.environ["TELEGRAD_RESTARTS"])

def now():
    return time.monotonic()
"""

DRIVER = """
import json, os, signal, sys, threading, time
import telegrad.rpc as rpc
from telegrad import errors
import seen

rpc.init_rpc(role="driver")
rpc.wait_for_workers(3, timeout=60)
assert rpc.group("ps").names == ["ps0"] and rpc.group("s").names == ["s0"]

late, noise, over = [], [], threading.Event()  # noise: how late a busy machine lets a sleeper go on

def watch():
    while not over.is_set():
        began = time.monotonic()
        rpc.rpc_sync("s0", seen.now)
        late.append(time.monotonic() - began)
        began = time.monotonic()
        time.sleep(0.005)
        noise.append(time.monotonic() - began)

watcher = threading.Thread(target=watch)
watcher.start()
back = []
for kill in range(int(sys.argv[1])):
    pid = rpc.rpc_sync("ps0", os.getpid)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while True:
        try:
            if rpc.rpc_sync("ps0", os.getpid) != pid:
                break
        except (errors.PeerError, errors.UnknownWorker):
            time.sleep(0.005)
    back.append(time.monotonic() - killed - rpc.rpc_sync("ps0", seen.imports))
    assert rpc.rpc_sync("ps0", seen.restarts) == kill + 1
over.set()
watcher.join()
print("RESULT", json.dumps({"back": back, "late": max(late), "noise": max(noise)}), flush=True)
rpc.shutdown()
"""

ROLES = """
[driver]
command = ["python", "driver.py", "{kills}"]
[ps]
command = "python ps.py"
serves = true
restarts = 100
[s]
"""


def write(folder: pathlib.Path, kills: int) -> None:
    for name, text in {"ps": PS, "seen": SEEN, "driver": DRIVER}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "roles.toml").write_text(ROLES.format(kills=kills))


def results(launch: Launch) -> tuple[dict[str, Any], str]:
    code, said = launch("roles.toml").end(PATIENT)
    assert code == 0, said
    assert "all work is done: ps0, s0 end" in said
    assert "is killed" not in said, "servers end by themselves"
    return json.loads(re.search(r"RESULT (.*)", said).group(1)), said


def test_a_killed_worker_comes_back_under_its_name_and_all_end(launch: Launch, tmp_path: pathlib.Path) -> None:
    write(tmp_path, kills=1)
    _, said = results(launch)
    assert "ps0 ended with signal SIGKILL after" in said
    assert "Traceback" not in said


@pytest.mark.nightly
def test_many_kills_do_not_delay_calls_to_other_workers(launch: Launch, tmp_path: pathlib.Path) -> None:
    write(tmp_path, kills=5)
    found, _ = results(launch)
    print(found)
    assert found["back"][0] < 2.0  # later restarts take longer, since the worker fails in quick succession
    assert found["late"] < 0.1 + 2 * found["noise"]


@pytest.mark.nightly
def test_supervisors_on_two_hosts_make_one_group(launch: Launch, tmp_path: pathlib.Path) -> None:
    port = str(free_port())
    (tmp_path / "meet.py").write_text(
        "import telegrad.rpc as rpc\nrpc.init_rpc()\nrpc.wait_for_workers(['s0', 's1', 'driver0'], timeout=60)\n"
        "print('met', *[worker.name for worker in rpc.workers()])\nrpc.shutdown()\n"
    )
    (tmp_path / "roles.toml").write_text("[driver]\ncommand = 'meet.py'\nnode = 0\n[s]\n")
    runs = [launch("roles.toml", "--master", f"127.0.0.1:{port}", "--node", str(node)) for node in range(2)]
    ended = [run.end(PATIENT) for run in runs]
    assert [code for code, _ in ended] == [0, 0], ended
    assert re.search(r"\[driver0\] met .*s1", ended[0][1])
    assert "s1 ended with exit code 0" in ended[1][1]
