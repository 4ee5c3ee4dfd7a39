"""What docs/running.md tells people to do works, and what it and docs/directory.md list as said is said."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import telegrad
from telegrad import __main__ as command_line
from tests.cluster import PATIENCE, free_port

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "running.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
DIRECTORY = (ROOT / "docs" / "directory.md").read_text().partition("## What it says, and what to do")[2]
SYMPTOMS = sorted(set(re.findall(r"^\| `([^`]+)` \|", PAGE + DIRECTORY, re.MULTILINE)))
PATIENT = 4 * PATIENCE

Start = Callable[..., subprocess.Popen[str]]


def program_with(words: str) -> str:
    (found,) = [text for text in PROGRAMS if words in text]
    return str(found)


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Starts a program, or a command of this package, in the folder of the test."""
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


def test_local_workers(start: Start) -> None:
    assert "[0, 1, 4, 9]" in output_of(start(program_with("telegrad.local(4)")))


def test_one_script_for_all(start: Start) -> None:
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


def test_workers_started_by_hand(start: Start) -> None:
    place = f"127.0.0.1:{free_port()}"
    commands = [line.partition("#")[0].replace("host0:29500", place) for line in COMMANDS if "--rank" in line]
    made = [start(DRIVER.format(place=place)), *map(start, commands)]
    assert [output_of(process) for process in made] == ["", "", ""]


def test_a_worker_program_of_ones_own(start: Start, tmp_path: pathlib.Path) -> None:
    output_of(start(program_with("rpc.serve(require=True)"), MEET=f"file://{tmp_path}/store"))


def test_workers_that_come_and_go(start: Start) -> None:
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


def templates() -> Iterator[str]:
    """All texts of the package, with a mark where something is filled in."""
    for path in pathlib.Path(telegrad.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[srdg]|%\.\df", "\0", node.value)


ALL = "\n".join(templates())


def pattern_of(symptom: str) -> str:
    """It, or with marks in the place of names and numbers."""
    parts = re.split(r"((?<!\w)'[^']*'|\b\d+\b|\b[A-Z]+_[A-Z]+\b)", symptom)
    return "".join(f"(?:{re.escape(part)}|\0)" if number % 2 else re.escape(part) for number, part in enumerate(parts))


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_what_the_page_says_is_said_is_said(symptom: str) -> None:
    assert re.search(pattern_of(symptom), ALL)


def test_a_symptom_that_nobody_prints_is_found_out() -> None:
    assert not re.search(pattern_of("the worker 'x' has gone fishing"), ALL)
    assert len(SYMPTOMS) > 15


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_run_command", interrupted)
    monkeypatch.setattr(sys, "argv", ["telegrad", "run"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 130
    assert capfd.readouterr() == ("", "")
