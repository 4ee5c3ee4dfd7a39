"""The programs and commands of docs/running.md work."""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from telegrad import __main__ as command_line
from tests.cluster import PATIENCE, free_port

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "running.md").read_text().replace("\\\n", "")  # each command on a line of its own
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
PATIENT = 4 * PATIENCE

Start = Callable[..., subprocess.Popen[str]]


def program_with(words: str) -> str:
    (found,) = [text for text in PROGRAMS if words in text]
    return str(found)


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Start a program, or a command of this package, in the folder of the test."""
    made: list[subprocess.Popen[str]] = []

    def begin(what: str, **environment: str) -> subprocess.Popen[str]:
        if what.startswith("python -m telegrad"):
            command = [sys.executable, *what.split()[1:]]
        else:
            path = tmp_path / f"program{len(made)}.py"
            path.write_text(what)
            command = [sys.executable, str(path)]
        made.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.communicate()


def output_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=PATIENT)
    assert process.returncode == 0, out + err
    return out


pytestmark = pytest.mark.timeout(2 * PATIENT)


@pytest.mark.nightly
def test_local_workers(start: Start) -> None:
    assert "[0, 1, 4, 9]" in output_of(start(program_with("telegrad.local(4)")))


def test_one_script_for_all_workers(start: Start) -> None:
    port = str(free_port())
    out = output_of(start(program_with("mp.spawn"), MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
    assert "tensor([4., 4.])" in out


DRIVER = """
import telegrad.rpc as rpc
options = rpc.TelegradOptions(init_method="tcp://{place}")
rpc.init_rpc("driver", rank=0, world_size=3, rpc_backend_options=options)
assert [rpc.rpc_sync(name, pow, (2, 3)) for name in ("ps", "trainer")] == [8, 8]
rpc.shutdown()
"""


@pytest.mark.nightly
def test_workers_started_by_hand(start: Start) -> None:
    place = f"127.0.0.1:{free_port()}"
    commands = [line.partition("#")[0].replace("host0:29500", place) for line in COMMANDS if "--rank" in line]
    made = [start(DRIVER.format(place=place)), *map(start, commands)]
    assert [output_of(process) for process in made] == ["", "", ""]


@pytest.mark.nightly
def test_a_custom_worker_program(start: Start, tmp_path: pathlib.Path) -> None:
    output_of(start(program_with("rpc.serve(require=True)"), MEET=f"file://{tmp_path}/store"))


@pytest.mark.nightly
def test_workers_that_join_and_leave(start: Start) -> None:
    place = f"127.0.0.1:{free_port()}"
    (command,) = [line.replace("host0:29500", place) for line in COMMANDS if "--rank" not in line and "-m" in line]
    driver = start(program_with("rpc.on_join"), MEET=f"tcp://{place}")
    workers = [start(command.replace(" a ", f" {name} ")) for name in ("a", "b")]
    out = output_of(driver)
    assert "['driver', " in out
    assert all(f"{number} {number**2}\n" in out for number in range(10))
    assert [output_of(process) for process in workers] == ["", ""]


def test_every_program_and_command_is_run_here() -> None:
    assert len(PROGRAMS) == 4
    assert len([line for line in COMMANDS if "worker" in line]) == 3
    assert "-c constraints.txt" in PAGE
    assert "torch==" in (ROOT / "constraints.txt").read_text()


def test_ctrl_c_during_the_import_of_a_command_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "_run_command", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "argv", ["telegrad", "run"])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 130
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("safe", [False, True])
def test_the_installed_command_imports_from_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, safe: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["telegrad", "--version"])
    monkeypatch.setattr(sys, "path", ["the command's", *sys.path])
    monkeypatch.setattr(sys, "flags", SimpleNamespace(safe_path=safe))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        command_line.main()
    assert sys.path[0] == ("the command's" if safe else str(tmp_path))
