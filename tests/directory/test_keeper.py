"""Tests of the process that serves an embedded directory, and of its keeper."""

import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from telegrad._core.stores.directory import DirectoryLost, DirectoryReset, LeaseLost
from telegrad._core.stores.directory_client import EmbeddedDirectory
from telegrad._core.stores.directory_server import ServerProcess
from telegrad._core.stores.lease_table import remove
from tests.cluster import KEYS, is_over, wait_until
from tests.directory.harness import PATIENCE, is_gone, wait_for, written


@pytest.fixture
def keeper() -> Iterator[ServerProcess]:
    found = ServerProcess(KEYS)
    yield found
    found.close()


@pytest.fixture
def client(keeper: ServerProcess) -> Iterator[EmbeddedDirectory]:
    found = EmbeddedDirectory(keeper.address, KEYS, PATIENCE)
    yield found
    found.close()


def end(keeper: ServerProcess) -> None:
    os.kill(keeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)


def test_the_process_has_one_thread_and_no_torch(keeper: ServerProcess, client: EmbeddedDirectory) -> None:
    client.list("")
    process = pathlib.Path(f"/proc/{keeper.pid}")
    assert "Threads:\t1\n" in (process / "status").read_text()
    assert "torch" not in (process / "maps").read_text()


def fill_disk(keeper: ServerProcess, client: EmbeddedDirectory) -> None:
    """Let the process end as it writes: none of its files may grow, nor its log."""
    client.list("")
    resource.prlimit(keeper.pid, resource.RLIMIT_FSIZE, (1, 1))
    with pytest.raises(DirectoryLost):
        client.swap("a", b"")
    os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)


def test_a_process_that_cannot_write_is_reported_once_and_restarted_less_often(
    keeper: ServerProcess, client: EmbeddedDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    fill_disk(keeper, client)
    assert keeper.restart_if_ended()
    assert f"the file of the directory, {keeper.path!r}, cannot be written" in caplog.text
    assert "Free space on its disk" in caplog.text
    caplog.clear()
    fill_disk(keeper, client)
    assert not keeper.restart_if_ended()
    wait_until(keeper.restart_if_ended)
    assert not caplog.text
    written(client.swap("a", b""))
    end(keeper)  # killed for another reason
    assert keeper.restart_if_ended()
    assert "SIGKILL" in caplog.text


def test_a_process_is_not_restarted_after_its_keeper_has_left(keeper: ServerProcess) -> None:
    end(keeper)
    keeper.leave()
    assert not keeper.restart_if_ended()


def test_leaving_a_process_that_could_not_be_restarted_is_no_error(
    keeper: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(keeper)
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "_start", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            keeper.restart_if_ended()
    keeper.leave()


def test_a_server_on_ipv6_can_be_reached() -> None:
    try:
        keeper = ServerProcess(KEYS, "::1")
    except OSError:
        pytest.skip("this host has no IPv6")
    client = EmbeddedDirectory(keeper.address, KEYS)
    client.list("")
    client.close()
    keeper.close()


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        ServerProcess(KEYS, port=taken.getsockname()[1])


def test_a_directory_that_lost_its_state_is_noticed(keeper: ServerProcess, client: EmbeddedDirectory) -> None:
    client.swap("a", b"")
    end(keeper)
    remove(keeper.path)
    keeper.restart_if_ended()
    with pytest.raises(DirectoryReset, match="restarted without its data"):
        client.list("")
    fresh = EmbeddedDirectory(keeper.address, KEYS)
    assert fresh.list("").entries == ()
    fresh.close()


def test_a_lease_does_not_end_while_the_server_is_stopped(keeper: ServerProcess, client: EmbeddedDirectory) -> None:
    """Its holder could not renew it; by its own clock it has stopped acting as an owner, and may go on now."""
    lease = client.grant(1.0)
    entry = written(client.swap("a", b"", lease=lease))
    os.kill(keeper.pid, signal.SIGSTOP)
    wait_until(lambda: time.monotonic() > lease.ends + 1.5)
    os.kill(keeper.pid, signal.SIGCONT)
    client.list("")
    lease = client.renew(lease)
    assert client.list("a").entries == (entry,)
    wait_for(client, "a", entry.revision, is_gone, PATIENCE)
    with pytest.raises(LeaseLost):
        client.renew(lease)


PROGRAM = """
import os, signal, sys
from telegrad._core.stores.directory_server import ServerProcess
from telegrad._core.security.keyring import Keyring
keeper = ServerProcess(Keyring([b"tgk1-" + 43 * b"A"]))
if not os.fork():  # a child that holds the pipe, too
    sys.stdout.close()
    signal.pause()
    os._exit(0)
print(keeper.pid, keeper.address[1], keeper.path, flush=True)
signal.pause()
"""


def test_the_process_ends_with_its_keeper_and_leaves_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        pid, port, path = process.stdout.readline().split()
        client = EmbeddedDirectory(("127.0.0.1", int(port)), KEYS, PATIENCE)
        client.swap("a", b"")
        client.close()
        assert os.path.exists(path)
        process.kill()
        process.wait()
        wait_until(lambda: is_over(int(pid)))
        assert not os.path.exists(path)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
