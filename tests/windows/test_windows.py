"""Workers run in fresh interpreters from which the folder `without` has removed what Windows lacks."""

import os
import pathlib
import runpy
import subprocess
import sys
from typing import Any

import pytest

from telegrad._core.stores import raw_stores as tcp
from tests.cluster import PATIENCE, free_port

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PATIENT = 4 * PATIENCE
LACKING = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE / "without", ROOT)))}

pytestmark = pytest.mark.timeout(PATIENT)


def start(folder: pathlib.Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=LACKING, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def check(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=PATIENT)
    assert (process.returncode, out) == (0, "done\n"), err


@pytest.mark.nightly
def test_local_workers(tmp_path: pathlib.Path) -> None:
    check(start(tmp_path, str(HERE / "program.py"), "local"))


@pytest.mark.nightly
def test_workers_that_join_over_a_store(tmp_path: pathlib.Path) -> None:
    port = str(free_port())
    for process in [start(tmp_path, str(HERE / "program.py"), "joining", rank, port) for rank in "01"]:
        check(process)


POLLER = """
import socket, threading
from telegrad._core.transport.poller import Poller

class Source:
    prompt = False
    def __init__(self, sock):
        self.sock = sock
    def fileno(self):
        return self.sock.fileno()

poller = Poller()
(here, there), (closed, other) = socket.socketpair(), socket.socketpair()
gone = Source(closed)
poller.watch(gone, read=True)
found = []

def lead():
    while not found:
        found.extend(poller.poll(None))

leader = threading.Thread(target=lead, daemon=True)
leader.start()
poller.forget(gone)
closed.close()
there.send(b"x")
poller.watch(Source(here), read=True)
leader.join(30)
assert found[0][0].sock is here
print("done")
"""


def test_a_sleeping_poller_notices_a_new_connection(tmp_path: pathlib.Path) -> None:
    check(start(tmp_path, "-c", POLLER))


@pytest.mark.parametrize(
    ("command", "code", "said"), [("run", 1, "it needs Linux or macOS"), ("why", 2, "from outside on Linux only")]
)
def test_commands_that_need_unix_say_so(tmp_path: pathlib.Path, command: str, code: int, said: str) -> None:
    process = start(tmp_path, "-m", "telegrad", command)
    _, err = process.communicate(timeout=PATIENT)
    assert process.returncode == code
    assert said in err
    assert "Traceback" not in err


def test_the_store_on_windows_does_not_use_libuv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    tcp_store: Any = runpy.run_path(str(pathlib.Path(tcp.__file__)))["_store"]
    monkeypatch.undo()
    served = tcp_store("127.0.0.1", 0, is_master=True, multi_tenant=True)
    joined = tcp_store("127.0.0.1", served.port, is_master=False)
    joined.set("key", "value")
    assert served.get("key") == b"value"
    assert not served.libuvBackend
