"""The commands for a group on this host."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from telegrad import rpc
from telegrad._core.sockets import HAS_UNIX
from telegrad._core.worker import current
from telegrad.errors import UsageError
from telegrad.insight import command
from telegrad.insight.seen_groups import HostGroup, groups_here
from telegrad.reporting import introspection
from telegrad.reporting.debug_server import DebugAddress
from telegrad.rpc import rpc_sync, shutdown
from tests.cluster import PATIENCE, Process, free_port, group, wait_until

pytestmark = pytest.mark.skipif(not HAS_UNIX, reason="groups cannot be looked at from outside here")
COMMAND = [sys.executable, "-m", "telegrad"]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    with group(2) as made:
        made[1].run(write_to, str(tmp_path_factory.mktemp("dumps")))
        made[0].run(rpc_sync, "worker1", abs, (-1,))
        yield made


@pytest.fixture(scope="module")
def chosen(members: list[Process]) -> list[str]:
    pids = {member.pid for member in members}
    (name,) = [name for name, found in groups_here().items() if {place.pid for place in found._places} >= pids]
    return ["--group", name]


def write_to(folder: str) -> None:
    os.environ[introspection.VARIABLE] = folder


def ran(*arguments: str, status: int = 0) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("argument", ["why", "--help"])
def test_a_closed_pipe_is_no_error(members: list[Process], argument: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, argument], stdout=write, stderr=subprocess.PIPE, timeout=PATIENCE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
@pytest.mark.parametrize("command", ["why", "top --group {}", "trace {file} --group {}", "--help"])
def test_output_that_cannot_be_written_is_one_line(
    chosen: list[str], tmp_path: pathlib.Path, command: str, redirection: str
) -> None:
    given = command.format(chosen[1], file=tmp_path / "trace.json").split()
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *COMMAND, *given]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line[:10]) == (2, "telegrad: ")


def test_why(chosen: list[str]) -> None:
    assert "Nothing waits for long, except perhaps main threads that sleep. 2 workers" in ran("why", *chosen)
    (told,) = json.loads(ran("why", "--json", *chosen)).values()
    assert json.dumps(told).count("worker1")


@pytest.mark.nightly
def test_a_worker_of_the_drop_in_mode_that_waits_for_the_store_is_shown(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "lonely.py"
    program.write_text(
        "import torch.distributed.rpc as rpc\n"
        f"options = rpc.TensorPipeRpcBackendOptions(init_method='tcp://127.0.0.1:{free_port()}')\n"
        "rpc.init_rpc('lonely', rank=1, world_size=2, rpc_backend_options=options)\n"
    )
    with subprocess.Popen([*COMMAND, str(program)], stderr=subprocess.DEVNULL) as started:
        wait_until(lambda: any(found.is_called("lonely") for found in groups_here().values()))
        started.kill()


def test_a_table(chosen: list[str]) -> None:
    said = ran("top", "--once", *chosen)
    assert "worker0" in said
    assert "worker1" in said


def test_a_trace(chosen: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert command.main(["trace", str(path), *chosen]) == 0  # in this process, which has imported torch
    assert "2 workers" in capsys.readouterr().out
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert any("builtins.abs" in name for name in names)


def test_dumps_of_workers_can_be_read_later(
    chosen: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = dict(line.split(": ", 1) for line in ran("dump", *chosen).splitlines())
    assert "nothing was written" in said["worker0"]
    assert "none of the files is from it" in ran("why", said["worker1"], status=2)
    assert command.main(["trace", str(tmp_path / "trace.json.gz"), "--from", said["worker1"]]) == 0
    assert "1 worker" in capsys.readouterr().out
    assert "is not a file that a worker wrote" in ran("why", __file__, status=2)


def test_a_dashboard(chosen: list[str]) -> None:
    with subprocess.Popen([*COMMAND, "dashboard", *chosen], stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        with urllib.request.urlopen(shown.stdout.readline().strip(), timeout=PATIENCE) as page:
            assert "<title>" in page.read().decode()
        shown.send_signal(signal.SIGINT)
        assert shown.wait(PATIENCE) == 130


def test_a_worker_shows_the_group_from_the_start() -> None:
    with group(2, dashboard=0) as made:
        urls = [member.run(lambda: current.joined().at_end[-1].__self__.url) for member in made]  # type: ignore[attr-defined]
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


def test_a_taken_port_does_not_harm_the_group() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, group(2, dashboard=taken.getsockname()[1]) as made:
        assert made[0].run(pow, 2, 3) == 8
        assert made[0].run(lambda: rpc.rpc_sync("worker1", pow, (2, 3))) == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["why", "a.json", "--group", "x"], "--group selects a group of this host"),
        (["trace", "trace.json", "--from", "a.json", "--group", "x"], "--group selects a group of this host"),
        (["top", "--interval", "nan"], "invalid number of seconds value: 'nan'"),
        (["top", "--interval", "inf"], "invalid number of seconds value: 'inf'"),
    ],
)
def test_meaningless_options_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_commands_without_a_worker_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "groups_here", dict)
    for arguments in (["why"], ["why", "--group", "none"], ["top", "--once"], ["dump"], ["trace", "trace.json"]):
        assert command.main(arguments) == 2
        assert "no worker of this user was found on this host" in capsys.readouterr().err


def test_choosing_one_of_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {
        "b7c1": HostGroup([DebugAddress("", 1, -1, "ps", 0), DebugAddress("", 2, -1, "trainer", 0)], {"train.py"}),
        "b8d2": HostGroup([DebugAddress("", 3, -1, "worker0", 0)], {"serve.py"}),
    }
    monkeypatch.setattr(command, "groups_here", lambda: there)
    for name in ("b7", "train.py", "ps"):
        assert command._one_group(name) is there["b7c1"]
    with pytest.raises(UsageError, match=r"b7c1 \(train.py: ps and trainer\); b8d2 \(serve.py: worker0\)"):
        command._one_group("")
    with pytest.raises(UsageError, match="no group 'b9' was found here; the groups are: b7c1"):
        command._one_group("b9")


def test_errors_are_one_line(chosen: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for said, arguments in (
        ("there is no such folder", ["trace", str(tmp_path / "nowhere" / "trace.json"), *chosen]),
        ("use another port", ["dashboard", "--port", "80000", *chosen]),
        ("cannot be read: No such file", ["why", str(tmp_path / "none.json")]),
    ):
        assert command.main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_too_many_groups_are_not_all_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    there = {name: HostGroup([DebugAddress("", 1, -1, name, 0)]) for name in ("a", "b")}
    monkeypatch.setattr(command, "groups_here", lambda: there)
    monkeypatch.setattr(command, "LONGEST", -1.0)
    assert command.main(["why"]) == 2
    assert "not all of 2 groups were queried: choose one with --group" in capsys.readouterr().err
