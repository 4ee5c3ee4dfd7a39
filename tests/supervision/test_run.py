"""Tests of `telegrad run` with real programs, which need no torch."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from telegrad.launch import supervisor
from tests import test_local
from tests.cluster import PATIENCE, is_over, wait_until

pytestmark = pytest.mark.timeout(4 * PATIENCE)

Launch = Callable[..., "Run"]


class Run:
    """A run of `telegrad run`, and its output so far."""

    def __init__(self, folder: pathlib.Path, *arguments: str, **environment: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "telegrad", "run", *arguments],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""

    def wait_for(self, words: str) -> str:
        """Wait for the first line that contains `words`, and return it."""
        for line in self.process.stdout:
            self.said += line
            if words in line:
                return line
        raise AssertionError(f"{words!r} was not said: {self.said}")

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, patience: float = 2 * PATIENCE) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=patience)
        self.said += out
        return self.process.returncode, self.said

    def log(self, name: str) -> str:
        return (self.folder / "logs" / "latest" / f"{name}.log").read_text()


@pytest.fixture
def launch(tmp_path: pathlib.Path) -> Iterator[Launch]:
    made: list[Run] = []

    def begin(*arguments: str, **environment: str) -> Run:
        made.append(Run(tmp_path, *arguments, **environment))
        return made[-1]

    yield begin
    for run in made:
        run.process.kill()
        run.process.wait()
        run.process.stdout.close()


def test_output_of_many_workers_is_merged_and_kept(launch: Launch) -> None:
    script = 'echo out $TELEGRAD_NAME {number} $EXTRA; printf "no end of $TELEGRAD_NAME" >&2'
    run = launch("--role", "a", "--count", "20", "--env", "EXTRA={name}!", "--", "sh", "-c", script)
    code, said = run.end()
    assert code == 0, said
    for number in range(20):
        name = f"a{number}"
        assert f"[{name}] out {name} {number} {name}!\n" in said
        assert f"[{name}] no end of {name}\n" in said
        assert f"out {name} {number} {name}!\n" in run.log(name)
        assert f"no end of {name}" in run.log(name)
    assert "starting 20 a; the group meets at 127.0.0.1:" in run.log("telegrad")


def test_a_host_announces_only_its_own_workers(launch: Launch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "roles.toml").write_text("[driver]\ncommand = ['true']\nnode = 0\n[s]\ncommand = ['true']\ncount = 2\n")
    run = launch("roles.toml", "--master", "127.0.0.1:1", "--node", "1")
    assert run.end()[0] == 0
    assert "starting 2 s; the group meets at 127.0.0.1:1, its logs" in run.log("telegrad")


def test_a_worker_that_crashes_again_and_again_ends_the_group(launch: Launch) -> None:
    run = launch("--restarts", "2", "--", "sh", "-c", "echo life $TELEGRAD_RESTARTS; exit 3")
    began = time.monotonic()
    code, said = run.end()
    assert code == 3
    assert re.findall(r"\[worker0\] life (\d)", said.partition("Its last lines")[0]) == ["0", "1", "2"]
    assert "worker0 ended with exit code 3 after 0." in said
    assert "2 restarts within 300 s are used up: the group ends" in said
    assert re.search(r"worker0\.log has its whole output. Its last lines:\n\[telegrad\]     life 0\n", said)
    assert run.log("worker0").count("--- restarted") == 2
    assert 1.0 < time.monotonic() - began < PATIENCE


def test_a_worker_that_has_printed_nothing_has_no_last_lines(launch: Launch) -> None:
    code, said = launch("--restarts", "0", "--", "sh", "-c", "exit 3").end()
    assert code == 3
    assert "worker0.log has its whole output." in said
    assert "last lines" not in said


# The acts of a worker before it has joined, the name of its end, and its last line.
DEATHS: dict[str, tuple[str, str, str]] = {
    **{how: test_local.DEATHS[how] for how in ("raises", "killed")},
    "another key": (
        "from telegrad import rpc; rpc.init_rpc(rpc_backend_options=rpc.TelegradOptions(key='another key' * 2))",
        "exit code 1",
        "Give all workers the same key",
    ),
}


@pytest.mark.parametrize("how", [*list(DEATHS)[:-1], pytest.param("another key", marks=pytest.mark.nightly)])
def test_a_worker_that_dies_before_the_group_forms_ends_it_at_once(
    launch: Launch, tmp_path: pathlib.Path, how: str
) -> None:
    act, end, line = DEATHS[how]
    (tmp_path / "dies.py").write_text(act)
    driver = ["--role", "driver", "--command", "sh -c 'sleep 600'"]
    run = launch(*driver, "--role", "actor", "--restarts", "0", "--command", "dies.py")
    code, said = run.end(4 * PATIENCE)  # the import of torch takes half a minute if twenty programs run at once
    assert code != 0
    assert re.search(f"actor0 ended with {end} after .*: the group ends", said)
    assert line in said.partition("Its last lines")[2]


SLEEPS = ["sh", "-c", "echo sleeps; sleep 600"]
STUBBORN = ["sh", "-c", 'trap "" INT TERM HUP; echo sleeps; while true; do sleep 0.1; done']


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_to_the_workers(launch: Launch, number: signal.Signals) -> None:
    script = f'trap "echo {number.name} came; exit 0" {number.name[3:]}; echo sleeps; while true; do sleep 0.05; done'
    run = launch("--", "sh", "-c", script)
    run.wait_for("sleeps")
    run.send(number)
    code, said = run.end()
    assert code == 128 + number
    assert f"[worker0] {number.name} came" in said


def test_the_second_interrupt_kills_the_workers(launch: Launch) -> None:
    run = launch("--grace", "600", "--", *STUBBORN)
    run.wait_for("] sleeps")
    run.send(signal.SIGINT)
    run.wait_for("a second signal kills")
    assert run.process.poll() is None
    run.send(signal.SIGINT)
    code, said = run.end()
    assert code == 130
    assert "SIGINT: all workers are killed" in said
    assert said.count("a second signal kills") == 1


def test_a_worker_that_ignores_the_end_is_killed(launch: Launch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "roles.toml").write_text(
        f"""
        grace = 0.3
        [stubborn]
        command = {STUBBORN!r}
        [fails]
        command = ["sh", "-c", "while ! test -e go; do sleep 0.05; done; exit 5"]
        on_failure = "end"
        """
    )
    run = launch("roles.toml")
    run.wait_for("] sleeps")
    (tmp_path / "go").touch()
    code, said = run.end()
    assert code == 5
    assert "stubborn0 did not end within 0.3 s and is killed" in said


def test_all_workers_of_a_role_are_restarted_together(launch: Launch) -> None:
    once = (
        "touch up{number}; test {number} = 0 || exec sleep 600; until test -e up1 && test -e up2; do sleep 0.05; done"
    )
    script = f"echo life $TELEGRAD_RESTARTS; test $TELEGRAD_RESTARTS = 1 && exit 0; {once}; exit 1"
    run = launch("--count", "3", "--on-failure", "restart-role", "--", "sh", "-c", script)
    code, said = run.end()
    assert code == 0
    assert sorted(re.findall(r"\[worker(\d)\] life 1", said)) == ["0", "1", "2"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_all_workers_end_with_a_killed_supervisor(launch: Launch) -> None:
    script = "echo pid $$; sh -c 'echo pid $$; trap \"\" TERM HUP; while true; do sleep 0.1; done'"
    run = launch("--count", "2", "--", "sh", "-c", script)
    pids = [int(run.wait_for("pid").split()[-1]) for _ in range(4)]
    assert not any(map(is_over, pids))
    run.send(signal.SIGKILL)
    wait_until(lambda: all(map(is_over, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_that_a_worker_has_started_ends_with_it(launch: Launch) -> None:
    run = launch("--count", "1", "--", "sh", "-c", "sleep 600 & echo pid $!")
    pid = int(run.wait_for("pid").split()[-1])
    assert run.end()[0] == 0
    wait_until(lambda: is_over(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="has no setsid")
def test_a_process_that_left_its_group_does_not_keep_the_run(launch: Launch, tmp_path: pathlib.Path) -> None:
    run = launch("--", "sh", "-c", "setsid yes & while ! test -e go; do sleep 0.05; done; exit 0")
    run.wait_for("] y")
    run.process.stdout.close()
    (tmp_path / "go").touch()
    assert run.process.wait(PATIENCE / 3) == 0  # the log grows by 100 MB/s until then


@pytest.mark.parametrize("command", ["no-such-program", "/", "{name}-does-not-exist"])
def test_a_missing_command_ends_the_run(launch: Launch, command: str) -> None:
    run = launch("--role", "good", "--command", "sleep 600", "--role", "bad", "--count", "3", "--", command)
    code, said = run.end()
    assert code == 127
    assert "bad0 could not be started: no program" in said


def test_roles_and_files_may_begin_as_options_do(launch: Launch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "-h.py").write_text("import os, sys\nprint(os.environ['TELEGRAD_NAME'], sys.argv)")
    code, said = launch("--role=--", "--command=-h.py -c", "--role=-h", "--", "-h.py").end()
    assert code == 0, said
    assert all(line in said for line in ("[--0] --0 ['-h.py', '-c']\n", "[-h0] -h0 ['-h.py']\n"))


def test_a_signal_shows_the_state_of_each_worker(launch: Launch) -> None:
    run = launch("--", *SLEEPS)
    run.wait_for("] sleeps")
    run.send(signal.SIGUSR1)
    assert re.search(r"\[telegrad\] worker0 runs for \d s, restarts: 0, process \d+", run.wait_for("runs for"))
    run.send(signal.SIGTERM)
    assert run.end()[0] == 143


def test_the_run_goes_on_without_a_reader_of_its_output(launch: Launch, tmp_path: pathlib.Path) -> None:
    run = launch("--", "sh", "-c", "echo begun; while ! test -e go; do sleep 0.05; done; seq 9999; exit 0")
    run.wait_for("begun")
    run.process.stdout.close()
    (tmp_path / "go").touch()
    assert run.process.wait(PATIENCE) == 0
    assert "9999" in run.log("worker0")


def test_a_store_that_cannot_be_served_ends_the_group(launch: Launch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    code, said = launch("--", *SLEEPS, PYTHONPATH=str(tmp_path)).end()
    assert code == 1
    assert "ImportError: there is no torch here" in said
    assert "the group's store could not be served (exit code 1): the group ends" in said


PRINTS = """
import os, subprocess, sys
path = os.environ["TELEGRAD_KEY_FILE"]
read = "import os; print(len(open(os.environ['TELEGRAD_KEY_FILE']).read().strip()))"
length = subprocess.check_output([sys.executable, "-c", read], text=True).strip()  # as the process of a launcher would
print("the key in", path, "has", length, "bytes", "tgk1-" in str(os.environ), flush=True)
"""


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_a_generated_key_is_in_no_environment(launch: Launch, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    for name in ("TELEGRAD_KEY", "TELEGRAD_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    program = PRINTS if how == "ends" else PRINTS + "import signal; signal.pause()"
    run = launch("--", sys.executable, "-c", program, XDG_STATE_HOME="/proc/none", HOME="/proc/none")
    line = run.wait_for("the key in")
    assert line.split("has ")[1] == "48 bytes False\n"
    folder = pathlib.Path(line.split()[4]).parent
    if how == "ends":
        assert run.end()[0] == 0
        assert not folder.exists()
    else:
        run.send(signal.SIGKILL)
        run.end()
        wait_until(lambda: not folder.exists())


def test_names_have_colours_on_a_terminal(tmp_path: pathlib.Path) -> None:
    ours, theirs = os.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "telegrad", "run", "--", "echo", "hello"],
        cwd=tmp_path,
        env={**environment, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # raised at the end of the terminal
        while data := terminal.read(4096):
            said += data
    assert process.wait(PATIENCE) == 0
    assert re.search(rb"\033\[\d\dm\[worker0\]\033\[0m hello", said)
    assert b"\033[31m[telegrad]\033[0m worker0 ended" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], "--on-failure"),
        (["nowhere.toml"], "nowhere.toml"),
        ([], "there is no role to run"),
        (["train.py"], "`telegrad run -- python train.py` starts a worker"),
        (["--env", "x", "--", "true"], "write NAME=VALUE"),
        (["--master", "x", "--", "true"], "write HOST:PORT"),
        (["--node", "1", "--", "true"], "needs the --master"),
        (["--node", "-1", "--master", "127.0.0.1:1", "--", "true"], "no role runs on node -1"),
        (["--master", "192.0.2.1:29500", "--", "true"], "assign requested address"),
        (["--logs", "/dev/null", "--", "true"], "logs: the folder '/dev/null' cannot be made: File exists"),
    ],
    ids=str,
)
def test_the_command_line_explains_its_options_and_errors(
    arguments: list[str],
    words: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: object = supervisor.main(arguments)
    except SystemExit as error:  # of argparse
        code = error.code
    assert code == (0 if "--help" in arguments else supervisor.WRONG)
    assert words in "".join(capsys.readouterr())
