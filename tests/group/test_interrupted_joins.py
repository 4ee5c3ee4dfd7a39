"""Tests of joins that fail or are interrupted: they leave no thread, no connection and no process behind."""

import pathlib
import threading
from functools import partial
from unittest.mock import Mock

import pytest

from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.membership import join
from telegrad._core.rpc import cluster
from telegrad._core.stores import find_directory
from telegrad._core.stores.directory_client import EmbeddedDirectory
from telegrad._core.stores.stores import open_store
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from tests.cluster import KEYS, PATIENCE, wait_until

THREADS = ("telegrad-directory", "telegrad-lease", "telegrad-keeper")


def begin(folder: pathlib.Path, name: str) -> Worker:
    meet = partial(open_store, f"file://{folder}/store", -1, None, KEYS)
    return cluster.start(name, meet, TelegradOptions(rpc_timeout=PATIENCE), current.enter)


def running() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name in THREADS}


@pytest.mark.parametrize(
    ("where", "what", "others"),
    [
        pytest.param(find_directory, "write_pointer", 0, id="directory-started"),
        pytest.param(EmbeddedDirectory, "list", 1, id="directory-found"),
        pytest.param(join, "read_server_mark", 0, id="first-joined"),
        pytest.param(join, "read_server_mark", 1, id="joined"),
        pytest.param(cluster, "_check", 1, id="checked"),
    ],
)
def test_an_interrupted_join_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: object, what: str, others: int
) -> None:
    earlier = running()  # of other tests, which may end meanwhile
    workers = [begin(tmp_path, f"other{n}") for n in range(others)]
    before = running() - earlier
    with monkeypatch.context() as patch:
        patch.setattr(where, what, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            begin(tmp_path, "w")
    for other in workers:  # no lease has to end first
        assert len(other.directory.registry.roster().members) == others
    wait_until(lambda: running() - earlier == before)
    workers.append(begin(tmp_path, "w"))
    assert [member.name for member in workers[0].membership.workers()] == [each.me.name for each in workers]
    for worker in reversed(workers):
        worker.end("")
