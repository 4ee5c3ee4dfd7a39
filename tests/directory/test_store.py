"""The file of an embedded directory."""

from __future__ import annotations

import os
import pathlib
import random
import stat
from collections.abc import Callable
from typing import Any

import pytest

from telegrad.directory import store
from telegrad.directory.store import Store, remove
from telegrad.directory.table import Limits, Saved, Table
from telegrad.errors import UsageError


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "directory")


def content(table: Table) -> dict[str, Any]:
    """Return all that a table says."""
    return {
        "listing": table.list(""),
        "changes": table.changes("", table.compacted, 1 << 30),
        "leases": {lease: (held.ttl, held.client, held.keys) for lease, held in table._leases.items()},
        "writers": table._writers,
        "total": vars_of(table._total),
        "used": {client: vars_of(used) for client, used in table._used.items()},
    }


def vars_of(used: Any) -> tuple[int, int, int]:
    return used.keys, used.leases, used.bytes


def work(table: Table, chance: random.Random) -> None:
    """Do something at random."""
    leases = list(table._leases)
    key, client = f"{chance.randrange(6)}", f"client{chance.randrange(3)}"
    found = table.list(key).entries
    kind = chance.random()
    if kind < 0.1:
        table.grant(chance.choice([1.0, 2.5]), 0.0, client)
    elif kind < 0.2 and leases:
        table.revoke(chance.choice(leases))
    else:
        value = None if kind < 0.4 else chance.randbytes(chance.randrange(3))
        lease = chance.choice(leases) if leases and chance.random() < 0.5 else 0
        table.swap(key, value, found[0].revision if found else 0, lease, client)


@pytest.mark.parametrize("seed", range(8))
def test_what_was_saved_is_loaded(path: str, seed: int) -> None:
    chance, limits = random.Random(seed), Limits(changes=20)
    opened = Store(path)
    identity, table = opened.identity, Table(limits, opened.load())
    for _ in range(12):
        for _ in range(chance.randrange(30)):
            work(table, chance)
        opened.save(table.journal, table.revision, table.compacted)
        table.journal.clear()
        if chance.random() < 0.7:
            opened.close()
            opened = Store(path)
            again = Table(limits, opened.load())
            assert content(again) == content(table)
            assert opened.identity == identity
            table = again
    opened.close()
    rows = Store(path)._database.execute("SELECT COUNT(*) FROM changes").fetchone()[0]
    assert rows <= 20


def test_an_empty_value_is_no_deletion(path: str) -> None:
    table, opened = Table(), Store(path)
    table.swap("a", b"")
    opened.save(table.journal, table.revision, table.compacted)
    opened.close()
    assert Store(path).load().changes[0].entry.value == b""


def test_in_memory() -> None:
    opened = Store(":memory:")
    assert opened.load() == Saved()
    assert opened.identity != Store(":memory:").identity


def test_two_servers_do_not_share_a_file(path: str) -> None:
    opened = Store(path)
    with pytest.raises(UsageError, match="Another server"):
        Store(path)
    opened.close()
    Store(path).close()


def test_a_file_of_another_boot_is_not_trusted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, table = Store(path), Table()
    table.swap("a", b"")
    opened.save(table.journal, table.revision, table.compacted)
    opened.close()
    monkeypatch.setattr(store, "_boot", lambda: "another")
    again = Store(path)
    assert again.load() == Saved()
    assert again.identity != opened.identity
    again.close()
    assert Store(path).identity == again.identity


@pytest.mark.parametrize("spoil", [lambda data: b"x" * len(data), lambda data: data[:100] + b"\xff" * 2000])
def test_a_file_that_is_damaged(path: str, spoil: Callable[[bytes], bytes]) -> None:
    opened = Store(path)
    opened.close()
    file = pathlib.Path(path)
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(UsageError, match="damaged"):
        Store(path).load()


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        Store("/nowhere/directory")


def test_no_file_is_left(path: str) -> None:
    opened, table = Store(path), Table()
    table.swap("a", b"")
    opened.save(table.journal, table.revision, table.compacted)
    assert len(os.listdir(os.path.dirname(path))) >= 2
    remove(path)
    assert os.listdir(os.path.dirname(path)) == []
    remove(path)


def test_files_beside_it_are_as_private_as_it_is(path: str) -> None:
    os.close(os.open(path, os.O_CREAT, 0o600))
    opened, table = Store(path), Table()
    table.swap("a", b"")
    opened.save(table.journal, table.revision, table.compacted)
    folder = pathlib.Path(path).parent
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
