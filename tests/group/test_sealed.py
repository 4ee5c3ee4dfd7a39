"""Tests of a directory with sealed values, to which other programs can write: forged, moved and unsealed values."""

from __future__ import annotations

import pathlib

import pytest

from telegrad import errors
from telegrad._core.directory.directory import Directory, Event
from telegrad._core.security.keyring import Keyring, new_key
from telegrad._core.stores import sealed_store
from telegrad._core.stores.sealed_store import SealedDirectory
from tests.cluster import KEYS
from tests.directory.harness import written
from tests.directory.naive import NaiveEngine
from tests.group.test_renewing import KeyFile

FORGED = {"unsealed": b"value", "of another program": b"\xff\xfe", "sealed with another key": b"", "moved": b""}


@pytest.fixture
def raw() -> Directory:
    """The directory as other programs see it."""
    return NaiveEngine().client()


@pytest.fixture
def directory(raw: Directory) -> SealedDirectory:
    return SealedDirectory(raw, KEYS, "place")


@pytest.fixture(params=FORGED)
def forged(request: pytest.FixtureRequest, raw: Directory, directory: SealedDirectory) -> bytes:
    """Return the value that another program writes under the key "a"."""
    if request.param == "moved":
        directory.swap("elsewhere", b"value")
        return raw.list("elsewhere").entries[0].value
    if request.param == "sealed with another key":
        other = NaiveEngine().client()
        SealedDirectory(other, Keyring([new_key()]), "place").swap("a", b"value")
        return other.list("a").entries[0].value
    return FORGED[request.param]


def test_values_are_read_as_they_were_written(raw: Directory, directory: SealedDirectory) -> None:
    lease = directory.grant(60.0)
    entry = written(directory.swap("a", "größe".encode(), lease=lease))
    other = SealedDirectory(raw, KEYS, "place")
    assert entry.value == "größe".encode()
    assert directory.list("").entries == other.list("a").entries == (entry,)
    assert entry.lease == raw.list("a").entries[0].lease == lease.id
    assert other.watch("", 0, 0.0)[1] == [Event(entry.revision, "a", entry)]
    assert not other.swap("a", b"2").done
    assert other.swap("a", b"2").entry == entry
    second = written(other.swap("a", b"2", entry.revision))
    assert directory.swap("a", None, second.revision) == (True, None)
    assert directory.list("").entries == ()
    assert directory.watch("", second.revision, 0.0)[1][-1].entry is None


def test_reading_a_forged_value_raises_an_error(raw: Directory, directory: SealedDirectory, forged: bytes) -> None:
    raw.swap("a", forged)
    for read in (lambda: directory.list("a"), lambda: directory.list(""), lambda: directory.swap("a", b"mine")):
        with pytest.raises(errors.StoreUntrusted, match="'a'"):
            read()


def test_a_watch_leaves_a_forged_value_out_with_one_warning(
    raw: Directory, directory: SealedDirectory, forged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    since = raw.list("").revision
    entry = written(raw.swap("a", forged))
    raw.swap("a", forged, entry.revision)
    good = written(directory.swap("b", b"value"))
    for _ in range(2):
        revision, events = directory.watch("", since, 0.0)
        assert revision == good.revision
        assert events == [Event(good.revision, "b", good)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "is ignored" in line
    assert "'a'" in line


# Replaced keys


def test_seals_are_renewed_after_the_key_was_replaced(raw: Directory, tmp_path: pathlib.Path) -> None:
    old, new = new_key(), new_key()
    file = KeyFile(tmp_path, old)
    directory = SealedDirectory(raw, file.ring(), "place")
    lease = directory.grant(60.0)
    entries = (written(directory.swap("a", b"1")), written(directory.swap("b", b"2", lease=lease)))
    raw.swap("stranger", b"unsealed")
    ended = directory.grant(60.0)
    directory.swap("c", b"3", lease=ended)
    before = raw.list("").revision
    directory.renew_seals()
    assert raw.list("").revision == before
    file.put(new, old)
    directory.renew_seals()
    later = SealedDirectory(raw, Keyring([new]), "place")
    for entry in entries:
        (found,) = later.list(entry.key).entries
        assert found == entry._replace(revision=found.revision)
    directory.revoke(ended)
    assert later.list("c").entries == ()
    with pytest.raises(errors.StoreUntrusted):
        SealedDirectory(raw, Keyring([old]), "place").list("a")


def test_entries_sealed_with_the_old_key_are_renewed_while_both_are_valid(
    raw: Directory, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_store, "RENEW_AGAIN", 0.0)
    old, new = new_key(), new_key()
    directory = SealedDirectory(raw, KeyFile(tmp_path, new, old).ring(), "place")
    directory.renew_seals()
    written(SealedDirectory(raw, Keyring([old, new]), "place").swap("a", b"1"))
    directory.renew_seals()
    assert SealedDirectory(raw, Keyring([new]), "place").list("a").entries[0].value == b"1"


def test_a_renewal_without_an_answer_is_tried_again(tmp_path: pathlib.Path) -> None:
    old, new = new_key(), new_key()
    file = KeyFile(tmp_path, old)
    engine = NaiveEngine()
    directory = SealedDirectory(engine.client(0.01), file.ring(), "place")
    directory.swap("a", b"1")
    file.put(new)
    engine.kill()
    directory.renew_seals()
    engine.start()
    file.put(new, old)
    directory.renew_seals()
    assert SealedDirectory(engine.client(), Keyring([new]), "place").list("a").entries[0].value == b"1"
