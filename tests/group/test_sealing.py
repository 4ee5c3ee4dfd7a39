"""Tests of sealed values: those forged, moved, replayed or removed without the group's key are refused."""

import json
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from telegrad import errors
from telegrad._core.security.keyring import Keyring, new_key
from telegrad._core.stores import sealed_store
from telegrad._core.stores.directory import Directory, Event
from telegrad._core.stores.sealed_store import KeyValueStore, SealedDirectory, Sealer
from tests.cluster import KEYS, sealed
from tests.directory.harness import written
from tests.directory.naive import NaiveEngine
from tests.group.test_renewing import KeyFile

OTHERS = Keyring([new_key()])
texts = st.text(max_size=40)


@given(texts, texts, texts, st.integers(1, 2**63))
def test_a_sealed_value_is_read_by_another_member(group: str, place: str, value: str, serial: int) -> None:
    assert Sealer(KEYS, "a").open(group, place, Sealer(KEYS, "b").seal(group, place, value, serial))[:2] == (
        value,
        serial,
    )


@given(texts, texts, texts, texts, texts, st.integers(1, 99), st.data())
def test_changed_or_moved_values_are_refused(
    group: str, place: str, value: str, other_group: str, other_place: str, serial: int, data: st.DataObject
) -> None:
    made = Sealer(KEYS, "life").seal(group, place, value, serial)
    position = data.draw(st.integers(0, len(made) - 1))
    letter = data.draw(st.characters())
    forged: list[tuple[str, str, str]] = [
        (group, place, made[:position] + letter + made[position + 1 :]),
        (group, place, made[:position]),
        (group, place, made + letter),
        (group, place, value),
        (other_group, place, made),
        (group, other_place, made),
        (group, place, Sealer(OTHERS, "life").seal(group, place, value, serial)),
    ]
    for in_group, at, text in forged:
        if (in_group, at, text) == (group, place, made) or not text:
            continue
        with pytest.raises(errors.StoreUntrusted):
            Sealer(KEYS, "life").open(in_group, at, text)


def boards(store: Any) -> tuple[KeyValueStore, KeyValueStore]:
    return KeyValueStore(sealed(store), "p"), KeyValueStore(sealed(store), "p")


def test_an_older_value_that_is_put_back_is_refused() -> None:
    store = dist.HashStore()
    mine, other = boards(store)
    other.write("a", "first")
    old = store.get("p/a").decode()
    other.write("a", "second")
    assert mine.read("a") == "second"
    store.set("p/a", old)
    for attempt in (lambda: mine.read("a"), lambda: mine.swap("a", "second", "x"), lambda: mine.write("a", "x")):
        with pytest.raises(errors.StoreUntrusted, match="older value"):
            attempt()


def test_a_value_that_is_removed_without_the_key_is_refused() -> None:
    store = dist.HashStore()
    mine, other = boards(store)
    other.write("a", "first")
    assert mine.read("a") == "first"
    store.set("p/a", "")
    with pytest.raises(errors.StoreUntrusted):
        mine.swap("a", "", "second")


def test_members_remove_a_value_by_a_sealed_empty_one() -> None:
    mine, other = boards(dist.HashStore())
    mine.write("a", "first")
    assert other.swap("a", "first", "") == ""
    assert mine.read("a") == ""
    assert mine.swap("a", "", "second") == "second" == other.read("a")


def test_terms_bind_a_board_to_their_group() -> None:
    store = dist.HashStore()
    mine, other = boards(store)
    mine.claim_terms(json.dumps(["one"]))
    mine.write("a", "value")
    with pytest.raises(errors.StoreUntrusted):  # this member does not know the group yet
        other.read("a")
    assert other.terms()
    assert other.read("a") == "value"
    elsewhere = dist.HashStore()
    elsewhere.set("p/a", store.get("p/a").decode())
    third = KeyValueStore(sealed(elsewhere), "p")
    third.claim_terms(json.dumps(["two"]))
    with pytest.raises(errors.StoreUntrusted):
        third.read("a")


def add(board: KeyValueStore, number: int) -> None:
    """Add one number to a list while other threads do the same."""
    while True:
        before = board.read("n")
        more = f"{before} {number}"
        if board.swap("n", before, more) == more:
            return


@pytest.mark.parametrize("shared", [True, False])
def test_simultaneous_swaps_lose_no_number(shared: bool) -> None:
    store = dist.HashStore()
    board = KeyValueStore(sealed(store))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add(board if shared else KeyValueStore(sealed(store)), number), range(64)))
    assert sorted(map(int, board.read("n").split())) == list(range(64))


def test_simultaneous_writes_never_lower_the_serial() -> None:
    store = dist.HashStore()
    reader = KeyValueStore(sealed(store))

    def write(number: int) -> None:
        KeyValueStore(sealed(store)).write("n", str(number))
        assert reader.read("n")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(200)))


@pytest.mark.parametrize("forged", ["--5", "9" * 5000, "١", " ", "\x1b[31m", "stoll"])
def test_a_hint_that_is_no_number_counts_as_zero(forged: str) -> None:
    store = dist.HashStore()
    board = KeyValueStore(sealed(store))
    board.add_hint("n")
    assert board.hint("n") == 1
    store.set("n", forged)
    board.add_hint("n")
    assert board.hint("n") == 0


def test_the_value_that_stands_for_an_empty_entry_is_not_accepted() -> None:
    """A reader of the open connection to a store learns this value from a look-up, and could write it."""
    told: list[str] = []

    class Store(dist.HashStore):
        def compare_set(self, place: str, expected: str, value: str) -> Any:
            told.append(expected)
            return super().compare_set(place, expected, value)

    raw = Store()
    board = KeyValueStore(sealed(raw))
    assert board.read("n") == ""
    raw.set("n", told[0])
    with pytest.raises(errors.StoreUntrusted):
        board.read("n")


def test_reading_a_missing_key_fails_instead_of_waiting() -> None:
    store = dist.HashStore()
    board = KeyValueStore(sealed(store))
    board.write("a", "1")
    with pytest.raises(errors.StoreUntrusted, match="'b'"):
        board.read_all(["a", "b"])


# A directory with sealed values, to which other programs can write


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
