"""Workers that `telegrad.local` starts, and that are started by hand with `python -m telegrad worker`."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import telegrad
from telegrad import errors
from telegrad.ext import workers
from telegrad.ext.host import state_of
from telegrad.ext.workers import RendezvousStore
from telegrad.launch import local, worker_command
from tests.cluster import PATIENCE, free_port, is_over, wait_until
from tests.test_forked import in_child

PATIENT = 4 * PATIENCE  # time for several imports of torch on a busy machine


def run(text: str, tmp_path: pathlib.Path, **options: Any) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(text)
    return subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENT, cwd=tmp_path, **options
    )


@pytest.mark.nightly
def test_without_numpy_nothing_is_printed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")
    ran = run("import telegrad\nif __name__ == '__main__': telegrad.local(1).shutdown()", tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


WHOLE = """
import gc, os, signal, sys, threading, time
import telegrad
from beside import twice
from telegrad.launch import children

class Point:
    def __init__(self, x):
        self.x = x

def moved(point):
    return Point(point.x + 1)

def show_progress():
    sys.stdout.write("  1%\\r 50%\\r100%\\n 10%\\r 20%\\r")
    sys.stdout.flush()

def write_unclosed():
    global kept, itself
    kept = open("written", "w")
    kept.write("by a worker")
    itself = write_unclosed  # a cycle, which only the collector ends

def call_on():
    while True:
        rpc.rpc_sync("worker0", abs, (-1,))

if __name__ == "__main__":
    with telegrad.local(["ps", "trainer"]) as group:
        import telegrad.rpc as rpc
        print(group, list(group), [worker.name for worker in rpc.workers()])
        assert rpc.rpc_sync("ps", os.read, (0, 1), timeout=60) == b""  # the standard input of workers is empty
        assert all(isinstance(rpc.rpc_sync(name, moved, (Point(1),)), Point) for name in group)
        assert rpc.rpc_sync("ps", twice, (4,)) == 8
        assert len({os.getpid(), *(rpc.rpc_sync(name, os.getpid) for name in group)}) == 3
        rpc.rpc_sync("trainer", print, ("hello",))
        assert rpc.rpc_sync("ps", gc.get_freeze_count) > 50_000  # torch's objects, else each end takes 0.3 s more
        assert rpc.rpc_sync("ps", write_unclosed) is None
        children.PATIENCE = 0
        rpc.rpc_sync("trainer", show_progress)
        future = rpc.rpc_async("ps", time.sleep, (1,))
        try:
            os.killpg(0, signal.SIGINT)  # as a terminal does
            threading.Event().wait(60)
        except KeyboardInterrupt:
            print("interrupted")
        future.wait()
        assert rpc.rpc_sync("trainer", int) == 0
    print(group, [worker.process.returncode for worker in group._workers])
    telegrad.local(1)  # ends with the program, although a daemon thread calls a worker in a loop
    threading.Thread(target=call_on, daemon=True).start()
    rpc.rpc_async("worker0", print, ("the last call",))
"""


@pytest.mark.timeout(2 * PATIENT)
def test_a_local_group_lives_and_ends_with_its_program(tmp_path: pathlib.Path) -> None:
    (tmp_path / "beside.py").write_text("def twice(x):\n    return 2 * x\n")
    ran = run(WHOLE, tmp_path, start_new_session=True, env={**os.environ, "TELEGRAD_PROGRESS": "0"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "<telegrad.local: ps, trainer; this process is 'driver'> ['ps', 'trainer'] ['driver', 'ps', 'trainer']" in (
        ran.stdout
    )
    assert "[trainer] hello" in ran.stdout
    assert re.findall(r"(\d+%)\n", ran.stdout) == ["100%", "20%"]
    assert "interrupted" in ran.stdout
    assert "<telegrad.local: ps, trainer; ended> [0, 0]" in ran.stdout
    assert "[worker0] the last call\n" in ran.stdout
    assert (tmp_path / "written").read_text() == "by a worker"
    assert ran.stderr == ""


ENDED_TWICE = """
import threading
import telegrad
import telegrad.rpc as rpc
from telegrad import errors

def hold(seconds):
    threading.Event().wait(seconds)

if __name__ == "__main__":
    for graceful in (True, False):
        group = telegrad.local(1)
        try:
            rpc.rpc_async("worker0", int).then(lambda _: group.shutdown()).wait()
        except errors.UsageError as error:
            print(str(error).partition(" was ")[0])
        assert rpc.rpc_sync("worker0", int) == 0  # the refusal has changed nothing
        call = rpc.rpc_async("worker0", hold, (1 if graceful else 60,))
        waits = threading.Thread(target=group.shutdown)
        waits.start()
        while not group._closed:
            pass
        group.shutdown(graceful)
        ended = call.done(), [worker.process.returncode for worker in group._workers]
        waits.join(10)
        print(*ended, waits.is_alive())
"""


def test_concurrent_ends_of_a_group_return_together_and_one_may_force_it(tmp_path: pathlib.Path) -> None:
    ran = run(ENDED_TWICE, tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == 2 * "group.shutdown()\nTrue [0] False\n"


INTERRUPTED = """
import os, signal, threading
import telegrad

def slow():
    threading.Event().wait(60)

def slow_gradient():  # torch's engine calls the sleep
    import torch
    number = torch.ones((), requires_grad=True)
    number.register_hook(lambda _: threading.Event().wait(1.5) or None)
    number.backward()

if __name__ == "__main__":
    soon = threading.Timer(0.5, os.killpg, (0, signal.SIGINT))  # as a terminal does
    {before}
    try:
        with telegrad.local(2) as group:
            import telegrad.rpc as rpc
            {within}
    except KeyboardInterrupt:
        print([worker.process.returncode for worker in group._workers] if "group" in globals() else "early")
        raise
"""

INTERRUPTS = {
    "calls": ("", 'soon.start(); rpc.rpc_sync("worker0", rpc.rpc_sync, ("worker1", slow))'),
    "computes gradients": ("", 'soon.start(); rpc.rpc_sync("worker0", slow_gradient)'),
    "awaits a call": ("", 'soon.start(); rpc.rpc_async("worker0", slow).wait()'),
    "waits": ("", "soon.start(); threading.Event().wait(60)"),
    "shuts down": ("", 'rpc.rpc_async("worker0", slow); soon.start(); rpc.shutdown()'),
    "leaves": ("", 'rpc.rpc_async("worker0", slow); soon.start()'),
    "starts": ("import telegrad.launch.local; soon.start()", "threading.Event().wait(60)"),
}


@pytest.mark.timeout(2 * PATIENT)
@pytest.mark.parametrize(
    "when", [pytest.param(when, marks=() if when == "calls" else pytest.mark.nightly) for when in INTERRUPTS]
)
def test_ctrl_c_prints_only_the_traceback_of_the_program(when: str, tmp_path: pathlib.Path) -> None:
    before, within = INTERRUPTS[when]
    ran = run(INTERRUPTED.format(before=before, within=within), tmp_path, start_new_session=True)
    assert ran.returncode == -signal.SIGINT
    lines = ran.stderr.splitlines()
    frames = sum(f"{os.sep}telegrad{os.sep}" in line for line in lines)
    # Outside of functions of this package, the handler's frame stays, and that of `__exit__`.
    assert frames <= {"leaves": 2, "waits": 1, "starts": 1}.get(when, 0), ran.stderr
    if when == "starts":  # a worker may log the loss of the driver before it notices the end of its parent
        assert lines[-1] == "KeyboardInterrupt", ran.stderr
        return
    assert lines[0] == "Traceback (most recent call last):", ran.stderr
    assert all(line.startswith("  ") for line in lines[1:-1]), ran.stderr
    assert lines[-1] == "KeyboardInterrupt"
    assert ran.stdout == "[0, 0]\n"


FORGETFUL = """
import atexit, os, signal, sys, threading
import telegrad
import telegrad.rpc as rpc

def refuse(*args):
    raise RuntimeError("can't create new thread at interpreter shutdown")

if __name__ == "__main__":
    group = telegrad.local(3)
    print(rpc.rpc_sync("worker1", int))  # and the others not at all
    atexit.register(lambda: print(rpc.rpc_sync("worker0", len, ([1, 2],)), "at the end"))
    if {loses}:
        atexit.register(os.kill, group._workers[2].process.pid, signal.SIGKILL)
    if sys.version_info < (3, 12):  # as it is since then
        atexit.register(setattr, threading, "_start_new_thread", refuse)
"""


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("loses", [False, True])
def test_a_program_that_does_not_end_its_group_ends_it_at_exit(loses: bool, tmp_path: pathlib.Path) -> None:
    ran = run(FORGETFUL.replace("{loses}", str(loses)), tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "0\n2 at the end\n"), ran.stdout + ran.stderr
    assert not re.search("Traceback|left without", ran.stderr), ran.stderr


LOST = "telegrad: worker 'worker0' was lost: its process ended with signal SIGKILL"
ENDS = """
import os, signal, sys, telegrad, warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of forks
group = telegrad.local({workers})
print(*(worker.process.pid for worker in group._workers), flush=True)
import telegrad.rpc as rpc, time
{busy} and rpc.rpc_async("worker0", time.sleep, ({busy},))
{end}
"""
COMPUTING = """
import threading, torch
begun = threading.Event()
squares = "__import__('__main__').begun.set() or [0 for _ in range(10**7) if (a @ a) is None]"
rpc.rpc_async("driver", eval, (squares, {"a": torch.ones(500, 500)}))
begun.wait(60)
leave = rpc.shutdown
rpc.shutdown = lambda graceful: [each.process.wait(60) for each in group._workers] and leave(graceful)  # they end first
"""
READING = """
import collections, itertools, threading
stream = rpc.rpc_stream("worker0", itertools.count)
threading.Thread(target=collections.deque, args=(stream, next(stream)), daemon=True).start()
sys.exit(5)
"""


@pytest.mark.timeout(2 * PATIENT)
@pytest.mark.parametrize(
    ("busy", "end", "code", "said"),
    [
        (
            600,
            "os.fork() or (os.closerange(1, 3), signal.sigtimedwait([], 60)); os.kill(os.getpid(), signal.SIGKILL)",
            -signal.SIGKILL,
            "",
        ),
        (600, COMPUTING + "raise SystemError('a bug')", 1, "SystemError: a bug"),
        (0, 'rpc.rpc_sync("worker0", os.kill, (group._workers[0].process.pid, 9))', 1, f".*PeerLost: .* {LOST}"),
        pytest.param(0, "", 0, "", marks=pytest.mark.nightly),
        pytest.param(0, READING, 5, "", marks=pytest.mark.nightly),
    ],
    ids=["killed", "fails", "loses a worker", "ends", "reads"],
)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_workers_end_with_their_program_in_any_case(
    tmp_path: pathlib.Path, workers: int, busy: int, end: str, code: int, said: str
) -> None:
    ran = run(ENDS.format(workers=workers, busy=busy, end=end), tmp_path)
    assert ran.returncode == code, ran.stderr
    apart = ran.stderr.replace("telegrad: worker", "\ntelegrad: worker")  # two threads may write on one line
    lines = [line for line in apart.splitlines() if line[:1] not in " T"]  # lines outside of the traceback
    assert re.fullmatch(said, " ".join(sorted(lines))), ran.stderr
    assert "telegrad/_core" not in ran.stderr
    # a forked child of the program lives longer
    wait_until(lambda: all(is_over(int(pid)) for pid in ran.stdout.splitlines()[0].split()))


ALONE = "rpc_backend_options=rpc.TelegradOptions(init_method='tcp://127.0.0.1:{port}')"
LEFT_OPEN = """
from os import write
import telegrad.rpc as rpc

class Told:
    def __init__(self, name):
        self.name = name

    def read(self):
        return self.name

    def __del__(self, write=write):
        write(1, self.name.encode() + b" ")

class Odd(Exception):
    def __init__(self, *, code):
        super().__init__(code)

def fail():
    raise Odd(code=1)

{begin}
reference = rpc.remote(0, Told, ("value",))
reference.rpc_sync().read()
published = rpc.publish("p", lambda: Told("published"))
then = rpc.rpc_async(0, int).then(lambda future: future.wait())
try:
    rpc.rpc_sync(0, fail)
except Odd as error:
    caught = error
rpc.on_lost(lambda *_: fail())
{end}
own, left_open = Told("own"), open("left_open", "w")
left_open.write("data")
"""


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (f'rpc.init_rpc("w", rank=0, world_size=1, {ALONE})', "rpc.shutdown()"),
        ("from telegrad import local; group = local(1)", ""),
        pytest.param("from telegrad import local; group = local(1)", "group.shutdown()", marks=pytest.mark.nightly),
        pytest.param(f'rpc.init_rpc("w", rank=0, {ALONE})', "", marks=pytest.mark.nightly),
    ],
)
def test_the_end_of_the_interpreter_frees_what_the_program_has_left(
    tmp_path: pathlib.Path, begin: str, end: str
) -> None:
    """Files that were left open are written only then."""
    begin = begin.replace("{port}", str(free_port()))
    ran = run(LEFT_OPEN.replace("{begin}", begin).replace("{end}", end), tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert sorted(ran.stdout.split()) == ["own", "published", "value"]
    assert (tmp_path / "left_open").read_text() == "data"


LOADS = """
import telegrad, torch
from telegrad import rpc
from torch.utils.data import DataLoader

def load():
    return [float(batch.sum()) for batch in DataLoader(torch.arange(4.0), 2, num_workers=1)]

if __name__ == "__main__":
    with telegrad.local(["-h"]):  # which is no option of the process
        print(rpc.rpc_sync("-h", load))
"""


def test_a_remote_function_may_use_a_loader_with_processes_of_its_own(tmp_path: pathlib.Path) -> None:
    ran = run(LOADS, tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[1.0, 5.0]\n", "")


FORKED = """
import logging, os, random, signal, sys, threading
import numpy, torch
import telegrad
from telegrad import rpc
from telegrad._core import forks

def draw():
    with open("/proc/self/comm") as file:
        assert file.read() == rpc.get_worker_info().name + "\\n"
    return torch.rand(()).item(), numpy.random.random(), random.random()

def describe():
    opened = {os.readlink(f"/proc/self/fd/{number}").partition(":")[0] for number in range(3)}
    with os.scandir("/proc/self/fd") as descriptors:
        count = len(list(descriptors))
    result, end = os.pipe()
    if not os.fork():
        os.write(end, bytes([torch.ones(300, 300).mm(torch.ones(300, 300)).eq(300).all()]))
        os._exit(0)
    assert os.read(result, 1) == b"\\x01"
    assert (forks.process.depth, signal.getsignal(signal.SIGCHLD)) == (0, signal.SIG_IGN)  # as in the program
    os.close(result)
    os.close(end)
    return count, opened, os.getsid(0) == os.getpid(), {threading.get_ident() == threading.main_thread().ident}

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    group = telegrad.local({"--": 3})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told = [rpc.rpc_sync(name, describe) for name in rpc.group("--")]
    assert told[0] == told[1] == told[2], told
    assert len({number for name in group for number in rpc.rpc_sync(name, draw)}) == 9
    assert os.fork() or os._exit(group._starter.socket.fileno() + 1) is None
    assert os.wait()[1] == 0
    os.kill(group._starter.process.pid, signal.SIGKILL)
    for worker in group._workers:
        worker._watcher.join(60)
    print([worker.process.returncode for worker in group._workers], len(rpc.workers()))
"""


@pytest.mark.timeout(2 * PATIENT)
@pytest.mark.skipif(not worker_command.CAN_FORK, reason="workers are not forked on this platform")
def test_forked_workers_are_as_those_with_a_start_of_their_own(tmp_path: pathlib.Path) -> None:
    ran = run(FORKED, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "[-9, -9, -9]" in ran.stdout
    assert "'--2' was lost: its process ended with signal SIGKILL, as the process that had started" in ran.stderr


FAILS_AND_IS_INTERRUPTED = """
import os, signal, threading, telegrad
if __name__ == "__main__":
    with telegrad.local(2) as group:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()  # during the end of the workers
        raise ValueError("mine")
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal")
def test_an_interrupt_during_the_end_of_a_failed_program_leaves_its_traceback(tmp_path: pathlib.Path) -> None:
    ran = run(FAILS_AND_IS_INTERRUPTED, tmp_path)
    assert ran.returncode != 0
    assert "ValueError: mine\n" in ran.stderr
    assert "lost sys.stderr" not in ran.stderr


# The action of a worker instead of its import of torch, the text for its end, and its last line.
DEATHS: dict[str, tuple[str, str, str]] = {
    "raises": ("raise ValueError('a bug')", "exit code 1", "ValueError: a bug"),
    "exits with a code": ("import sys; print('oh', file=sys.stderr); sys.exit(3)", "exit code 3", "oh"),
    "ends": ("import os; print('done'); os._exit(0)", "exit code 0", "done"),
    "killed": ("import os; print('so far', flush=True); os.kill(os.getpid(), 9)", "signal SIGKILL", "so far"),
    "silent": ("import os; os._exit(3)", "exit code 3", "It printed nothing"),
}


@pytest.mark.timeout(2 * PATIENT)
@pytest.mark.parametrize(
    ("how", "printed"), [*((how, how != "silent") for how in DEATHS), ("raises", False), ("ends", False)]
)
@pytest.mark.parametrize("forks", [worker_command.CAN_FORK, False])
def test_a_worker_that_cannot_start_is_an_error_after_its_output(
    forks: bool,
    how: str,
    printed: bool,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(worker_command, "CAN_FORK", forks)
    act, end, line = DEATHS[how]
    # A starter imports torch for both. Without it, the other worker sleeps until its end.
    if_it_is_b = "import sys\nif {'b', '--forks'}.intersection(sys.argv):\n    "
    (tmp_path / "torch.py").write_text(f"{if_it_is_b}{act}\nimport signal; signal.pause()\n")
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    for stream in () if printed else ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, None)
    with pytest.raises(errors.RendezvousError) as caught:
        telegrad.local(["a", "b"], rpc_timeout=PATIENT)
    assert f"worker {'a' if forks else 'b'!r} ended with {end} before the group had formed" in str(caught.value)
    assert (line in str(caught.value), line in "".join(capsys.readouterr())) == (not printed, printed)
    assert len(traceback.extract_tb(caught.tb)) == 1  # the frame of this test
    assert time.monotonic() - began < PATIENCE


LEAVES_A_CHILD = """
import os, subprocess
print("child", subprocess.Popen(["sleep", "60"]).pid)
print("a" * 100_000, "the last", end="", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted by /proc")
def test_a_failed_start_leaves_nothing_open_and_waits_for_no_child_of_a_worker(
    workers: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text(LEAVES_A_CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    threads, opened = {*threading.enumerate()}, set()
    for _ in range(2):  # the first may open what the process keeps
        began = time.monotonic()
        with pytest.raises(errors.RendezvousError, match="SIGKILL"):
            telegrad.local(workers, rpc_timeout=PATIENT)
        took, said = time.monotonic() - began, capsys.readouterr().out
        child = int(re.findall(r"child (\d+)", said)[0])
        assert not is_over(child)
        os.kill(child, signal.SIGKILL)
        assert (said.count("a"), "the last\n" in said) == (100_001, True)  # a long line may be printed in parts
        assert took < local.GRACE
        wait_until(lambda: threads.issuperset(threading.enumerate()))  # a call to the store may end a moment later
        opened.add(len(os.listdir("/proc/self/fd")))
    assert len(opened) == 1


ROUNDS = """
import contextlib, os, signal, subprocess, threading, time
import telegrad
from telegrad import rpc

def start_children():
    if not (pid := os.fork()):
        signal.pause()
    print("the last", end="", flush=True)
    return pid, subprocess.Popen(["sleep", "60"]).pid

def main(how):
    with telegrad.local({workers}) as group:
        pid = rpc.rpc_sync("worker0", os.getpid)
        if how == "killed":
            os.kill(pid, 9)
            rpc.rpc_sync("worker0", int)
        if how == "raises":
            raise ValueError
        if how == "children":
            children.extend(rpc.rpc_sync("worker0", start_children))
        began = time.monotonic()
    if how == "children":
        print("took", time.monotonic() - began)

if __name__ == "__main__":
    children = []
    for how in ("ends", "raises", "killed", "children"):
        with contextlib.suppress(ValueError, telegrad.errors.PeerLost):
            main(how)
        while threading.active_count() > 1:  # those of the lost agent may take a moment
            threading.Event().wait(0.01)
        print("open", len(os.listdir("/proc/self/fd")))
    for pid in children:
        os.kill(pid, 9)  # raises if it has ended
"""


@pytest.mark.nightly
@pytest.mark.timeout(4 * PATIENT)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted by /proc")
def test_rounds_leave_nothing_open_and_wait_for_no_child_of_a_worker(workers: int, tmp_path: pathlib.Path) -> None:
    ran = run(ROUNDS.replace("{workers}", str(workers)), tmp_path)
    assert ran.returncode == 0, ran.stderr
    opened = re.findall(r"open (\d+)", ran.stdout)
    assert (len(opened), len(set(opened))) == (4, 1), ran.stdout
    assert "[worker0] the last\n" in ran.stdout
    assert float(re.findall(r"took (.*)", ran.stdout)[0]) < 2 * local.GRACE


@pytest.mark.timeout(2 * PATIENT)
def test_names_and_roles_may_begin_as_options_do(tmp_path: pathlib.Path) -> None:
    ran = run(
        """
import telegrad
from telegrad import rpc

for names in (["-h"], ["--role", "--"], {"--": 1}):
    with telegrad.local(names) as group:
        print([rpc.rpc_sync(name, rpc.get_worker_info).name for name in group], [each.role for each in rpc.workers()])
""",
        tmp_path,
    )
    assert ran.stdout == "['-h'] ['', '']\n['--role', '--'] ['', '', '']\n['--0'] ['', '--']\n", ran.stderr


@pytest.mark.parametrize("names", [0, [], ["a", "a"], ["driver"], ["a b"], "ab", 2.5])
def test_groups_that_cannot_be_started(names: Any) -> None:
    with pytest.raises(errors.UsageError):
        telegrad.local(names)


# Workers that are shell scripts


class Enough(Exception):
    """Ends the start of a group."""


@pytest.fixture
def script(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(text: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        monkeypatch.setattr(worker_command, "CAN_FORK", False)

    return use


@pytest.fixture
def during_start(script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that starts workers, calls `act` with the group that has not formed yet, and ends the start."""

    def start(workers: int, act: Callable[[local.LocalGroup], object], program: str = UNTIL_ITS_INPUT_ENDS) -> None:
        def join(group: local.LocalGroup, *_: object) -> NoReturn:
            act(group)
            raise Enough

        script(program)
        monkeypatch.setattr(local.LocalGroup, "_join", join)
        with pytest.raises(Enough):
            telegrad.local(workers)

    return start


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
UNTIL_ITS_INPUT_ENDS = "exec cat > /dev/null"


@needs_fork
def test_a_child_forked_while_the_group_starts_has_no_inputs_of_workers(during_start: Callable[..., None]) -> None:
    def forks(group: local.LocalGroup) -> None:
        assert in_child(lambda: [worker.process.stdin.closed for worker in group._workers]) == [True, True]

    during_start(2, forks)


def test_ends_of_workers_are_logged_from_the_moment_the_group_has_formed(
    script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[local.LocalGroup] = []
    logged: list[str] = []
    agent = SimpleNamespace(
        closed=False,
        find=lambda name: SimpleNamespace(identity=name),
        warn_lost=lambda _, why: logged.append(why),
        word_losses=lambda _: None,
    )

    def joins(group: local.LocalGroup, *args: Any) -> None:
        made.append(group)
        join(group, *args)

    def kill(worker: Any) -> None:
        worker.process.kill()
        worker._watcher.join(PATIENCE)

    def enter(_: str, __: object, meet: Callable[[float], RendezvousStore]) -> None:
        """Kill workers when the group has formed, and its start does not know yet."""
        assert re.fullmatch(r"127\.0\.0\.1:\d+", meet(1).where)  # by their ports, groups that start are told apart
        for worker in made[0]._workers[:2]:
            kill(worker)

    script(UNTIL_ITS_INPUT_ENDS)
    join = local.LocalGroup._join
    monkeypatch.setattr(local.LocalGroup, "_join", joins)
    monkeypatch.setattr(workers, "enter_group", enter)
    worker = SimpleNamespace(agent=agent, shutdown=lambda *_: None)
    monkeypatch.setattr(workers, "current", SimpleNamespace(worker=worker, leave=lambda _: None))
    group = telegrad.local(3)
    lost = [f"worker 'worker{number}' ended with signal SIGKILL" for number in range(3)]
    try:
        assert logged == lost[:2]
        kill(group._workers[2])
        assert logged == lost
    finally:
        agent.closed = True
        group.shutdown()


@needs_fork
@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")
def test_a_fork_does_not_resume_a_stopped_worker(during_start: Callable[..., None]) -> None:
    def forks(group: local.LocalGroup) -> None:
        process: Any = group._workers[0].process
        state = partial(state_of, process.pid)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: (state() or "?")[0] == "T")
        wait_until(process._waitpid_lock.locked)  # the thread that waits for its end
        in_child(int)
        assert (state() or "?")[0] == "T"

    during_start(1, forks)


def test_workers_that_do_not_end_share_the_time_of_each_step(
    during_start: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kills(process: subprocess.Popen[bytes]) -> None:
        asked.append("kill")
        kill(process)

    asked: list[str] = []
    kill = subprocess.Popen.kill
    monkeypatch.setattr(local, "GRACE", 0.02)
    monkeypatch.setattr(subprocess.Popen, "terminate", lambda _: asked.append("terminate"))
    monkeypatch.setattr(subprocess.Popen, "kill", kills)
    during_start(3, bool, "exec sleep 60")
    assert asked == 3 * ["terminate"] + 3 * ["kill"]


# By hand


def command(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "telegrad", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENT)
    return process.returncode, out, err


STOPPED = """
import os, signal, telegrad
if __name__ == "__main__":
    group = telegrad.local({workers})
    print(group._workers[0].process.pid, flush=True)
    os.kill(group._workers[0].process.pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.skipif(sys.platform != "linux", reason="only there the kernel wakes it")
def test_a_stopped_worker_ends_with_its_killed_program(workers: int, tmp_path: pathlib.Path) -> None:
    ran = run(STOPPED.format(workers=workers), tmp_path)
    assert ran.returncode == -signal.SIGKILL
    wait_until(lambda: is_over(int(ran.stdout)))


STOPPED_OR_SLOW = """
import atexit, logging, os, signal, time, telegrad
from telegrad import rpc
from telegrad._core import texts

def be_slow():
    atexit.register(time.sleep, 60)

if __name__ == "__main__":
    texts.FIRST = 0.1
    logging.basicConfig(level=logging.INFO)
    group = telegrad.local(["stopped", "slow"])
    rpc.rpc_sync("slow", be_slow)
    os.kill(group._workers[0].process.pid, signal.SIGSTOP)
    group.shutdown(graceful=False)
    print([worker.process.returncode for worker in group._workers])
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="no process is stopped there")
def test_stopped_workers_end_and_slow_ones_are_named(tmp_path: pathlib.Path) -> None:
    ran = run(STOPPED_OR_SLOW, tmp_path)
    assert ran.stdout.startswith(f"[{worker_command.ENDED}, "), ran
    assert str(-signal.SIGKILL) not in ran.stdout
    assert re.search(r"INFO:telegrad:telegrad: waiting for \S+ s now: .*'slow' still running", ran.stderr)
    assert "WARNING" not in ran.stderr


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENT)
def test_workers_started_by_hand() -> None:
    place = ["--world-size", 2, "--master", f"127.0.0.1:{free_port()}"]
    made = [command("worker", f"w{rank}", "--rank", rank, *place) for rank in range(2)]
    # Both only serve, so the group ends.
    assert [finish(process) for process in made] == [(worker_command.ENDED, "", "")] * 2


@pytest.mark.parametrize(
    "wrong",
    ["--threads 0", "--timeout nan", "--timeout -1", "--min-workers 3 --max-workers 2", "--role a.b", "--rank -2"],
)
def test_wrong_arguments_of_a_worker_are_told(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(worker_command.main(["--role", "a", "--master", "127.0.0.1:1", *wrong.split()]))
    said = capsys.readouterr().err.replace("_", "-").splitlines()[-1]
    assert ended.value.code == worker_command.WRONG
    assert wrong.split()[0].removeprefix("--") in said
    assert not re.search("could not join|constructor", said)


def test_a_worker_that_cannot_join_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--world-size", "2", "--master", f"127.0.0.1:{free_port()}", "--timeout", "0.2"]
    assert worker_command.main(["w1", "--rank", "1", *place]) == worker_command.JOINED_NOT
    said = capsys.readouterr().err
    assert said.startswith("telegrad: worker 'w1' could not join: no process serves the store")


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENT)
def test_a_worker_of_a_dynamic_group_ends_with_its_required_worker(tmp_path: pathlib.Path) -> None:
    port = free_port()
    serving = command("worker", "w", "--master", f"127.0.0.1:{port}", "--require", "driver")
    driver = f"""
import os, signal
from telegrad import rpc
rpc.init_rpc("driver", rpc_backend_options=rpc.TelegradOptions(init_method="tcp://127.0.0.1:{port}"))
rpc.wait_for_workers(["driver", "w"])
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(driver, tmp_path).returncode == -signal.SIGKILL
    code, _, said = finish(serving)
    assert (code, "'driver'" in said) == (worker_command.LOST, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--version"], 0, f"telegrad {telegrad.__version__}"),
        (["--help"], 0, "python -m telegrad worker NAME"),
        (["worker", "--help"], 0, "--world-size"),
        ([], 2, "python -m telegrad script.py"),
        (["--nonsense"], 1, "unknown option --nonsense"),
        (["workers"], 1, "did you mean 'worker'?"),
        (["worker"], 2, "name"),
    ],
    ids=str,
)
def test_the_command_line_has_help_and_error_messages(arguments: list[str], code: int, words: str) -> None:
    found, out, err = finish(command(*arguments))
    assert found == code
    assert words in out + err


HANDLED = """
import os, signal, subprocess, sys, telegrad, telegrad.rpc
from time import sleep as pause

def end(*_):
    sys.exit(5)

def kill():
    wait = f"import os, threading; threading.Event().wait(0.05); os.kill({os.getpid()}, {signal.SIGTERM.value})"
    subprocess.Popen([sys.executable, "-c", wait])

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    with telegrad.local(2):
        kill()
    pause(1)
    print("went on")
"""


def test_a_signal_handler_that_raises_as_the_group_ends_ends_the_program(tmp_path: pathlib.Path) -> None:
    """Its exception is not raised in a finalizer, where Python drops it: the group's objects are freed just then."""
    ran = run(HANDLED, tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (5, "", "")
