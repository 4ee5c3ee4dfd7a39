"""The instructions of docs/security.md work: the commands run, and workers use their results."""

import operator
import os
import pathlib
import re
import shutil
import subprocess
import sys
from functools import partial

import pytest

from telegrad import errors
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.rpc.cluster import start
from telegrad._core.security.keyring import Keyring, read_keys
from telegrad._core.stores.find_directory import POINTER
from telegrad._core.stores.raw_stores import FileStore
from telegrad._core.stores.sealed_store import KeyValueStore, SealedStore
from telegrad._core.stores.stores import open_store
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from tests.cluster import PATIENCE, agents, wait_until

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "security.md").read_text()
SHELL = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def commands_with(words: str) -> str:
    (found,) = [block for block in SHELL if words in block]
    return str(found)


def run(commands: str, folder: pathlib.Path) -> None:
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    subprocess.run(["bash", "-eu", "-c", commands], cwd=folder, check=True, timeout=PATIENCE, env=environment)


@pytest.mark.nightly
def test_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [each for each in PROGRAMS if "telegrad.local" in each]
    exec(program, {})
    assert capsys.readouterr().out == "3\n"


def test_the_key_is_replaced_while_a_group_runs(tmp_path: pathlib.Path) -> None:
    """One of two hosts is a step ahead of the other: new workers join, and all workers call each other."""
    hosts = [tmp_path / name for name in ("one", "other")]
    for host in hosts:
        host.mkdir()
    run(commands_with("export TELEGRAD_KEY_FILE"), hosts[0])
    shutil.copy(hosts[0] / "group.key", hosts[1])
    make, *steps = re.split(r"\n(?=# \d)", commands_with("next.key"))
    run(make, hosts[0])
    shutil.copy(hosts[0] / "next.key", hosts[1])
    first = read_keys(str(hosts[0] / "group.key"))
    workers: list[Worker] = []
    try:
        join(workers, tmp_path, hosts)
        for number, step in enumerate(steps, 1):
            for host in hosts:
                run(step, host)
                join(workers, tmp_path, hosts)
            if number == 2:  # the page demands a wait
                wait_until(partial(is_sealed_anew, tmp_path, hosts[0] / "next.key"))
    finally:
        for worker in workers:
            worker.end("")
    assert not {*read_keys(str(hosts[0] / "group.key"))} & {*first}


def is_sealed_anew(folder: pathlib.Path, path: pathlib.Path) -> bool:
    """Return True if the store is sealed with the key in this file."""
    board = KeyValueStore(SealedStore(FileStore(f"{folder}/store"), Keyring(read_keys(str(path)))))
    try:
        return bool(board.read(POINTER))
    except errors.StoreUntrusted:
        return False


def join(workers: list[Worker], folder: pathlib.Path, hosts: list[pathlib.Path]) -> None:
    """Have a worker of each host join, and call all workers and be called by them."""
    for host in hosts:
        path = str(host / "group.key")
        meet = partial(open_store, f"file://{folder}/store", -1, None, Keyring(read_keys(path), path))
        options = TelegradOptions(rpc_timeout=PATIENCE, transport="tcp")
        new = start(f"w{len(workers)}", meet, options, current.enter)
        for old in workers:
            assert new.agent.call(old.me.name, operator.add, (1, 2), {}) == 3
            assert old.agent.call(new.me.name, operator.add, (1, 2), {}) == 3
        workers.append(new)


def test_certificates(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(commands_with("openssl"), tmp_path)
    monkeypatch.chdir(tmp_path)
    (program,) = [each for each in PROGRAMS if "# tls.py" in each]
    found: dict[str, object] = {}
    exec(program, found)
    options = found["options"]
    assert isinstance(options, TelegradOptions)
    with agents(2, tls=options.tls) as (a, b):
        assert a.agent.call("w1", operator.add, (1, 2), {}) == 3
        assert not b.agent.describe(0, "host").unix
