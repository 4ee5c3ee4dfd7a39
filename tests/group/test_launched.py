"""Tests of workers that give only a role: they meet at the place that their launcher reports."""

import contextlib
import io
import os
import pathlib
import re
import socket
import sys
import threading
import types
from typing import Any
from unittest.mock import Mock

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core import sockets
from telegrad._core.membership import join
from telegrad._core.membership.join import open_meeting
from telegrad._core.membership.registry import Registry
from telegrad._core.rpc.life import init_rpc
from telegrad._core.sockets import await_name
from telegrad._core.stores.directory import Lease
from tests.cluster import free_port, processes, run_all
from tests.group.test_surroundings import BATCH, KUBERNETES, LONE, MPICH, OPEN_MPI, SLURM, SUBMITIT

VARIABLES = {*SLURM, *OPEN_MPI, *MPICH, *SUBMITIT, *KUBERNETES, "RANK", "MASTER_PORT"}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run_of(launcher: str) -> list[dict[str, str]]:
    """Return the variables of two workers of a new run."""
    run = f"{os.getpid()}{free_port()}"
    here = "127.0.0.1"
    alike: dict[str, dict[str, str]] = {
        "Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": run},
        "Slurm": {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": run, "SLURM_STEP_NODELIST": "localhost,other"},
        "Kubernetes": {"WORLD_SIZE": "2", "MASTER_ADDR": here, "MASTER_PORT": str(free_port())},
        "by hand": {"WORLD_SIZE": "2", "MASTER_ADDR": here, "MASTER_PORT": str(free_port())},
    }
    rank = {
        "Open MPI": "OMPI_COMM_WORLD_RANK",
        "Slurm": "SLURM_PROCID",
        "Kubernetes": "JOB_COMPLETION_INDEX",
        "by hand": "RANK",
    }[launcher]
    return [{**alike[launcher], rank: str(number)} for number in range(2)]


def meet(rank: int, variables: list[dict[str, str]], is_elastic: bool) -> tuple[str, int, str]:
    os.environ.update(variables[rank])
    if is_elastic:
        init_rpc(role="worker", min_workers=2, max_workers=2)
        assert rpc.rendezvous_again().size == 2
    else:
        init_rpc(role="worker")
    other = rpc.rpc_sync(1 - rank, rpc.get_worker_info).name
    me, size = rpc.get_worker_info(), len(rpc.workers())
    rpc.shutdown()
    return me.name, size, other


@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize("launcher", ["Open MPI", "Kubernetes", "by hand"])
def test_a_role_is_enough_to_join(launcher: str, is_elastic: bool) -> None:
    with processes(2) as made:
        found = run_all(made, meet, run_of(launcher), is_elastic)
    assert found == [("worker0", 2, "worker1"), ("worker1", 2, "worker0")]


def run_page(rank: int, variables: list[dict[str, str]], program: str) -> str:
    os.environ.update(variables[rank])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(program, {"__name__": "__main__"})
    return said.getvalue()


def test_the_program_of_the_page_works() -> None:
    page = pathlib.Path(__file__).parent.parent.parent / "docs" / "clusters.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    with processes(2) as made:
        assert run_all(made, run_page, run_of("Slurm"), program) == ["['worker0', 'worker1']\n"] * 2


@pytest.mark.parametrize("variables", [SLURM, BATCH, *({given: "1"} for given, _ in LONE)], ids=min)
def test_arguments_of_the_program_precede_the_launchers_variables(
    tcp: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    met = open_meeting(tcp, -1, None, None, 30)
    assert (met.rank, met.world_size) == (-1, None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert open_meeting("env://", 0, None, None, 30).world_size is None
    assert open_meeting("env://", 0, 7, None, 30).world_size == 7


def test_an_error_shows_what_the_launcher_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.StoreUnreachable, match=r"no process serves.*Slurm reports that this is rank 3 of 4"):
        open_meeting("env://", -1, None, None, 0.05)
    monkeypatch.setenv("SLURM_PROCID", "4")
    with pytest.raises(errors.UsageError, match=r"rank 4 is not within.*Slurm reports"):
        open_meeting("env://", -1, None, None, 0.05)


def test_the_name_of_a_pod_that_starts_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    resolve = socket.getaddrinfo

    def late(host: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(sockets, "ASK_AGAIN", 0.01)
    with pytest.raises(errors.UsageError, match="cannot be resolved"):
        await_name("hello-0.hello", 30)  # outside of a pod, an unknown name is an error
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    await_name("hello-0.hello", 30)
    assert len(asked) == 3
    del asked[:]
    with pytest.raises(errors.UsageError, match="cannot be resolved"):
        await_name("hello-0.hello", 0)


class FakeRay(types.ModuleType):
    """The part of Ray that a connected process sees; actors are objects here."""

    class exceptions:  # noqa: N801 - its name in Ray
        class RayError(Exception):
            pass

    WORKER_MODE = 1

    def __init__(self, starts: bool = True, driver: bool = True) -> None:
        super().__init__("ray")
        self.worker = types.SimpleNamespace(mode=0 if driver else self.WORKER_MODE)
        self.starts = starts
        self.made: dict[str, Any] = {}
        self.asked: dict[str, Any] = {}
        self.killed = threading.Event()
        self.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_job_id=lambda: "01000000", worker=self.worker)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0, "node:__internal_head__": 1.0}

    def remote(self, kind: type[Any]) -> Any:
        def options(**asked: Any) -> Any:
            self.asked = asked
            return types.SimpleNamespace(remote=begin)

        def begin(*args: Any) -> Any:
            actor = self.made.setdefault(self.asked["name"], kind(*args))
            return types.SimpleNamespace(place=types.SimpleNamespace(remote=actor.place))

        return types.SimpleNamespace(options=options)

    def get(self, value: Any, timeout: float) -> Any:
        if not self.starts:
            raise self.exceptions.RayError
        return value

    def get_actor(self, name: str, namespace: str) -> Any:
        return self.made[name]

    def kill(self, actor: Any) -> None:
        self.killed.set()


def test_a_ray_actor_keeps_the_directory_until_no_worker_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(join, "LOOK", 0.01)
    met = [open_meeting(place, -1, None, None, 30) for place in ("env://", "ray://")]
    assert [(each.rank, each.world_size, each.serves, each.launched) for each in met] == [(-1, None, False, True)] * 2
    directories = [each.directory() for each in met if each.directory is not None]
    directories[0].swap("word", b"heard")
    assert directories[1].list("word").entries[0].value == b"heard"
    assert ray.asked == {
        "name": "telegrad-01000000",
        "namespace": "telegrad",
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "resources": {join.HEAD: join.LITTLE},
    }

    monkeypatch.setattr(Registry, "roster", Mock(side_effect=errors.DirectoryReset("its file was removed")))
    assert not ray.killed.wait(0.1)
    monkeypatch.setattr(join, "IDLE", 0.0)
    assert ray.killed.wait(30)
    for directory in directories:
        directory.close()
    for actor in ray.made.values():
        actor._keeping.close()


def test_an_actor_that_ray_has_restarted_finds_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    first = open_meeting("ray://", -1, None, None, 30)
    assert first.directory is not None
    with contextlib.closing(first.directory()) as directory:
        directory.swap("name/w", b"life", lease=directory.grant(60.0))
        (actor,) = ray.made.values()
        ray.made.clear()
        actor._keeping.leave()
        again = open_meeting("ray://", -1, None, None, 30)
        assert again.keys.secrets() == first.keys.secrets()
        assert again.directory is not None
        with contextlib.closing(again.directory()) as other:
            assert other.list("").entries == directory.list("").entries != ()
        for lease in {entry.lease for entry in directory.list("").entries}:
            directory.revoke(Lease(lease, 0.0, 0.0))  # otherwise the process goes on


@pytest.mark.parametrize("others", [{"MASTER_ADDR": "node1"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_variables_of_another_group_contradict_ray(
    tcp: str, monkeypatch: pytest.MonkeyPatch, others: dict[str, str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.UsageError, match=r"a Ray job.*names another group \((MASTER_ADDR=node1|RANK=0, WO)"):
        open_meeting("env://", -1, None, None, 30)
    assert open_meeting(tcp, -1, None, None, 30).directory is None  # the URL of the program takes precedence


def test_the_error_without_ray_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UsageError, match=r"call ray.init\(\) first"):
        open_meeting("ray://", -1, None, None, 30)
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    with pytest.raises(errors.UsageError, match="leave out rank and world_size"):
        open_meeting("ray://", 0, 2, None, 30)


def test_ray_within_slurm_is_used_only_without_ambiguity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "ray", FakeRay(driver=False))  # in a Ray that srun has started
    assert open_meeting("env://", -1, None, None, 30).world_size is None
    monkeypatch.setitem(sys.modules, "ray", FakeRay())  # each task has its own Ray, or all are jobs of one Ray
    with pytest.raises(errors.UsageError, match=r"several Ray drivers that Slurm has started.*the same init_method"):
        open_meeting("env://", -1, None, None, 30)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert open_meeting("env://", -1, None, None, 30).world_size is None


def test_an_actor_that_ray_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(starts=False))
    with pytest.raises(errors.StoreUnreachable, match=r"actor 'telegrad-01000000', .* does not answer"):
        open_meeting("env://", -1, None, None, 3)
