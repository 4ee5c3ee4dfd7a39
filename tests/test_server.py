"""The example of a web server runs under `telegrad run`, while clients disconnect and workers die."""

import concurrent.futures
import http.client
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster import PATIENCE, free_port

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
INPUTS = [0.1, 0.2, 0.3, 0.4]

pytest.importorskip("aiohttp")


class Server:
    """A running server, and its output."""

    def __init__(self, folder: pathlib.Path) -> None:
        for name in ("server.py", "server.toml"):
            shutil.copy(EXAMPLES / name, folder)
        self._port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "telegrad", "run", "server.toml"],
            cwd=folder,
            env={**os.environ, "PORT": str(self._port), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.said += line

    def begin(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        connection.request("GET" if body is None else "POST", path, body if body is None else json.dumps(body))
        return connection.getresponse()

    def ask(self, path: str, body: Any = None) -> tuple[int, bytes]:
        response = self.begin(path, body)
        return response.status, response.read()

    def models(self) -> dict[str, int]:
        """Return the models that answer, with their process ids."""
        try:
            status, told = self.ask("/health")
        except ConnectionRefusedError:
            return {}
        return json.loads(told) if status == 200 else {}

    def end(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[Server]:
    made = Server(tmp_path)
    try:
        yield made
    finally:
        made.process.kill()  # ends its workers, too
        made.process.wait()


def wait_until(holds: Callable[[], object], server: Server) -> None:
    limit = time.monotonic() + 2 * PATIENCE
    while not holds():
        assert server.process.poll() is None, server.said
        assert time.monotonic() < limit, server.said
        time.sleep(0.1)


@pytest.mark.nightly
@pytest.mark.timeout(8 * PATIENCE)
def test_a_server_answers_despite_lost_workers_and_clients(server: Server) -> None:
    wait_until(lambda: len(server.models()) == 2, server)

    with concurrent.futures.ThreadPoolExecutor(16) as clients:
        answers = [*clients.map(lambda _: server.ask("/predict", INPUTS), range(64))]
    assert {status for status, _ in answers} == {200}
    assert len({tuple(round(value, 5) for value in json.loads(told)) for _, told in answers}) == 1
    assert server.ask("/predict", [1])[0] == 400

    gone = server.begin("/generate?length=1000")
    assert gone.read(3) == server.ask("/generate?length=3")[1]
    gone.close()
    wait_until(lambda: "nobody reads on: given up" in server.said, server)

    before = server.models()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    status, _ = server.ask("/predict", INPUTS)
    assert status == 503
    wait_until(lambda: len(server.models()) == 2, server)
    assert server.models().items().isdisjoint(before.items())
    wait_until(lambda: server.ask("/predict", INPUTS)[0] == 200, server)

    last = server.begin("/generate?length=50")
    assert len(last.read(1)) == 1
    server.process.send_signal(signal.SIGINT)
    assert len(last.read()) == 49
    assert server.end() == 128 + signal.SIGINT
    assert "Traceback" not in server.said
