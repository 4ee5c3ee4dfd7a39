"""Tests of stores that are files: the format is torch's, and damaged content is refused at once."""

import os
import pathlib
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telegrad import errors
from telegrad._core.stores import raw_stores, sealed_store
from tests.cluster import opened, sealed
from tests.other_user import NOBODY, as_nobody, is_root, shared

pytest.importorskip("fcntl")  # without it, torch's own store is used
__all__ = ["shared"]
SOON = 10.0  # seconds, on a busy machine

ENTRIES = st.lists(st.tuples(st.sampled_from(["a", "b", "counter"]), st.binary(max_size=20)), max_size=6)


def content(entries: list[tuple[str, bytes]]) -> bytes:
    parts = [part for key, value in entries for part in (b"/" + key.encode(), value)]
    return b"".join(struct.pack("=I", len(part)) + part for part in parts)


def put(store: Any, key: str, value: str) -> None:
    assert store.compare_set(key, "", value) == value.encode()


def test_torch_reads_our_files_and_we_read_torchs(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    mine, theirs = raw_stores.FileStore(path), dist.FileStore(path, -1)
    put(mine, "a", "1")
    theirs.set("b", "2")
    assert mine.multi_get(["a", "b"]) == theirs.multi_get(["a", "b"]) == [b"1", b"2"]
    assert [mine.add("n", 2), theirs.add("n", 3), mine.add("n", 1)] == [2, 5, 6]
    for store in (mine, theirs):
        assert store.compare_set("c", "x", "y") == b"x"  # the key does not exist
        assert not store.check(["c"])
    put(mine, "c", "1")
    assert theirs.compare_set("c", "2", "3") == b"1"
    assert theirs.compare_set("c", "1", "3") == b"3"
    assert mine.multi_get(["c"]) == [b"3"]
    assert theirs.delete_key("a")
    assert not mine.check(["a"])
    assert sorted(mine.list_keys()) == ["b", "c", "n"]
    assert mine.num_keys() == 3


def test_counters_of_several_stores_on_one_file_lose_nothing(tmp_path: Path) -> None:
    def count(_: int) -> None:
        store = raw_stores.FileStore(str(tmp_path / "store"))
        for _ in range(50):
            store.add("n", 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert raw_stores.FileStore(str(tmp_path / "store")).multi_get(["n"]) == [b"200"]


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ENTRIES, st.integers(0, 200), st.binary(max_size=60))
def test_any_content_is_read_or_refused_at_once(
    tmp_path: Path, entries: list[tuple[str, bytes]], kept: int, behind: bytes
) -> None:
    """A valid store is cut somewhere, and arbitrary bytes follow."""
    path = tmp_path / "store"
    path.unlink(missing_ok=True)
    path.write_bytes(content(entries)[:kept] + behind)
    path.chmod(0o600)
    begun, refused = time.monotonic(), ""
    try:
        store = raw_stores.FileStore(str(path))
        store.add("counter", 1)
        store.compare_set("a", "", "1")
    except errors.StoreUntrusted as error:
        refused = str(error)
    assert not refused or str(path) in refused
    assert time.monotonic() - begun < SOON
    if kept >= len(content(entries)) and not behind:
        assert all(raw_stores.FileStore(str(path)).check([key]) for key, _ in entries)


@pytest.mark.parametrize("spoil", ["cut", "garbled", "zeros", "replaced", "gone"])
def test_a_file_that_is_damaged_while_it_is_used_is_refused(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "store"
    store = raw_stores.FileStore(str(path))
    put(store, "a", "value")
    if spoil == "cut":
        os.truncate(path, path.stat().st_size - 2)
    elif spoil == "replaced":
        (tmp_path / "other").write_bytes(path.read_bytes())
        (tmp_path / "other").chmod(0o600)
        (tmp_path / "other").rename(path)
    elif spoil == "gone":
        path.unlink()
    else:
        with path.open("ab") as file:
            file.write(b"garbage" if spoil == "garbled" else bytes(100))
    with pytest.raises(errors.StoreLost if spoil == "gone" else errors.StoreUntrusted, match=str(path)):
        store.add("n", 1)


def test_the_error_of_a_damaged_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(content([("telegrad/round", b"x")])[:-1])
    path.chmod(0o600)
    with pytest.raises(errors.StoreUntrusted, match=f"{path}.*Remove it, or name another"):
        opened(f"file://{path}", 0, 2, 30)


def test_a_file_must_not_be_writable_by_other_users(tmp_path: Path) -> None:
    opened(f"file://{tmp_path}/new", 0, 2, 30)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    (tmp_path / "open").touch()
    (tmp_path / "open").chmod(0o666)
    with pytest.raises(errors.StoreUnreachable, match=r"other users may write it.*chmod 600"):
        opened(f"file://{tmp_path}/open", 0, 2, 30)


@pytest.mark.skipif(not is_root(), reason="only root can be another user")
def test_a_file_of_another_user_is_refused(shared: pathlib.Path) -> None:
    path = shared / "store"
    as_nobody(lambda: path.touch(0o600))
    with pytest.raises(errors.StoreUnreachable, match=f"belongs to user {NOBODY}"):
        opened(f"file://{path}", 0, 2, 30)


def test_a_file_that_stays_locked_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(raw_stores, "LOCKED", raw_stores.LOCKED / 10)
    monkeypatch.setattr(sealed_store, "ANSWER", sealed_store.ANSWER / 10)
    path = tmp_path / "store"
    store = sealed(raw_stores.FileStore(str(path)))
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with pytest.raises(errors.StoreLost, match=f"{path}.*locked by another process"):
            store.call("add", "n", 1)
    store.call("add", "n", 1)


def test_a_read_needs_no_lock(tmp_path: Path) -> None:
    """torch waits for it while it has the interpreter's lock, which a thread with the lock of the file would need."""
    import fcntl

    path = tmp_path / "store"
    store = raw_stores.FileStore(str(path))
    put(store, "a", "1")
    with path.open() as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert store.multi_get(["a"]) == [store.compare_set("a", "2", "2")] == [b"1"]
        assert store.compare_set("b", "2", "2") == b"2"
        assert not store.check(["b"])


def test_a_file_whose_rights_change_while_it_is_used_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = sealed(raw_stores.FileStore(str(path)))
    path.chmod(0o666)
    with pytest.raises(errors.StoreLost, match="chmod 600 this one"):
        store.call("add", "n", 1)
    path.chmod(0o600)
    assert store.call("add", "n", 1) == 1
