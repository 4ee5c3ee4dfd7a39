"""Tests of the file of an embedded directory."""

import os
import pathlib
import random
import stat
from collections.abc import Callable
from typing import Any

import pytest

from telegrad._core.stores import lease_table as table
from telegrad._core.stores.lease_table import LeaseTable, Limits, remove
from telegrad.errors import UsageError


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "directory")


def content(table: LeaseTable) -> dict[str, Any]:
    """Return the whole content of a table."""
    leases = {lease: ttl for lease, (_, ttl) in table.leases.items()}
    return {
        "listing": table.list(""),
        "changes": table.changes("", table.compacted, 1 << 30),
        "leases": leases,
        "entries": table._entries,
        "sorted": table._sorted,
        "used": (table._bytes, table._changes, table._change_bytes),
        "clients": +table._clients,
    }


def work(table: LeaseTable, chance: random.Random) -> None:
    """Do a random operation."""
    leases = list(table.leases)
    key, client = f"{chance.randrange(6)}", f"client{chance.randrange(3)}"
    found, kind = table.list(key).entries, chance.random()
    if kind < 0.1:
        table.grant(chance.choice([1.0, 2.5]), 0.0)
    elif kind < 0.2 and leases:
        table.revoke(chance.choice(leases))
    else:
        value = None if kind < 0.4 else chance.randbytes(chance.randrange(3))
        lease = chance.choice(leases) if leases and chance.random() < 0.5 else 0
        table.swap(key, value, found[0].revision if found else 0, lease, client)


@pytest.mark.parametrize("seed", range(8))
def test_committed_operations_are_there_after_a_restart(path: str, seed: int) -> None:
    chance, limits = random.Random(seed), Limits(changes=20)
    opened = LeaseTable(path, limits)
    identity = opened.identity
    for _ in range(12):
        for _ in range(chance.randrange(30)):
            work(opened, chance)
        opened.file.commit(opened.revision)
        if chance.random() < 0.7:
            before = content(opened)
            opened.file.close()
            opened = LeaseTable(path, limits)
            assert (content(opened), opened.identity) == (before, identity)
    assert opened.file.one("SELECT count(*) FROM changes") <= 20
    opened.file.close()


def test_operations_that_were_not_committed_are_gone(path: str) -> None:
    opened = LeaseTable(path)
    opened.swap("a", b"")
    opened.file.commit(opened.revision)
    opened.swap("b", b"")
    opened.file.close()
    assert [entry.key for entry in LeaseTable(path).list("").entries] == ["a"]


def test_two_servers_do_not_share_a_file(path: str) -> None:
    opened = LeaseTable(path)
    with pytest.raises(UsageError, match="Another server"):
        LeaseTable(path)
    opened.file.close()
    LeaseTable(path).file.close()


def test_a_file_of_another_boot_is_not_trusted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = LeaseTable(path)
    opened.swap("a", b"")
    opened.file.commit(opened.revision)
    opened.file.close()
    monkeypatch.setattr(table, "_boot", lambda: "another")
    again = LeaseTable(path)
    assert (again.revision, again.list("").entries) == (0, ())
    assert again.identity != opened.identity
    again.file.close()
    assert LeaseTable(path).identity == again.identity


@pytest.mark.parametrize("spoil", [lambda data: b"x" * len(data), lambda data: data[:100] + b"\xff" * 2000])
def test_a_damaged_file_is_refused(path: str, spoil: Callable[[bytes], bytes]) -> None:
    LeaseTable(path).file.close()
    file = pathlib.Path(path)
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(UsageError, match="damaged"):
        LeaseTable(path)


def test_a_missing_folder_is_an_error() -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        LeaseTable("/nowhere/directory")


def test_removing_leaves_no_file(path: str) -> None:
    opened = LeaseTable(path)
    opened.swap("a", b"")
    opened.file.commit(opened.revision)
    assert len(os.listdir(os.path.dirname(path))) >= 2
    remove(path)
    assert os.listdir(os.path.dirname(path)) == []
    remove(path)


def test_auxiliary_files_are_as_private_as_the_main_file(path: str) -> None:
    os.close(os.open(path, os.O_CREAT, 0o600))
    opened = LeaseTable(path)
    opened.swap("a", b"")
    opened.file.commit(opened.revision)
    assert {stat.S_IMODE(file.stat().st_mode) for file in pathlib.Path(path).parent.iterdir()} == {0o600}
