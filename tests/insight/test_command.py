"""The commands, on a group of this host."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from telegrad.insight.sources import groups_here
from telegrad.rpc import current, rpc_sync, shutdown
from telegrad.witness import desk, dump
from tests.cluster import PATIENCE, Process, group

pytestmark = pytest.mark.skipif(not desk.HAS_DESKS, reason="groups cannot be looked at from outside here")
COMMAND = [sys.executable, "-m", "telegrad"]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    with group(2) as made:
        made[1].run(write_to, str(tmp_path_factory.mktemp("dumps")))
        made[0].run(rpc_sync, "worker1", abs, (-1,))
        yield made


@pytest.fixture(scope="module")
def chosen(members: list[Process]) -> list[str]:
    """The option that names their group."""
    pids = {member.pid for member in members}
    (name,) = [name for name, found in groups_here().items() if {place.pid for place in found._places} >= pids]
    return ["--group", name]


def write_to(folder: str) -> None:
    import os

    os.environ[dump.VARIABLE] = folder


def ran(*arguments: str, status: int = 0) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_why(chosen: list[str]) -> None:
    assert "Nothing waits for long. 2 workers asked, all answered" in ran("why", *chosen)
    (told,) = json.loads(ran("why", "--json", *chosen)).values()
    assert json.dumps(told).count("worker1")


def test_a_table(chosen: list[str]) -> None:
    said = ran("top", "--once", *chosen)
    assert "worker0" in said
    assert "worker1" in said


def test_a_trace(chosen: list[str], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    assert "2 workers" in ran("trace", str(path), *chosen)
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert any("builtins.abs" in name for name in names)


def test_what_workers_write_down_can_be_looked_at_later(chosen: list[str], tmp_path: pathlib.Path) -> None:
    said = dict(line.split(": ", 1) for line in ran("dump", *chosen).splitlines())
    assert "nothing was written" in said["worker0"]
    assert "there is no file of it" in ran("why", said["worker1"], status=2)
    path = tmp_path / "trace.json.gz"
    assert "1 worker" in ran("trace", str(path), "--from", said["worker1"])
    assert "is no file that a worker has written" in ran("why", __file__, status=2)


def test_a_dashboard(chosen: list[str]) -> None:
    with subprocess.Popen([*COMMAND, "dashboard", *chosen], stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        url = shown.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=PATIENCE) as page:
            assert "<title>" in page.read().decode()
        shown.send_signal(signal.SIGINT)
        assert shown.wait(PATIENCE) == 130


def test_a_worker_shows_the_group_from_the_start() -> None:
    with group(2, dashboard=0) as made:
        urls = [member.run(shown_at) for member in made]
        for url in urls:
            with urllib.request.urlopen(url, timeout=PATIENCE) as page:
                assert "<title>" in page.read().decode()
        for member in made:
            member.begin(shutdown)
        for member in made:
            member.end()
        for url in urls:
            with pytest.raises(urllib.error.URLError):
                urllib.request.urlopen(url, timeout=PATIENCE)


def shown_at() -> str:
    return current.joined().at_end.__self__.url  # type: ignore[attr-defined]


def test_nobody_is_there() -> None:
    assert "no worker of yours runs on this host" in ran("why", "--group", "none", status=2)
    assert "no worker of yours" in ran("top", "--once", "--group", "none", status=2)
