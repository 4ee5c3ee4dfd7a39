"""Hosts with IPv6 only: a network namespace of the test, whose loopback has no IPv4 address."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from telegrad._core.sockets import family_of
from tests.cluster import PATIENCE

ROOT = pathlib.Path(__file__).parent.parent
BARE = 'ip link set lo up; ip addr del 127.0.0.1/8 dev lo; exec "$@"'
LOCAL = """
import operator, telegrad, telegrad.rpc as rpc, telegrad.insight
with telegrad.local(1, driver="boss") as workers:
    print(rpc.rpc_sync(workers[0], operator.add, (1, 2)), rpc.rpc_sync(workers[0], rpc.get_worker_info).name)
    with telegrad.insight.dashboard() as shown:
        print("[::1]" in shown.url)
"""
MEET = """
import operator, os, sys, telegrad.rpc as rpc
rank = int(sys.argv[1])
options = rpc.TelegradOptions(transport="tcp", init_method=sys.argv[2], rpc_timeout=60)
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
print(rpc.rpc_sync(f"w{1 - rank}", operator.add, (1, 2)))
rpc.shutdown()
"""
TWO = 'python -c "$1" 0 "$2" & python -c "$1" 1 "$2"; wait'


def test_the_family_of_an_address() -> None:
    v4, v6 = socket.AF_INET, socket.AF_INET6
    addresses = {"127.0.0.1": v4, "0.0.0.0": v4, "::": v6, "::1": v6, "fe80::1%eth0": v6}
    assert {address: family_of(address) for address in addresses} == addresses


def has_namespaces() -> bool:
    probe = ["unshare", "-n", "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=PATIENCE).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not has_namespaces(), reason="needs the right to make network namespaces")


def run(*command: str, variables: dict[str, str] | None = None, with_errors: bool = False, network: str = BARE) -> str:
    bare = ["unshare", "-n", "sh", "-c", network, "-", *command]
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **(variables or {})}
    ended = subprocess.run(bare, env=environment, capture_output=True, text=True, timeout=4 * PATIENCE)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr * with_errors


@pytest.mark.nightly
@pytest.mark.timeout(5 * PATIENCE)
@pytest.mark.parametrize("begin", ["telegrad.local(1, rpc_timeout=5)", "rpc.init_rpc('w0', rank=0, world_size=1)"])
def test_a_host_whose_loopback_interface_is_down(begin: str) -> None:
    program = f"import telegrad, telegrad.rpc as rpc; {begin}"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    command = ["unshare", "-n", sys.executable, "-c", program]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert "StoreUnreachable: the store cannot be served: this host cannot connect to its own address" in ended.stderr
    assert ended.stderr.strip().endswith("`ip link set lo up`")


@pytest.mark.nightly
@pytest.mark.timeout(5 * PATIENCE)
def test_local_workers_and_the_dashboard() -> None:
    assert run("python", "-c", LOCAL) == "3 worker0\nTrue\n"


@pytest.mark.nightly
@pytest.mark.timeout(5 * PATIENCE)
@pytest.mark.parametrize("method", ["tcp://[::1]:29500", "env://"])
def test_workers_that_join_over_a_store(method: str) -> None:
    variables = {"MASTER_ADDR": "::1", "MASTER_PORT": "29500"} if method == "env://" else {}
    printed = run("sh", "-c", TWO, "-", MEET, method, variables=variables)
    assert sorted(printed) == sorted("3\n3\n")  # two processes print at once


LINK_LOCAL = """
ip link set lo up; ip link add v0 type veth peer name v1; ip link set v0 addrgenmode none; ip link set v1 up
ip link set v0 up; ip addr add fe80::7/64 dev v0 nodad; exec "$@"
"""
DYNAMIC = """
import operator, os, sys, telegrad.insight, telegrad.rpc as rpc
rank, host = int(sys.argv[1]), "fe80::7%v0"
options = rpc.TelegradOptions(transport="tcp", init_method=sys.argv[2], rpc_timeout=60, address=host)
rpc.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options)
if rank == 0:
    rpc.wait_for_workers(2)
    with telegrad.insight.dashboard(host=host):
        print(rpc.rpc_sync("w1", operator.add, (1, 2)))
    rpc.shutdown()
else:
    rpc.serve()
    print(3)
"""


@pytest.mark.nightly
@pytest.mark.timeout(5 * PATIENCE)
@pytest.mark.parametrize("program", [MEET, DYNAMIC], ids=["fixed", "dynamic"])
def test_link_local_addresses_with_their_interface(program: str) -> None:
    printed = run("sh", "-c", TWO, "-", program, "tcp://[fe80::7%v0]:29500", network=LINK_LOCAL)
    assert sorted(printed) == sorted("3\n3\n")


@pytest.mark.nightly
@pytest.mark.timeout(5 * PATIENCE)
def test_telegrad_run(tmp_path: pathlib.Path) -> None:
    program = "import telegrad.rpc as rpc; rpc.init_rpc(); print(rpc.get_worker_info().name); rpc.shutdown()"
    said = run(
        "python", "-m", "telegrad", "run", "--logs", str(tmp_path), "--", "python", "-c", program, with_errors=True
    )
    assert "worker0" in said
    assert "[::1]:" in said
