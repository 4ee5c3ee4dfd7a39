"""Every way to enable the mode, with every way to start a child.

Each case is a program that enables the mode, perhaps disables it again, and starts children that join one group and
call each other. Some cases run always; they contain each way of each kind. The product of all runs at night.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

PATIENCE = 300  # seconds for a child; a deadlock lasts forever, and imports take long on a busy machine
ASLEEP = 1.0  # seconds that a child may sleep during its imports

INSTALL = "from telegrad import compat; compat.install()"
INSTALLED = {
    "before torch": f"{INSTALL}; import torch",
    "after torch": f"import torch, torch.distributed.rpc; {INSTALL}",
    "in a module": "import settings, torch",
    "by python -m telegrad": "import torch",
    "not at all": "import torch",
}
STARTED = ("fork", "spawn", "forkserver", "torch spawn", "subprocess", "torchrun")

PROGRAM = """\
import sys
if __name__ == "__main__" and "child" not in sys.argv:
    {first}
if {again} and (__name__ != "__main__" or "child" in sys.argv):
    {install}
import work
if __name__ == "__main__":
    if "child" in sys.argv:
        work.meet(*sys.argv[2:])
    else:
        {between}
        work.start_all(sys.argv[1:], {again})
"""
WORK = """\
import json, multiprocessing, os, subprocess, sys, time
import torch.distributed.rpc as rpc
from torch.distributed.rpc import rpc_sync
import torch.multiprocessing

def served(to):
    return rpc.__name__.split(".")[0], rpc_sync.__module__.split(".")[0], to

def idle():
    # How long the main thread neither ran nor waited for a processor since its process began, in seconds.
    try:
        with open("/proc/self/schedstat") as schedule, open("/proc/self/stat") as stat:
            ran, waited, _ = schedule.read().split()
            began = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:  # only Linux tells
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began - (int(ran) + int(waited)) / 1e9

def meet(rank, count, again=False):
    if again:  # a forked child does not run the program anew
        from telegrad import compat
        compat.install()
    slept = idle()
    rank, count = int(rank), int(count)
    rpc.init_rpc(
        f"w{rank}", rank=rank, world_size=count,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.path.abspath('store')}"),
    )
    to = (rank + 1) % count
    told = rpc_sync(f"w{to}", served, (to,))
    rpc.shutdown()
    with open(f"told{rank}", "w") as file:
        json.dump({"told": told, "slept": slept}, file)

def begin(way, rank, count, again):
    args = str(rank), str(count)
    if way == "torch spawn":
        return torch.multiprocessing.spawn(spawned, args, nprocs=1, join=False).processes[0].join
    if way in ("subprocess", "torchrun"):
        runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"] if way == "torchrun" else []
        return subprocess.Popen([sys.executable, *runner, sys.argv[0], "child", *args]).wait
    more = [again] if way == "fork" else []
    process = multiprocessing.get_context(way).Process(target=meet, args=[*args, *more])
    process.start()
    return process.join

def spawned(_, *args):
    meet(*args)

def start_all(ways, again):
    for wait in [begin(way, rank, len(ways), again) for rank, way in enumerate(ways)]:
        wait()
"""


class Case(NamedTuple):
    installed: str
    again: bool  # the children install the mode, too
    uninstalled: bool  # the parent uninstalls the mode before it starts the children
    started: tuple[str, ...]

    def __str__(self) -> str:
        again, between = "again" if self.again else "once", "uninstalled" if self.uninstalled else "kept"
        return f"{self.installed}, {again}, {between}: {' '.join(self.started)}"

    @property
    def ours(self) -> bool:
        return self.installed != "not at all" and (self.again or not self.uninstalled)


SOME = (
    Case("before torch", True, False, ("spawn", "torchrun")),
    Case("after torch", False, True, ("fork", "torch spawn")),
    Case("in a module", True, True, ("fork", "forkserver")),
    Case("by python -m telegrad", False, False, ("spawn", "subprocess")),
)


def children(case: Case, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return the records of each child: its answers, and the seconds that it slept during its imports."""
    folder.mkdir(parents=True)
    first = INSTALLED[case.installed]
    between = f"{INSTALL.split(';')[0]}; compat.uninstall()" if case.uninstalled else "pass"
    program = PROGRAM.format(first=first, again=case.again, install=INSTALL, between=between)
    (folder / "program.py").write_text(program)
    (folder / "work.py").write_text(WORK)
    (folder / "settings.py").write_text(INSTALL)
    runner = ["-m", "telegrad"] if case.installed == "by python -m telegrad" else []
    command = [sys.executable, *runner, "program.py", *case.started]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    files = [folder / f"told{rank}" for rank in range(len(case.started))]
    assert all(file.exists() for file in files), done.stderr
    return [json.loads(file.read_text()) for file in files]


def check(case: Case, told: list[dict[str, Any]]) -> None:
    """Assert that each child got its neighbour's answer from the expected RPC."""
    whose = "telegrad" if case.ours else "torch"
    count = len(case.started)
    assert [each["told"] for each in told] == [[whose, whose, (rank + 1) % count] for rank in range(count)]


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_children_call_each_other(tmp_path: pathlib.Path, case: Case) -> None:
    check(case, children(case, tmp_path / "run"))


def test_the_usual_cases_contain_each_way_of_each_kind() -> None:
    assert {case.installed for case in SOME} == INSTALLED.keys() - {"not at all"}
    assert {way for case in SOME for way in case.started} == set(STARTED)
    assert {case.again for case in SOME} == {case.uninstalled for case in SOME} == {True, False}


ALL = [
    Case(installed, again, uninstalled, STARTED)
    for installed, again, uninstalled in itertools.product(INSTALLED, (True, False), (True, False))
    if installed != "not at all"
]


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_no_child_waits_for_the_mode(tmp_path: pathlib.Path, case: Case) -> None:
    told = children(case, tmp_path / "run")
    check(case, told)
    slept = {way: each["slept"] for way, each in zip(case.started, told, strict=True)}
    assert max(slept.values()) < ASLEEP, slept
