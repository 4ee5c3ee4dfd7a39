"""Tests of how the key of a group is found, and of keys that are refused."""

import base64
import copy
import os
import pathlib
import pickle
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import telegrad
from telegrad import errors, rpc
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.security.keyring import Keyring, check_key, find_keys, given_keys, new_key, read_keys
from telegrad._core.security.tls import TlsFiles
from telegrad.launch import supervisor

KEY = "a key that all workers share"


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the path of an empty file that only this user can read."""
    found = tmp_path / "key"
    found.touch(0o600)
    return found


@pytest.fixture(autouse=True)
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    for name in ("TELEGRAD_KEY", "TELEGRAD_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)  # `telegrad run` makes its folder of logs here
    return tmp_path / "state"


def proof(keys: Keyring) -> bytes:
    return keys.derive(b"test")[0]


def test_the_option_precedes_the_variables_of_the_key(path: pathlib.Path) -> None:
    path.write_text(KEY + "!")
    environment = {"TELEGRAD_KEY": KEY, "TELEGRAD_KEY_FILE": str(path)}
    assert proof(find_keys("another key, of the options", environment)) == proof(
        Keyring([b"another key, of the options"])
    )
    assert proof(find_keys(None, environment)) == proof(Keyring([KEY.encode()]))
    del environment["TELEGRAD_KEY"]
    assert proof(find_keys(None, environment)) == proof(Keyring([KEY.encode() + b"!"]))
    assert given_keys(None, {}) is None
    assert proof(find_keys(None, {})) == proof(find_keys(None, {}))


def test_a_user_without_settings_gets_a_private_key_file(home: pathlib.Path) -> None:
    keys = find_keys()
    path = home / "telegrad" / "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert proof(keys) == proof(Keyring(read_keys(str(path))))
    assert keys._path == str(path)


def test_processes_that_start_at_once_find_the_same_key() -> None:
    program = "from telegrad._core.security.keyring import find_keys; print(find_keys().derive(b'test')[0].hex())"
    made = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({process.communicate(timeout=60)[0] for process in made}) == 1


@pytest.mark.parametrize(
    "key", ["", "a", " ", "15 bytes only .", b"", b"short", True, 5, 1.5, ["a key in a list here"]]
)
def test_unusable_keys_are_refused(key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o660, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(path: pathlib.Path, mode: int) -> None:
    path.write_text(KEY)
    path.chmod(mode)
    with pytest.raises(errors.UsageError, match="chmod 600"):
        find_keys(None, {"TELEGRAD_KEY_FILE": str(path)})


NO_KEYS = [
    "# the key of our group, do not share",
    "#0123456789abcdef",
    "# x",
    "TELEGRAD_KEY=0123456789abcdef",
    "export TELEGRAD_KEY=0123456789abcdef",
    "KEY = 0123456789abcdef",
    "key: 0123456789abcdef",
    '"0123456789abcdef"',
    "'0123456789abcdef'",
    "-----BEGIN PRIVATE KEY-----",
]


@pytest.mark.parametrize("line", NO_KEYS)
def test_a_line_that_is_no_key_is_refused_in_each_setting(line: str, path: pathlib.Path) -> None:
    for text in (line, f"{line}\n{KEY}", f"{KEY}\n  {line}", f"{KEY}\n{KEY}!\n{line}"):
        path.write_text(text)
        with pytest.raises(errors.UsageError, match=r"key', line \d, looks like a comment, an"):
            read_keys(str(path))
    for given in (line, line.encode()):
        with pytest.raises(errors.UsageError, match="looks like"):
            find_keys(given)
    with pytest.raises(errors.UsageError, match="TELEGRAD_KEY looks like"):
        find_keys(None, {"TELEGRAD_KEY": line})


@pytest.mark.parametrize("kind", [rpc.TelegradOptions, rpc.TensorPipeRpcBackendOptions])
def test_the_text_of_options_does_not_contain_the_key_but_copies_do(kind: type[rpc.TelegradOptions]) -> None:
    options = kind(key="a secret of the group")
    assert "a secret of" not in f"{options!r} {vars(options)}"
    for copied in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert (copied.key, vars(copied)) == (options.key, vars(options))


def test_an_option_with_two_keys_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="the option key has several lines"):
        find_keys(f"{KEY}\n{KEY}!\n")


@hypothesis.given(st.binary(min_size=16, max_size=48))
def test_generated_keys_are_accepted(data: bytes) -> None:
    made = [base64.b64encode(data), base64.urlsafe_b64encode(data), data.hex().encode(), new_key()]
    for key in (*made, *(each.rstrip(b"=") for each in made)):
        assert check_key(key, "it") == key


def test_key_files_without_a_valid_key_are_refused(path: pathlib.Path) -> None:
    with pytest.raises(errors.UsageError, match="cannot be used"):
        read_keys(str(path.with_name("missing")))
    with pytest.raises(errors.UsageError, match="is empty"):
        read_keys(str(path))
    path.write_text(f"{KEY}\nshort\n")
    with pytest.raises(errors.UsageError, match=r"line 2, has 5 bytes"):
        read_keys(str(path))


@pytest.mark.parametrize("unusable", ["a file", "below a file", "not to be made", "a symlink in a circle"])
def test_the_error_without_a_key_names_the_ways_to_set_one(
    unusable: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    folder = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "folder",
        "not to be made": "/proc/nowhere",
        "a symlink in a circle": tmp_path / "circle",
    }[unusable]
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    with pytest.raises(errors.UsageError) as caught:
        find_keys()
    ways = ("XDG_STATE_HOME", "TELEGRAD_KEY", "TELEGRAD_KEY_FILE", "key=...", "key=False")
    assert all(way in str(caught.value) for way in (*ways, str(folder)))
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None
    assert "Errno" not in str(caught.value)


def test_a_relative_state_folder_is_ignored_with_one_warning(
    home: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(home.parent))
    monkeypatch.setenv("XDG_STATE_HOME", "~/state")
    assert find_keys()._path.startswith(str(home.parent / ".local" / "state"))
    find_keys()
    assert caplog.text.count("XDG_STATE_HOME is ignored") == 1


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TELEGRAD_KEY", "", "TELEGRAD_KEY has 0 bytes"),
        ("TELEGRAD_KEY", "short", "TELEGRAD_KEY has 5 bytes"),
        ("TELEGRAD_KEY_FILE", "", "TELEGRAD_KEY_FILE is empty"),
        ("TELEGRAD_KEY_FILE", "/proc/nowhere", "'/proc/nowhere' that TELEGRAD_KEY_FILE names cannot be used"),
        ("TELEGRAD_KEY_FILE", "/dev/null", "'/dev/null' that TELEGRAD_KEY_FILE names cannot be used"),
    ],
)
def test_each_way_to_start_names_the_wrong_setting(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    starts: list[Callable[[], object]] = [
        find_keys,
        lambda: telegrad.local(1),
        lambda: rpc.init_rpc(
            "w", rank=0, world_size=1, rpc_backend_options=TelegradOptions(init_method=f"file://{os.devnull}")
        ),
        lambda: rpc.init_rpc("w", min_workers=1, rpc_backend_options=TelegradOptions(init_method="tcp://127.0.0.1:1")),
    ]
    for start in starts:
        with pytest.raises(errors.UsageError, match=words) as caught:
            start()
        assert caught.value.__cause__ is None
    assert supervisor.main(["--", "true"]) == supervisor.WRONG
    assert re.match(f"telegrad run: .*{words}", capsys.readouterr().err)


def test_the_error_of_a_wrong_key_does_not_mention_the_file_of_roles(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roles.toml").write_text("[actor]\n")
    monkeypatch.setenv("TELEGRAD_KEY", "short")
    assert supervisor.main(["roles.toml"]) == supervisor.WRONG
    said = capsys.readouterr().err
    assert said.startswith("telegrad run: TELEGRAD_KEY has 5 bytes")
    assert "roles.toml" not in said


def test_no_key_and_certificates_exclude_each_other() -> None:
    files = TlsFiles("worker.pem", "worker.key", "authority.pem")
    with pytest.raises(errors.UsageError, match=r"key=False .* tls="):
        TelegradOptions(key=False, tls=files)
    assert TelegradOptions(key=KEY, tls=files).tls == files


def test_a_group_without_a_key_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert find_keys(False).is_open
    assert "Anyone who reaches its workers can run code" in caplog.text


def test_keys_of_different_groups_differ() -> None:
    keys = Keyring([new_key()])
    assert len({proof(keys), proof(keys.within("one")), proof(keys.within("two"))}) == 3


def test_a_pipe_or_a_link_to_a_file_that_all_can_read_is_no_key_file(tmp_path: pathlib.Path) -> None:
    """An attacker who plants such a link knows the text behind it, which belongs to this user for the kernel."""
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("/proc/self/mountstats")
    os.mkfifo(pipe, 0o600)
    for path in (link, pipe):
        with pytest.raises(errors.UsageError, match="not a regular file"):
            find_keys(None, {"TELEGRAD_KEY_FILE": str(path)})


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


def test_more_than_two_keys_are_refused(path: pathlib.Path) -> None:
    path.write_text(f"{KEY}\n\n{KEY}!\n")
    assert len(read_keys(str(path))) == 2
    path.write_text(f"{KEY}\n{KEY}!\n{KEY}?\n")
    with pytest.raises(errors.UsageError, match="more than 2 keys"):
        read_keys(str(path))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_named(path: pathlib.Path, encoding: str) -> None:
    path.write_text(KEY, encoding=encoding)
    with pytest.raises(errors.UsageError, match=r"key' begins with a byte order mark.* save it without"):
        read_keys(str(path))
    with pytest.raises(errors.UsageError, match="byte order mark"):
        find_keys("\ufeff" + KEY)
    assert find_keys(b"\xff\xfe" + KEY.encode())  # random bytes may begin like this


def test_a_folder_is_no_key_file(home: pathlib.Path) -> None:
    (home / "telegrad" / "key").mkdir(parents=True)
    for act in (find_keys, lambda: read_keys(str(home / "telegrad" / "key"))):
        with pytest.raises(errors.UsageError, match=r"it is not a regular file: '.*telegrad/key'"):
            act()


def test_a_key_file_that_is_empty_for_a_moment_leaves_the_keys_in_use(
    path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(KEY)
    keys = find_keys(None, {"TELEGRAD_KEY_FILE": str(path)})
    before = proof(keys)
    path.write_text("")
    assert proof(keys) == proof(keys) == before
    assert caplog.text.count("the previous keys stay in use") == 1
    path.write_text(KEY + "!")
    assert proof(keys) == proof(Keyring([KEY.encode() + b"!"]))


@pytest.mark.parametrize("is_given", [False, True])
def test_a_key_file_that_is_replaced_as_a_worker_reads_it_is_read_again(
    is_given: bool, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_keys()
    path = home / "telegrad" / "key"
    new = new_key()

    def read_before(*given: str) -> list[bytes]:
        keys = read_keys(*given)
        path.with_suffix(".new").write_bytes(new)
        path.with_suffix(".new").chmod(0o600)
        path.with_suffix(".new").rename(path)
        monkeypatch.undo()
        return keys

    environment = {"TELEGRAD_KEY_FILE": str(path)} if is_given else {}
    monkeypatch.setattr("telegrad._core.security.keyring.read_keys", read_before)
    assert proof(find_keys(None, environment)) == proof(Keyring([new]))


def test_a_key_file_that_another_thread_is_reading_is_read(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, new, found = find_keys(), new_key(), list[bytes]()
    (home / "telegrad" / "key").write_bytes(new)

    def read_after(*given: str) -> list[bytes]:
        monkeypatch.undo()
        found.append(proof(ring))  # in place of the other thread
        return read_keys(*given)

    monkeypatch.setattr("telegrad._core.security.keyring.read_keys", read_after)
    assert [proof(ring), *found] == [proof(Keyring([new]))] * 2


@pytest.mark.parametrize("space", ["\n", "\r\n", " ", "\t \n"])
def test_white_space_around_a_key_is_no_part_of_it(path: pathlib.Path, space: str) -> None:
    """`key=open(path).read()` has such space; another worker may get the file instead."""
    path.write_text(KEY + space)
    of_file = find_keys(None, {"TELEGRAD_KEY_FILE": str(path)}).secrets()
    for given in (KEY, KEY + space, (space + KEY).encode()):
        assert find_keys(given).secrets() == of_file
    assert find_keys(None, {"TELEGRAD_KEY": KEY + space}).secrets() == of_file
    with pytest.raises(errors.UsageError, match="has 0 bytes"):
        find_keys(20 * space)
