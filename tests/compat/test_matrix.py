"""Every way to enable the mode, with every way to start a child.

Each case is a program that enables the mode, perhaps disables it again, and starts children that join one group and
call each other.
"""

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

    def __str__(self) -> str:
        again, between = "again" if self.again else "once", "uninstalled" if self.uninstalled else "kept"
        return f"{self.installed}, {again}, {between}"


def children(case: Case, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return the records of each child: its answers, and the seconds that it slept during its imports."""
    first = INSTALLED[case.installed]
    between = f"{INSTALL.split(';')[0]}; compat.uninstall()" if case.uninstalled else "pass"
    program = PROGRAM.format(first=first, again=case.again, install=INSTALL, between=between)
    (folder / "program.py").write_text(program)
    (folder / "work.py").write_text(WORK)
    (folder / "settings.py").write_text(INSTALL)
    runner = ["-m", "telegrad"] if case.installed == "by python -m telegrad" else []
    command = [sys.executable, *runner, "program.py", *STARTED]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    files = [folder / f"told{rank}" for rank in range(len(STARTED))]
    assert all(file.exists() for file in files), done.stderr
    return [json.loads(file.read_text()) for file in files]


WAYS = itertools.product(INSTALLED, (True, False), (True, False))


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("case", [*itertools.starmap(Case, WAYS)], ids=str)
def test_children_call_each_other_and_do_not_wait_for_the_mode(tmp_path: pathlib.Path, case: Case) -> None:
    """Each child gets its neighbour's answer from the expected RPC."""
    told, count = children(case, tmp_path), len(STARTED)
    whose = "telegrad" if case.again or not case.uninstalled else "torch"
    assert [each["told"] for each in told] == [[whose, whose, (rank + 1) % count] for rank in range(count)]
    slept = {way: each["slept"] for way, each in zip(STARTED, told, strict=True)}
    assert max(slept.values()) < ASLEEP, slept
