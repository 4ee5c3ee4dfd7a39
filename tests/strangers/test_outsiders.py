"""Attackers that are another user or on another host: the ports that they see, and attacks through these ports.

The other host is a network namespace that a cable connects with this one. The attacks run there, or here, in
a child process of the user nobody, and report what succeeded.
"""

import contextlib
import operator
import os
import socket
import subprocess
from collections.abc import Callable, Iterator

import cloudpickle
import pytest
import torch.distributed as dist

from telegrad import errors
from telegrad._core.membership.members import Member
from telegrad._core.membership.rendezvous import StaticJoin
from telegrad._core.security.handshake import Hello, Initiator
from telegrad._core.security.keyring import Keyring, new_key
from tests.cluster import agents, sealed, takes_less_than
from tests.hosts import enter, ip, why_not
from tests.other_user import become_nobody, is_root
from tests.strangers.door import listening, wait_closed

HERE, THERE = (f"10.{213 + os.getpid() % 8}.{os.getpid() // 8 % 256}.{end}" for end in (1, 2))  # ends of the cable
SOON = 20.0  # seconds
SECRET = "the key of the group, that is long"
FEW = 30  # messages of garbage

pytestmark = pytest.mark.skipif(not is_root(), reason="only root can be another user, or make a network namespace")


@pytest.fixture(scope="module")
def cable() -> Iterator[str]:
    """Return the name of a network namespace at the other end of a cable to this one."""
    if why := why_not():
        pytest.skip(why)
    name = f"telegrad{os.getpid()}out"
    ip("netns", "add", name)
    try:
        ip("link", "add", f"tg{os.getpid()}", "type", "veth", "peer", "name", "wire", "netns", name)
        ip("address", "add", f"{HERE}/30", "dev", f"tg{os.getpid()}")
        ip("link", "set", f"tg{os.getpid()}", "up")
        ip("-n", name, "address", "add", f"{THERE}/30", "dev", "wire")
        ip("-n", name, "link", "set", "wire", "up")
        yield name
    finally:
        ip("netns", "delete", name)
        subprocess.run(["ip", "link", "delete", f"tg{os.getpid()}"], capture_output=True)


@pytest.fixture(params=["another user", "another host"])
def elsewhere(request: pytest.FixtureRequest) -> str:
    """Return the network namespace of the attacker, or "" for this one."""
    return str(request.getfixturevalue("cable")) if request.param == "another host" else ""


def by_another_user(attack: Callable[[], list[str]], namespace: str = "") -> list[str]:
    """Return the successes of an attack that the user nobody runs in that network namespace."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        told = b""
        try:
            if namespace:
                enter(namespace)
            become_nobody()
            told = cloudpickle.dumps(attack())
        except BaseException as error:
            told = cloudpickle.dumps([f"the attack failed: {error!r}"])
        finally:
            os.write(writing, told)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return cloudpickle.loads(told)


def own_ports() -> set[int]:
    """Return the ports at which this process listens, over IPv4 or IPv6."""
    sockets = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {port for _, port, inode in listening() if f"socket:[{inode}]" in sockets}


def open_at(host: str, ports: set[int]) -> list[str]:
    found = []
    for port in sorted(ports):
        with contextlib.suppress(OSError), socket.create_connection((host, port), 2):
            found.append(f"{host}:{port}")
    return found


def test_no_port_is_open_for_another_host(cable: str) -> None:
    with agents(2, transport="tcp", key=SECRET) as workers:
        ports = own_ports()
        assert ports >= {worker.agent.me.tcp[1] for worker in workers}
        with socket.create_server((HERE, 0)) as known:  # an open port shows that the cable works
            port = known.getsockname()[1]
            assert by_another_user(lambda: open_at(HERE, {port}), cable) == [f"{HERE}:{port}"]
        assert by_another_user(lambda: open_at(HERE, ports), cable) == []


def attack_door(address: tuple[str, int], recorded: bytes) -> list[str]:
    """Send garbage, a handshake with another key, and a recorded message of a member."""

    def say(*said: bytes) -> None:
        with socket.create_connection(address, SOON) as sock:
            for data in said:
                with contextlib.suppress(ConnectionError):
                    sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            wait_closed(sock, SOON)

    for _ in range(FEW):
        say(os.urandom(200))
    say(recorded, recorded)
    me = Hello("w1", 1, "x", "")
    with socket.create_connection(address, SOON) as sock:
        end = Initiator(Keyring([new_key()]), me, me.incarnation)
        with contextlib.suppress(errors.TelegradError, OSError):
            sock.sendall(end.start())
            sock.settimeout(SOON)
            while not end.done and (heard := sock.recv(4096)):
                sock.sendall(end.receive(heard))
    return ["a handshake with another key"] if end.done else []


def test_attacks_on_the_port_of_a_worker_fail(elsewhere: str) -> None:
    with agents(2, transport="tcp", key=SECRET, address=HERE if elsewhere else "127.0.0.1") as (a, b):
        recorded = Initiator(Keyring([SECRET.encode()]), Hello("w0", 0, "x", ""), b.agent.me.incarnation).start()
        address, served = b.agent.me.tcp, b.agent.served
        assert by_another_user(lambda: attack_door(address, recorded), elsewhere) == []
        assert b.agent.served == served
        assert a.agent.call("w1", operator.add, (1, 2), None) == 3


def attack_store(host: str, port: int) -> list[str]:
    """Read all entries, and write those of a member with another key."""
    store = dist.TCPStore(host, port, is_master=False)
    found = [f"the key is at {key}" for key in store.list_keys() if SECRET.encode() in store.get(key)]
    stranger = Member("w1", 1, "life of a stranger", "program", "host", "", ("127.0.0.1", 1))
    with contextlib.suppress(errors.TelegradError):
        StaticJoin(sealed(store, Keyring([new_key()])), stranger, 2, 1.0).join()
        found.append("it has joined")
    for key in store.list_keys():
        store.set(key, "forged")
    return found


def test_attacks_on_the_store_fail(elsewhere: str) -> None:
    keys, host = Keyring([SECRET.encode()]), HERE if elsewhere else "127.0.0.1"
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    me = Member("w0", 0, "life of w0", "program", "host", "", ("127.0.0.1", 1))
    with contextlib.suppress(errors.GroupIncomplete):
        StaticJoin(sealed(store, keys), me, 2, 0.2).join()
    assert by_another_user(lambda: attack_store(host, store.port), elsewhere) == []
    with takes_less_than(SOON), pytest.raises(errors.StoreUntrusted, match="'telegrad/"):
        StaticJoin(sealed(store, keys), me, 2, SOON).join()
