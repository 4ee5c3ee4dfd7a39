"""Private files and folders, beside those that another user has planted."""

import ast
import contextlib
import errno
import functools
import gzip
import logging
import os
import pathlib
import re
import socket
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

import telegrad
from telegrad._core import private_files
from telegrad._core.private_files import (
    UnsafePath,
    create,
    create_once,
    make_folder,
    open_folder,
    open_regular,
    private_folder,
    replacing,
    resolved,
    state_folder,
)
from telegrad._core.security.keyring import read_keys
from telegrad._core.security.tls import TlsFiles, client_context
from telegrad.errors import UsageError
from telegrad.insight.seen_groups import DumpFiles
from tests.other_user import Plant, file_at, folder_at, link_to, plant, shared

__all__ = ["plant", "shared"]

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no owners of files here")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Unset the variables that name folders, except for HOME."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, shared: pathlib.Path) -> pathlib.Path:
    """Make the folder of temporary files one that all users may write."""
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    return shared


def mode(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


MAKE_FILES = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "touch", "symlink", "symlink_to", "link", "hardlink_to"),
    *("mkstemp", "mkdtemp", "mkfifo", "mknod", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory"),
    *("FileHandler", "RotatingFileHandler"),
}
ELSEWHERE = {
    ("checkpoint/folders.py", "open"),  # opens a folder for its fsync
    ("_core/stores/raw_stores.py", "open"),  # a store of the user's choice, without links, checked after opening
    ("insight/collect.py", "TemporaryDirectory"),  # private, with a random name
    ("insight/seen_groups.py", "open"),  # reads a file that may have become a pipe
    ("launch/children.py", "mkdir"),  # in a folder of `make_folder`, and never an existing one
    ("launch/children.py", "symlink_to"),  # with a random name
    ("launch/supervisor.py", "mkdtemp"),  # private, with a random name
}


@functools.cache
def calls_in_the_package() -> list[tuple[str, ast.Call]]:
    """Return each call in the package, with its file."""
    root = pathlib.Path(telegrad.__file__).parent
    nodes = ((path, node) for path in root.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return [(path.relative_to(root).as_posix(), node) for path, node in nodes if isinstance(node, ast.Call)]


def test_files_of_the_package_do_not_create_files_by_themselves() -> None:
    found = set()
    for file, node in calls_in_the_package():
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        modes = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
        texts = [each.value for each in modes if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        writes = name == "open" and any(re.fullmatch("[rbtwax+]*[wax+][rbtwax+]*", text) for text in texts)
        if name in MAKE_FILES or writes or ast.unparse(node.func) in ("os.open", "os.link", "os.mkdir"):
            found.add((file, name))
    assert {each for each in found if each[0] != "_core/private_files.py"} == ELSEWHERE


READ_ELSEWHERE = {  # files of the kernel, of the package, and of the command line
    *("directories/on_redis.py", "_core/stores/lease_table.py", "_core/sockets.py"),
    *("_core/processes.py", "insight/collect.py", "insight/seen_groups.py", "insight/web.py"),
    *("launch/supervisor.py", "_core/processes.py"),
    *("reporting/debug_server.py", "reporting/observer.py", "reporting/process_state.py"),
}


def test_files_of_the_package_do_not_open_foreign_files_by_themselves() -> None:
    opens = ("open", "io.open", "gzip.open", "FileSystem")
    found = {
        file
        for file, node in calls_in_the_package()
        if ast.unparse(node.func) in opens or getattr(node.func, "attr", "") in ("read_text", "read_bytes")
    }
    assert found - {"_core/private_files.py"} == READ_ELSEWHERE


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder", "loop"])
def test_only_regular_files_are_opened(kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # paths of sockets must be short
    path = pathlib.Path("odd")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "device":
        path = pathlib.Path(os.devnull)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    (tmp_path / "link").symlink_to(path)
    for name in (path, tmp_path / "link"):
        for act in (
            open_regular,
            lambda name: read_keys(str(name)),
            lambda name: DumpFiles([name]),
            lambda name: client_context(TlsFiles(str(name), str(name), str(name))),
        ):
            with pytest.raises((OSError, UsageError), match=r"not a regular file|form a loop"):
                act(name)


# Private folders


def test_a_private_folder_is_in_the_first_existing_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, home: pathlib.Path, temporary: pathlib.Path
) -> None:
    for name in ("run", "state"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for gone, base in (
        ("XDG_RUNTIME_DIR", tmp_path / "run"),
        ("XDG_STATE_HOME", tmp_path / "state"),
        ("HOME", home / ".local" / "state"),
    ):
        with private_folder("dumps") as folder:
            assert folder.path == base / "telegrad" / "dumps"
            assert mode(folder.path) == mode(base / "telegrad") == 0o700
        monkeypatch.setenv(gone, "" if gone.startswith("XDG") else os.devnull)
    with private_folder("dumps") as folder:
        assert folder.path.parent.parent == temporary
        assert mode(folder.path.parent) == 0o700
        made = folder.path
    with private_folder("dumps") as folder:
        assert folder.path == made  # processes share the folder, as nothing would remove folders of each process


def test_a_private_folder_without_descriptors_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, home: pathlib.Path, temporary: pathlib.Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        patch.setattr(tempfile, "tempdir", None)  # has it searched again, in vain
        with pytest.raises(OSError, match="Too many open files"):
            private_folder("dumps")


def test_a_missing_runtime_folder_is_not_created(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, home: pathlib.Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with private_folder("dumps") as folder:
        assert folder.path.is_relative_to(home)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["telegrad", "telegrad/dumps"])
@pytest.mark.parametrize("planted", ["folder", "open folder", "link", "file"])
def test_a_private_folder_that_another_user_has_planted_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    shared: pathlib.Path,
    plant: Plant,
    caplog: pytest.LogCaptureFixture,
    name: str,
    planted: str,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    path = shared / name
    if name != "telegrad":
        (shared / "telegrad").mkdir()
        (shared / "telegrad").chmod(0o1777)
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    acts = {
        "folder": folder_at(path, 0o700),
        "open folder": folder_at(path, 0o777),
        "link": link_to(precious, path),
        "file": file_at(path),
    }
    plant(acts[planted])
    with caplog.at_level(logging.WARNING), private_folder("dumps") as folder:
        assert not folder.path.is_relative_to(shared)
        folder.create("file").close()
    assert list(precious.iterdir()) == []
    assert "using another folder" in caplog.text


def test_a_folder_of_this_user_that_others_may_write_is_not_used(
    home: pathlib.Path, temporary: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = home / ".local" / "state" / "telegrad"
    own.mkdir(parents=True)
    own.chmod(0o777)
    with caplog.at_level(logging.WARNING), private_folder("dumps") as folder:
        assert folder.path.is_relative_to(temporary)
    assert "other users may write it (mode 777)" in caplog.text
    with pytest.raises(UsageError, match=r"other users may write it \(mode 777\).*XDG_STATE_HOME"):
        state_folder()


def test_a_folder_that_others_can_read_is_made_private(home: pathlib.Path) -> None:
    own = home / ".local" / "state" / "telegrad"
    own.mkdir(parents=True)
    own.chmod(0o755)
    assert state_folder() == own
    assert mode(own) == 0o700


def test_planted_folders_among_temporary_files_are_skipped(
    monkeypatch: pytest.MonkeyPatch, temporary: pathlib.Path, tmp_path: pathlib.Path, plant: Plant
) -> None:
    monkeypatch.setenv("HOME", os.devnull)
    planted = temporary / f"telegrad-{os.geteuid()}-0"
    plant(link_to(tmp_path, planted))
    with private_folder("dumps") as folder:
        assert folder.path.parent.parent == temporary
        assert folder.path.parent != planted
        assert not (tmp_path / "dumps").exists()


def test_there_is_no_warning_for_a_user_without_a_home(
    monkeypatch: pytest.MonkeyPatch, temporary: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent/home")
    make = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda path, *a, **k: (refuse if "/none" in path else make)(path, *a, **k))
    with private_folder("dumps") as folder:
        assert folder.path.is_relative_to(temporary)
    assert not caplog.records
    with pytest.raises(UsageError, match=r"has no folder .* set XDG_STATE_HOME"):
        state_folder()


def refuse(path: str, *_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied", path)


def test_state_below_a_folder_of_another_user_is_refused(
    monkeypatch: pytest.MonkeyPatch, shared: pathlib.Path, plant: Plant
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(shared / "theirs"))
    plant(folder_at(shared / "theirs", 0o777))
    with pytest.raises(UsageError, match="it belongs to user"):
        state_folder()
    assert list((shared / "theirs").iterdir()) == []


def test_own_files_of_a_folder_are_regular_files(tmp_path: pathlib.Path) -> None:
    with open_folder(tmp_path / "dumps") as folder:
        with folder.create("own") as file:
            file.write(b"12345")
        (tmp_path / "dumps" / "link").symlink_to("own")
        (tmp_path / "dumps" / "folder").mkdir()
        assert {name for name in folder.names() if folder.own_file(name)} == {"own"}
        assert folder.own_file("own").st_size == 5
        assert folder.own_file("gone") is None
        for name in ("own", "link", "gone", "folder"):
            folder.remove(name)
        assert folder.names() == ["folder"]


def test_an_open_folder_stays_the_same_after_a_rename(tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with open_folder(tmp_path / "dumps") as folder:
        (tmp_path / "dumps").rename(tmp_path / "moved")
        (tmp_path / "dumps").symlink_to("elsewhere")
        folder.create("file").close()
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["file"]
    assert not list((tmp_path / "elsewhere").iterdir())


# One value of several processes


def test_one_of_several_callers_creates_a_file(home: pathlib.Path) -> None:
    path = state_folder() / "key"
    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda number: create_once(path, b"%d" % number * 1000), range(64)))
    assert set(values) == {path.read_bytes()}
    assert mode(path) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["key"]  # without temporary files


@pytest.mark.parametrize("rights", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_open_is_refused(home: pathlib.Path, rights: int) -> None:
    path = state_folder() / "key"
    path.write_bytes(b"known to others")
    path.chmod(rights)
    with pytest.raises(UsageError, match="other users may"):
        create_once(path, b"new")
    assert path.read_bytes() == b"known to others"


def test_a_link_a_pipe_a_folder_and_a_large_file_are_refused(home: pathlib.Path) -> None:
    folder = state_folder()
    (folder / "secret").write_bytes(b"secret")
    (folder / "secret").chmod(0o600)
    (folder / "link").symlink_to("secret")
    os.mkfifo(folder / "pipe", 0o600)
    (folder / "folder").mkdir(mode=0o700)
    with open(folder / "large", "wb") as file:
        file.truncate(private_files.LARGEST_VALUE + 1)
    (folder / "large").chmod(0o600)
    for name in ("link", "pipe", "folder", "large"):
        with pytest.raises(UsageError, match=f"{name}' can be neither created nor read"):
            create_once(folder / name, b"new")


def test_a_value_of_another_user_is_refused(shared: pathlib.Path, plant: Plant) -> None:
    def act() -> pathlib.Path:
        (shared / "key").write_bytes(b"theirs")
        (shared / "key").chmod(0o600)
        return shared / "key"

    plant(act)
    with pytest.raises(UsageError, match="belongs to user"):
        create_once(shared / "key", b"mine")


@pytest.mark.parametrize("step", ["fsync", "link"])  # of a full disk; of a file system without hard links
def test_a_file_that_cannot_be_made_leaves_nothing(
    home: pathlib.Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(os, step, refuse)
    path = state_folder() / "key"
    with pytest.raises(UsageError, match="Permission denied"):
        create_once(path, b"new")
    assert not list(path.parent.iterdir())


# Paths of the user's choice


def test_own_links_are_followed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("absolute/inner/..")
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.chdir(tmp_path / "real")
    real = os.path.realpath(tmp_path / "real")
    for path in (tmp_path / "relative" / "x" / "y", "x/y", "./inner/../x//y", "../absolute/x/y"):
        assert resolved(path) == os.path.join(real, "x", "y")
    assert resolved(tmp_path / "relative" / "inner") == os.path.join(real, "inner")
    with pytest.raises(OSError, match="form a loop"):
        resolved(tmp_path / "circle")


@pytest.mark.parametrize("below", ["", "below"])
def test_links_of_another_user_are_not_followed(
    shared: pathlib.Path, tmp_path: pathlib.Path, plant: Plant, below: str
) -> None:
    (tmp_path / "precious").write_text("precious")
    plant(link_to(tmp_path, shared / "run"))
    path = shared / "run" / below / "precious"
    for act in (resolved, make_folder, open_folder, create, lambda path: replacing(path).__enter__()):
        with pytest.raises(UnsafePath, match="has put a symlink there"):
            act(path)
    assert [each.name for each in tmp_path.iterdir() if each.name != "home"] == ["precious"]
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_file_is_replaced_after_it_is_complete(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with contextlib.suppress(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        1 / 0  # noqa: B018
    assert path.read_text() == "old"
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert mode(path) == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["home", "link", "trace.json"]


def test_a_device_is_written_to() -> None:
    with replacing(os.devnull) as file:
        file.write(b"away")
    reading, writing = os.pipe()
    with replacing(f"/dev/fd/{writing}") as file, gzip.open(file, "wt") as text:
        text.write("through a pipe")
    os.close(writing)
    with os.fdopen(reading, "rb") as came:
        assert gzip.decompress(came.read()) == b"through a pipe"


def test_a_pipe_of_another_user_is_not_written_to(shared: pathlib.Path, plant: Plant) -> None:
    def act() -> pathlib.Path:
        os.mkfifo(shared / "trace.json")
        os.chmod(shared / "trace.json", 0o666)
        return shared / "trace.json"

    plant(act)
    with pytest.raises(UnsafePath, match="a special file"), replacing(shared / "trace.json"):
        pass


def test_create_follows_a_link_before_it_goes_up(tmp_path: pathlib.Path) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "way").symlink_to("far/inner")
    create(tmp_path / "way" / ".." / "data").close()
    assert (tmp_path / "far" / "data").exists()


def test_create_does_not_overwrite_files_or_links(tmp_path: pathlib.Path) -> None:
    with create(tmp_path / "data") as file:
        file.write(b"data")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("data", "link"):
        with pytest.raises(FileExistsError):
            create(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o777], ids=oct)
def test_the_umask_has_no_effect(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    """Folders above the state folder have the same mode, so that they are trusted later."""
    home = tmp_path / "none" / "yet"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    before = os.umask(umask)
    try:
        folder = state_folder()
        create_once(folder / "key", b"secret")
    finally:
        os.umask(before)
    assert create_once(state_folder() / "key", b"other") == b"secret"
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    while folder != tmp_path:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder = folder.parent
