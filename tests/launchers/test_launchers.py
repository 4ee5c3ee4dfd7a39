"""Tests of each installed launcher, which starts a program without any settings for the group.

Slurm's own commands need a cluster; small programs in `shims` set the same variables.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cluster import free_port

HERE = pathlib.Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples" / "clusters"
PATIENCE = 200.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
HELLO = str(EXAMPLES / "hello.py")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # needed in containers

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2 * PATIENCE)]


def environment(**more: str) -> dict[str, str]:
    """Return this environment without variables of other launchers; programs beside the interpreter are found."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    said = re.compile("SLURM_|OMPI_|PMI|SUBMITIT_|RAY_|RANK$|WORLD_SIZE$|MASTER_")
    return {**{name: value for name, value in os.environ.items() if not said.match(name)}, "PATH": path, **more}


def needs(*programs: str) -> str:
    """Return the first of the programs that is installed."""
    path = environment()["PATH"]
    found = next((where for name in programs if (where := shutil.which(name, path=path))), None)
    if found is None:
        pytest.skip(f"{programs[0]} is not installed")
    return found


def needs_module(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install --group launchers")


def output_of(command: list[str], cwd: pathlib.Path, **variables: str) -> str:
    ran = subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def check_greetings(out: str, size: int = 2) -> None:
    """Check that each worker has printed its own name and that of the worker that it called."""
    said = re.findall(r"worker(\d+) of (\d+): worker(\d+) is on", out)
    expected = [(str(rank), str(size), str((rank + 1) % size)) for rank in range(size)]
    assert sorted(said) == expected, out


def test_torchrun_on_one_node(tmp_path: pathlib.Path) -> None:
    check_greetings(output_of([*TORCHRUN, "--standalone", "--nproc-per-node=2", HELLO], tmp_path))


def test_torchrun_on_two_nodes(tmp_path: pathlib.Path, made: list[subprocess.Popen[str]]) -> None:
    place = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    made += [begin([*TORCHRUN, *place, f"--node-rank={rank}", HELLO], tmp_path) for rank in range(2)]
    check_greetings("".join(ends_of(made)))


def begin(command: list[str], cwd: pathlib.Path, **variables: str) -> subprocess.Popen[str]:
    own = environment(**variables)
    return subprocess.Popen(command, cwd=cwd, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ends_of(made: list[subprocess.Popen[str]]) -> list[str]:
    """Return the output of the processes, which must end with success."""
    said = [process.communicate(timeout=PATIENCE) for process in made]
    assert [process.returncode for process in made] == [0] * len(made), said
    return [out for out, _ in said]


@pytest.fixture
def made() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list for processes that end with the test."""
    begun: list[subprocess.Popen[str]] = []
    yield begun
    for process in begun:
        process.kill()
        process.communicate()


def elastic_agent(notes: pathlib.Path, place: str, patience: int) -> list[str]:
    """Return the command of an agent for one or two hosts, which waits `patience` seconds for the second."""
    hosts = ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=telegrad", place]
    how = ["--max-restarts=2", f"--rdzv-conf=last_call_timeout={patience}"]
    return [*TORCHRUN, *hosts, *how, str(HERE / "elastic.py"), str(notes)]


PAIR = [["2", "worker0", "worker1"], ["2", "worker1", "worker0"]]


def test_elastic_torchrun_after_a_death(tmp_path: pathlib.Path, made: list[subprocess.Popen[str]]) -> None:
    """All workers are restarted, though only one agent counts the restart."""
    agent = elastic_agent(tmp_path / "notes", f"--rdzv-endpoint=127.0.0.1:{free_port()}", 100)
    made += [begin(agent, tmp_path) for _ in range(2)]
    ends_of(made)
    groups = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    assert (sorted(groups[:2]), sorted(groups[2:])) == (PAIR, PAIR)


def test_elastic_torchrun_with_a_host_that_comes_later(
    tmp_path: pathlib.Path, made: list[subprocess.Popen[str]]
) -> None:
    notes = tmp_path / "notes"
    agent = elastic_agent(notes, f"--rdzv-endpoint=127.0.0.1:{free_port()}", 1)
    alone = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else the second waits for a key that the first never sets
    made.append(begin(agent, tmp_path, **alone))
    until = time.monotonic() + PATIENCE
    while not notes.exists() and time.monotonic() < until:
        time.sleep(0.1)
    made.append(begin(agent, tmp_path, **alone))
    ends_of(made)
    groups = [line.split() for line in notes.read_text().splitlines()]
    assert (groups[0], sorted(groups[1:3]), sorted(groups[3:])) == (["1", "worker0"], PAIR, PAIR)


def open_mpi() -> list[str]:
    mpirun = needs("mpirun.openmpi", "mpirun")
    asked = subprocess.run([mpirun, "--version"], capture_output=True, text=True, env=environment(**AS_ROOT))
    if "open-mpi.org" not in asked.stdout:
        pytest.skip(f"{mpirun} is not that of Open MPI")
    return [mpirun, "--oversubscribe"]


def test_open_mpi(tmp_path: pathlib.Path) -> None:
    check_greetings(output_of([*open_mpi(), "-n", "3", sys.executable, HELLO], tmp_path, **AS_ROOT), 3)


def test_open_mpi_with_a_program_for_each_role(tmp_path: pathlib.Path) -> None:
    learner = tmp_path / "learner.py"
    learner.write_text(
        "import telegrad.rpc as rpc\n"
        "rpc.init_rpc('learner')\n"
        "print(rpc.group('actor').rpc_sync(pow, (2, 3)))\n"
        "rpc.shutdown()\n"
    )
    actors = ["-n", "2", sys.executable, "-m", "telegrad", "worker", "--role", "actor"]
    command = [*open_mpi(), "-n", "1", sys.executable, str(learner), ":", *actors]
    assert "[8, 8]" in output_of(command, tmp_path, **AS_ROOT)


def test_mpich(tmp_path: pathlib.Path) -> None:
    mpiexec = needs("mpiexec.hydra")
    check_greetings(output_of([mpiexec, "-n", "2", sys.executable, HELLO], tmp_path, MASTER_PORT=str(free_port())))


def with_shims() -> str:
    return os.pathsep.join([str(HERE / "shims"), environment()["PATH"]])


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_srun(tmp_path: pathlib.Path, nodes: str) -> None:
    command = ["srun", "-N", nodes, "-n", "2", sys.executable, HELLO]
    check_greetings(output_of(command, tmp_path, PATH=with_shims()))


def test_sbatch(tmp_path: pathlib.Path) -> None:
    out = output_of(["sbatch", str(EXAMPLES / "job.sbatch"), "--wait"], EXAMPLES, PATH=with_shims())
    check_greetings(out, 4)


def test_torchrun_under_srun(tmp_path: pathlib.Path) -> None:
    command = ["srun", "-n", "1", *TORCHRUN, "--standalone", "--nproc-per-node=2", HELLO]
    check_greetings(output_of(command, tmp_path, PATH=with_shims()))


@pytest.mark.parametrize("by", ["this host", "Slurm"])
def test_submitit(tmp_path: pathlib.Path, by: str) -> None:
    needs_module("submitit")
    for name in ("hello.py", "on_submitit.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    path = {"PATH": with_shims()} if by == "Slurm" else {}
    check_greetings(output_of([sys.executable, "on_submitit.py"], tmp_path, **path))


def test_ray(tmp_path: pathlib.Path) -> None:
    needs_module("ray")
    assert "all is well" in output_of([sys.executable, str(HERE / "ray_cluster.py")], tmp_path)


def test_the_example_on_ray(tmp_path: pathlib.Path) -> None:
    needs_module("ray")
    out = output_of([sys.executable, str(EXAMPLES / "on_ray.py")], tmp_path)
    assert "actor0" in re.findall(r"^(actor\d) is process", out, re.MULTILINE)
    assert "all have left" in out
