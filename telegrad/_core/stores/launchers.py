"""Reads the rank, the group's size and the meeting place of this process from the variables of a launcher.

The launchers are in a table, and `telegrad run` is beside it: nothing here starts a program or resolves a name. The
innermost launcher has priority: MPI starts its processes by Slurm, torchrun runs under all others, and the variables of
the outer ones are still set. `telegrad run` comes first, then RANK and WORLD_SIZE (of torchrun, Ray Train or Kubeflow,
or set by hand), then `_LAUNCHERS` in order.

MASTER_ADDR and MASTER_PORT always have priority. Without them, the host of rank 0 is the first that the launcher names,
or this one if it runs no others. The port is computed from the variables that differ between its runs.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from telegrad._core.sockets import bracketed
from telegrad.errors import UsageError

# Variables of `telegrad run`
NAME, ROLE = "TELEGRAD_NAME", "TELEGRAD_ROLE"  # of the worker; a restarted worker has the same
STORE = "TELEGRAD_STORE"  # the address of the store served for the worker, which never serves one itself
RESTARTS = "TELEGRAD_RESTARTS"  # the number of its restarts

LOOPBACK = "localhost"
PORT = 29500  # if nothing distinguishes runs
FIRST_PORT, PORTS = 20000, 10000  # ports computed from a run's id; the system never assigns them itself
BY_HAND = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"

Variables = Mapping[str, str]


class LauncherInfo(NamedTuple):
    """The launcher that started this process, and the process's place in its run."""

    launcher: str
    rank: int
    size: int
    init_method: str

    def __str__(self) -> str:
        place = "MASTER_ADDR" if self.init_method == "env://" else self.init_method
        return f"{self.launcher} reports that this is rank {self.rank} of {self.size}, rendezvous at {place}"


class _Launcher(NamedTuple):
    name: str
    rank: str
    size: str
    host: Callable[[Variables], str]  # of rank 0; "" if unknown
    hint: str  # how to set it
    run: tuple[str, ...] = ()  # identifies a run: those of these variables that are set


def detect_launcher(variables: Variables, is_elastic: bool = False) -> LauncherInfo | None:
    """Return the launcher's data, or None without a launcher: then MASTER_ADDR and MASTER_PORT say where a group meets.
    Raise UsageError if it gives no host, is incomplete, contradicts itself or other variables, or a value is not a
    number."""
    if is_supervised(variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", ""), variables):
        return None  # unless another launcher, started by `telegrad run`, gives another place
    if "RANK" in variables and "WORLD_SIZE" in variables:
        name = "torchrun" if "TORCHELASTIC_RUN_ID" in variables else "the environment (RANK, WORLD_SIZE)"
        return LauncherInfo(name, _number(variables, "RANK"), _number(variables, "WORLD_SIZE"), "env://")
    launcher = _launcher(variables)
    if launcher is None:
        _check_incomplete(variables, is_elastic)
        return None
    _check(launcher, variables)
    rank, size = _number(variables, launcher.rank), _number(variables, launcher.size)
    return LauncherInfo(launcher.name, rank, size, _place(launcher, variables))


def one_of_several(variables: Variables) -> str:
    """Return the launcher that has started several processes of this program, or ""."""
    launcher = _launcher(variables)
    return "" if launcher is None or variables[launcher.size] == "1" else launcher.name


def _launcher(variables: Variables) -> _Launcher | None:
    # srun uses the protocol of MPICH, too, and has more information in its own variables.
    by_srun = variables.get("PMI_SIZE") == variables.get("SLURM_STEP_NUM_TASKS")
    set_here = (each for each in _LAUNCHERS if each.rank in variables and each.size in variables)
    return next((each for each in set_here if not (by_srun and each.name == _MPICH)), None)


def _check_incomplete(variables: Variables, is_elastic: bool) -> None:
    """Raise UsageError if variables are missing; an elastic group needs neither a rank nor a size."""
    if "SLURM_JOB_ID" in variables and "MASTER_ADDR" not in variables:
        raise UsageError(
            f"this process is in Slurm job {variables['SLURM_JOB_ID']} but is not one of its tasks: start it with "
            f"`srun python ...`, or {BY_HAND}"
        )
    for rank, size in () if is_elastic else PAIRS:
        if (rank in variables) != (size in variables):
            given, missing = (rank, size) if rank in variables else (size, rank)
            raise UsageError(
                f"{given} is {variables[given]}, but {missing} is not set: set it as well, or pass rank and "
                f"world_size; for a dynamic group pass an init_method such as tcp://HOST:PORT, or unset {given}"
            )


def _check(launcher: _Launcher, variables: Variables) -> None:
    for ours, theirs in (("RANK", launcher.rank), ("WORLD_SIZE", launcher.size)):
        if variables.get(ours, variables[theirs]) != variables[theirs]:
            raise UsageError(
                f"{ours} is {variables[ours]}, but {theirs} of {launcher.name} is {variables[theirs]}: unset {ours}, "
                f"or {BY_HAND}"
            )
    if launcher.name == _SLURM and "SLURM_HET_SIZE" in variables:
        raise UsageError(f"heterogeneous Slurm jobs do not give the ranks and hosts of all workers: {BY_HAND}")


def _place(launcher: _Launcher, variables: Variables) -> str:
    if variables.get("MASTER_ADDR") and variables.get("MASTER_PORT"):
        return "env://"
    host = variables.get("MASTER_ADDR") or launcher.host(variables)
    if not host:
        raise UsageError(
            f"{launcher.name} does not report which of its hosts runs rank 0: set MASTER_ADDR on all workers, "
            f"{launcher.hint}"
        )
    # A port that is equal for all workers of a run, and most likely different for other runs.
    run = "/".join(variables[name] for name in launcher.run if variables.get(name))
    port = FIRST_PORT + zlib.crc32(run.encode()) % PORTS if run else PORT
    if variables.get("MASTER_PORT"):
        port = _number(variables, "MASTER_PORT")
    return f"tcp://{bracketed(host)}:{port}"


def _number(variables: Variables, name: str) -> int:
    text = variables[name]
    if not text.isdecimal():
        raise UsageError(f"the variable {name} is {text!r}: it must be a number")
    return int(text)


def first_host(hosts: str) -> str:
    """Return the first host of a list in Slurm's syntax: node7 of "node[7-9,12],gpu1"."""
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", hosts)
    assert match is not None  # it matches at least the empty string
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0])


def _if_all_are_here(here: str, all_: str) -> Callable[[Variables], str]:
    return lambda variables: LOOPBACK if variables.get(here) == variables[all_] else ""


def _first_of_slurm(variables: Variables) -> str:
    if variables.get("SLURM_STEP_NUM_NODES") == "1":
        return LOOPBACK
    if variables.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return ""
    return first_host(variables.get("SLURM_STEP_NODELIST", ""))


_MPICH, _SLURM = "mpiexec", "Slurm"
_LAUNCHERS = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        _if_all_are_here("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
        "as `mpirun -x MASTER_ADDR=HOST` does",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher(
        _MPICH,
        "PMI_RANK",
        "PMI_SIZE",
        _if_all_are_here("MPI_LOCALNRANKS", "PMI_SIZE"),
        "as `mpiexec -genv MASTER_ADDR HOST` does",
    ),
    _Launcher(
        "submitit",
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        lambda _: LOOPBACK,
        "",
        ("SUBMITIT_LOCAL_JOB_ID",),
    ),
    _Launcher(
        _SLURM,
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        _first_of_slurm,
        "by `export MASTER_ADDR=HOST` before srun",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    _Launcher(
        "Kubernetes",
        "JOB_COMPLETION_INDEX",
        "WORLD_SIZE",
        lambda _: "",
        "in the manifest: JOB-0.SERVICE for a Job with a headless Service, JOBSET-JOB-0-0.JOBSET for a JobSet",
    ),
)
# Batch scripts of Slurm and all pods of an indexed Job have a rank, also if they join a dynamic group.
_ALWAYS = ("SLURM_PROCID", "JOB_COMPLETION_INDEX")
PAIRS = (("RANK", "WORLD_SIZE"), *((each.rank, each.size) for each in _LAUNCHERS if each.rank not in _ALWAYS))


# The worker of a process that `telegrad run` has started


def own_name(name: str | None, role: str, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the name and the role of a worker: from the environment, unless the program gives others."""
    own, its_role = environment.get(NAME), environment.get(ROLE, "")
    if not own or name not in (None, own) or role not in ("", its_role):
        return name, role
    return own, its_role


def variables(name: str, role: str, restarts: int, host: str, port: int) -> dict[str, str]:
    """Return the variables that make `init_rpc()` need no argument."""
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        STORE: place(host, port),
        NAME: name,
        ROLE: role,
        RESTARTS: str(restarts),
    }


def is_supervised(host: str, port: int | str, environment: Mapping[str, str]) -> bool:
    """Return True if a process that is not a worker serves the store at that address."""
    return environment.get(STORE) == place(host, port)


def place(host: str, port: int | str) -> str:
    return f"{bracketed(host)}:{port}"
