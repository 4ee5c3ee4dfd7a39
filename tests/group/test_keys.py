"""Where the key of a group is found, and which keys are refused."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess
import sys
from typing import Any

import pytest

from telegrad import errors
from telegrad.group.keys import find_keys, given_keys
from telegrad.keyring import Keyring, new_key, read_keys
from telegrad.rpc.options import TelegradOptions

KEY = "a key that all workers share"


@pytest.fixture(autouse=True)
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    for name in ("TELEGRAD_KEY", "TELEGRAD_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def proof(keys: Keyring) -> bytes:
    return keys.derive(b"test")[0]


def test_the_first_that_says_anything_holds(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY + "!")
    path.chmod(0o600)
    environment = {"TELEGRAD_KEY": KEY, "TELEGRAD_KEY_FILE": str(path)}
    assert proof(find_keys("another key, of the options", environment)) == proof(
        Keyring([b"another key, of the options"])
    )
    assert proof(find_keys(None, environment)) == proof(Keyring([KEY.encode()]))
    del environment["TELEGRAD_KEY"]
    assert proof(find_keys(None, environment)) == proof(Keyring([KEY.encode() + b"!"]))
    assert given_keys(None, {}) is None
    assert proof(find_keys(None, {})) == proof(find_keys(None, {}))


def test_the_users_own_file(home: pathlib.Path) -> None:
    keys = find_keys()
    path = home / "telegrad" / "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert proof(keys) == proof(Keyring(read_keys(str(path))))
    assert str(path) in keys.source


def test_processes_at_once_find_one_key() -> None:
    program = "from telegrad.group.keys import find_keys; print(find_keys().derive(b'test')[0].hex())"
    made = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({process.communicate(timeout=60)[0] for process in made}) == 1


@pytest.mark.parametrize(
    "key", ["", "a", " ", "15 bytes only .", b"", b"short", True, 5, 1.5, ["a key in a list here"]]
)
def test_keys_that_are_refused(key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UsageError, match="key"):
        TelegradOptions(key=key)
    if isinstance(key, str):
        monkeypatch.setenv("TELEGRAD_KEY", key)
        with pytest.raises(errors.UsageError, match=r"TELEGRAD_KEY has .* bytes: .* at least 16"):
            find_keys()


def test_a_key_need_not_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(128, 160))
    monkeypatch.setitem(os.environb, b"TELEGRAD_KEY", key)
    assert proof(find_keys()) == proof(find_keys(key))


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: pathlib.Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(mode)
    with pytest.raises(errors.UsageError, match="chmod 600"):
        find_keys(None, {"TELEGRAD_KEY_FILE": str(path)})


def test_files_without_a_key(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.UsageError, match="cannot be read"):
        read_keys(str(tmp_path / "missing"))
    path = tmp_path / "key"
    path.touch(0o600)
    with pytest.raises(errors.UsageError, match="is empty"):
        read_keys(str(path))
    path.write_text(f"{KEY}\nshort\n")
    with pytest.raises(errors.UsageError, match=r"line 2, has 5 bytes"):
        read_keys(str(path))


def test_without_a_key_the_error_names_the_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(errors.UsageError) as caught:
        find_keys()
    assert all(way in str(caught.value) for way in ("TELEGRAD_KEY", "TELEGRAD_KEY_FILE", "key=...", "key=False"))


def test_a_group_without_a_key_is_asked_for_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert find_keys(False).is_open
    assert "Anyone who reaches its workers can run code" in caplog.text


def test_a_group_has_keys_of_its_own() -> None:
    keys = Keyring([new_key()])
    assert len({proof(keys), proof(keys.within("one")), proof(keys.within("two"))}) == 3


def test_a_name_that_leads_to_what_all_can_read_is_no_key_file(tmp_path: pathlib.Path) -> None:
    """Whoever plants such a link knows the text behind it, which is a file of this user for the kernel."""
    path = tmp_path / "key"
    path.symlink_to("/proc/self/mountstats")
    with pytest.raises(errors.UsageError, match="no regular file"):
        find_keys(None, {"TELEGRAD_KEY_FILE": str(path)})


def test_a_pipe_is_no_key_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key"
    os.mkfifo(path, 0o600)
    with pytest.raises(errors.UsageError, match="no regular file"):
        read_keys(str(path))


def test_a_folder_that_others_may_change_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    path = shared / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    shared.chmod(0o777)
    with pytest.raises(errors.UsageError, match="other users may change"):
        read_keys(str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(shared))
    with pytest.raises(errors.UsageError, match="other users may change"):
        find_keys()


def test_too_many_keys(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n" * 9)
    path.chmod(0o600)
    with pytest.raises(errors.UsageError, match="more than 8 lines"):
        read_keys(str(path))


def test_a_key_file_that_is_empty_for_a_moment_changes_nothing(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    keys = find_keys(None, {"TELEGRAD_KEY_FILE": str(path)})
    before = proof(keys)
    path.write_text("")
    assert proof(keys) == proof(keys) == before
    assert caplog.text.count("the keys stay as they were") == 1
    path.write_text(KEY + "!")
    assert proof(keys) == proof(Keyring([KEY.encode() + b"!"]))
