"""Tests of the variables of each launcher: complete ones, incomplete ones, and contradictions."""

import pathlib
import re

import pytest

import telegrad._core.stores.launchers
from telegrad._core.stores.launchers import (
    FIRST_PORT,
    PAIRS,
    PORT,
    PORTS,
    STORE,
    LauncherInfo,
    detect_launcher,
    first_host,
    is_supervised,
    own_name,
    variables,
)
from telegrad.errors import UsageError

PLACE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5",
    "WORLD_SIZE": "8",
} | PLACE
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "3021340673",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[07-08]",
}
BATCH = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[07-08]"}
SUBMITIT = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "123",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "hello-0.hello"}
LONE = [pair[::step] for pair in PAIRS for step in (1, -1)]  # a variable, and the missing one


def port_of(found: LauncherInfo | None) -> int:
    assert found is not None
    return int(found.init_method.rpartition(":")[2])


def told(variables: dict[str, str]) -> tuple[str, int, int, str]:
    """Return the launcher, the rank, the size and the host."""
    found = detect_launcher(variables)
    assert found is not None
    host = found.init_method.removeprefix("tcp://").rpartition(":")[0]
    return found.launcher, found.rank, found.size, "as MASTER_ADDR says" if found.init_method == "env://" else host


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ("torchrun", 5, 8, "as MASTER_ADDR says")),
        (OPEN_MPI, ("Open MPI", 1, 4, "localhost")),
        (MPICH, ("mpiexec", 2, 4, "localhost")),
        (SLURM, ("Slurm", 3, 4, "node07")),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, ("Slurm", 3, 4, "localhost")),
        (SUBMITIT, ("submitit", 1, 2, "localhost")),
        (KUBERNETES, ("Kubernetes", 3, 4, "hello-0.hello")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_launcher_is_detected(variables: dict[str, str], expected: tuple[str, int, int, str]) -> None:
    assert told(variables) == expected


@pytest.mark.parametrize(
    ("outer", "inner", "name"),
    [
        (SLURM, TORCHRUN, "torchrun"),
        (OPEN_MPI, TORCHRUN, "torchrun"),
        (KUBERNETES, TORCHRUN, "torchrun"),
        (SLURM, OPEN_MPI, "Open MPI"),  # Open MPI starts a daemon on each node by srun
        (BATCH, OPEN_MPI, "Open MPI"),
        (BATCH, MPICH, "mpiexec"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, MPICH, "mpiexec"),  # as above
        (SLURM, {"PMI_RANK": "3", "PMI_SIZE": "4"}, "Slurm"),  # srun --mpi=pmi2
        (SLURM, {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.4711.0"}, "Slurm"),  # srun --mpi=pmix
        (SLURM, SUBMITIT, "submitit"),
        ({"JOB_COMPLETION_INDEX": "0"}, OPEN_MPI, "Open MPI"),
    ],
)
def test_the_innermost_launcher_is_used(outer: dict[str, str], inner: dict[str, str], name: str) -> None:
    assert told(outer | inner)[0] == name


def test_our_supervisor_is_used_unless_a_launcher_runs_within_it() -> None:
    supervised = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2000", STORE: "127.0.0.1:2000"}
    for outer in (SLURM, TORCHRUN, BATCH, {"JOB_COMPLETION_INDEX": "0"}):
        assert detect_launcher(outer | supervised) is None
    assert told(supervised | TORCHRUN)[0] == "torchrun"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        PLACE,
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4"} | PLACE,  # the shell of salloc
        BATCH | PLACE,
        {"JOB_COMPLETION_INDEX": "1"} | PLACE,
    ],
)
def test_no_launcher_is_detected_without_its_variables(variables: dict[str, str]) -> None:
    assert detect_launcher(variables) is None


@pytest.mark.parametrize(("given", "missing"), LONE)
def test_a_rank_without_a_size_or_the_reverse_is_refused(given: str, missing: str) -> None:
    missing = "RANK" if given == "WORLD_SIZE" else missing
    for place in ({}, PLACE):
        with pytest.raises(UsageError, match=f"{given} is 1, but {missing} is not set: .* dynamic .*init_method"):
            detect_launcher({given: "1"} | place)
    assert detect_launcher({given: "1"} | PLACE, is_elastic=True) is None
    assert told({given: "1"} | TORCHRUN)[0] == "torchrun"
    assert set(told({given: "1", missing: "2"} | PLACE)[1:3]) == {1, 2}


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH, SLURM, SUBMITIT, KUBERNETES])
def test_an_address_and_a_port_in_the_environment_are_used(variables: dict[str, str]) -> None:
    host_alone = detect_launcher(variables | {"MASTER_ADDR": "fd00::1"})
    assert host_alone is not None
    assert host_alone.init_method.startswith("tcp://[fd00::1]:")
    both = detect_launcher(variables | {"MASTER_ADDR": "h1,h2", "MASTER_PORT": "3000"})
    assert both is not None
    assert both.init_method == "env://"
    if variables is not KUBERNETES:
        assert port_of(detect_launcher(variables | {"MASTER_PORT": "3000"})) == 3000


def test_each_run_has_its_own_port_which_its_workers_share() -> None:
    ports = [port_of(detect_launcher(SLURM | {"SLURM_STEP_ID": str(step)})) for step in range(20)]
    ports += [port_of(detect_launcher(SLURM | {"SLURM_JOB_ID": str(job)})) for job in range(20)]
    ports += [port_of(detect_launcher(OPEN_MPI | {"PMIX_NAMESPACE": str(run)})) for run in range(20)]
    assert len(set(ports)) >= 59
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)
    assert port_of(detect_launcher(SLURM)) == port_of(detect_launcher(SLURM | {"SLURM_PROCID": "0"}))
    assert port_of(detect_launcher(MPICH)) == port_of(detect_launcher(KUBERNETES)) == PORT


ELSEWHERE = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (OPEN_MPI | ELSEWHERE, "Open MPI does not report.*mpirun -x MASTER_ADDR"),
        (MPICH | {"MPI_LOCALNRANKS": "2"}, "mpiexec does not report.*-genv MASTER_ADDR"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpiexec does not report"),
        (SLURM | {"SLURM_DISTRIBUTION": "arbitrary"}, "Slurm does not report.*export MASTER_ADDR"),
        (SLURM | {"SLURM_HET_SIZE": "2"}, "heterogeneous Slurm jobs.*set RANK, WORLD_SIZE"),
        (BATCH, "job 4711 but is not one of its tasks: start it with `srun"),
        ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}, "Kubernetes does not report.*JOB-0.SERVICE"),
        (SLURM | {"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but SLURM_STEP_NUM_TASKS of Slurm is 4: unset WORLD_SIZE"),
        (OPEN_MPI | {"RANK": "0"}, "RANK is 0, but OMPI_COMM_WORLD_RANK of Open MPI is 1"),
        (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x': it must be a number"),
        (SLURM | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http': it must be a number"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1'"),
    ],
)
def test_incomplete_or_contradictory_variables_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        detect_launcher(variables)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("node[07-12]", "node07"),
        ("node[07,09-12],gpu1", "node07"),
        ("gpu1,node[07-12]", "gpu1"),
        ("rack[3-4]node[001-128]", "rack3node001"),
        ("a[1-2]-ib.cluster,b", "a1-ib.cluster"),
        ("", ""),
    ],
)
def test_the_first_of_slurms_hosts_is_found(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_the_text_of_a_launcher_names_rank_and_place() -> None:
    assert str(detect_launcher(SLURM)).startswith(
        "Slurm reports that this is rank 3 of 4, rendezvous at tcp://node07:2"
    )
    assert str(detect_launcher(TORCHRUN)) == "torchrun reports that this is rank 5 of 8, rendezvous at MASTER_ADDR"


def test_each_variable_of_the_page_is_read_by_the_package() -> None:
    page = pathlib.Path(__file__).parent.parent.parent / "docs" / "clusters.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    told = {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row)}
    looked_at = pathlib.Path(telegrad._core.stores.launchers.__file__).read_text()
    assert len(told) > 12
    assert {name for name in told if not re.search(rf"\b{name}\b", looked_at)} == set()


# The name of a worker, from its environment


ACTOR = variables("actor3", "actor", 2, "h", 1234)


@pytest.mark.parametrize(
    ("name", "role", "found"),
    [
        (None, "", ("actor3", "actor")),
        (None, "actor", ("actor3", "actor")),
        ("actor3", "", ("actor3", "actor")),
        (None, "critic", (None, "critic")),
        ("other", "", ("other", "")),
        ("other", "actor", ("other", "actor")),
    ],
)
def test_the_environment_gives_a_name_if_the_program_gives_none(
    name: str | None, role: str, found: tuple[str | None, str]
) -> None:
    assert own_name(name, role, ACTOR) == found
    assert own_name(name, role, {}) == (name, role)


def test_a_worker_is_supervised_only_with_the_store_of_its_supervisor() -> None:
    assert is_supervised("h", 1234, ACTOR)
    assert not is_supervised("h", 1235, ACTOR)
    assert not is_supervised("h", 1234, {})
    given = variables("a0", "a", 3, "::1", 5)
    assert given == {
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "5",
        "TELEGRAD_STORE": "[::1]:5",
        "TELEGRAD_NAME": "a0",
        "TELEGRAD_ROLE": "a",
        "TELEGRAD_RESTARTS": "3",
    }
    assert is_supervised("::1", "5", given)
