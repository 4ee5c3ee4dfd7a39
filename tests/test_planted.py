"""Another user of the host plants files at paths of this user: no file of this user is changed, removed or read."""

import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch

import telegrad
from telegrad import checkpoint
from telegrad.checkpoint.folders import keep_newest
from telegrad.insight import collect
from telegrad.launch.children import Output
from telegrad.reporting import introspection
from tests.other_user import Plant, link_to, plant, shared

__all__ = ["plant", "shared"]

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no owners of files here")
SECONDS = 60  # the attacker plants the names of so many seconds


@pytest.fixture
def precious(tmp_path: pathlib.Path) -> pathlib.Path:
    """Make a file that only this user can read."""
    path = tmp_path / "precious"
    path.write_text("precious")
    path.chmod(0o600)
    return path


def test_dumps_follow_no_names_that_can_be_guessed(
    monkeypatch: pytest.MonkeyPatch, shared: pathlib.Path, precious: pathlib.Path, plant: Plant
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(shared / name))
    folder = shared / f"telegrad-{os.geteuid()}"
    monkeypatch.setenv(introspection.VARIABLE, "")
    pid = os.getpid()  # other users can see it in /proc

    def act() -> pathlib.Path:
        for each in (folder, shared / "XDG_RUNTIME_DIR", shared / "XDG_STATE_HOME"):
            each.mkdir()
            each.chmod(0o777)
            (each / "telegrad").symlink_to(precious.parent)
        now = time.time()
        for second in range(SECONDS):
            moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now + second))
            for name in (f"{moment}-w0-{pid}.json", f"{moment}-{pid}-w0.json"):
                (folder / name).symlink_to(precious)
        return folder

    plant(act)
    written = introspection.write_dump("w0", "because", {"account": {}})
    assert written is not None
    assert precious.read_text() == "precious"
    assert [each.name for each in precious.parent.iterdir()] == ["precious"]
    assert written.lstat().st_mode & 0o077 == 0
    assert len(list(folder.glob("2*.json"))) >= 2 * SECONDS  # files of other users were not removed as old ones


@pytest.mark.parametrize("below", ["", "run", "link"])
def test_dumps_are_not_written_below_folders_of_another_user(
    monkeypatch: pytest.MonkeyPatch, shared: pathlib.Path, precious: pathlib.Path, plant: Plant, below: str
) -> None:
    folder = shared / "dumps"
    monkeypatch.setenv(introspection.VARIABLE, str(folder / below))

    def act() -> pathlib.Path:
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "link").symlink_to(precious.parent)
        return folder

    plant(act)
    with pytest.raises(PermissionError, match=r"it belongs to user .*dumps"):
        introspection.write_dump("w0", "because", {})
    assert [each.name for each in precious.parent.iterdir()] == ["precious"]
    assert [each.name for each in folder.iterdir()] == ["link"]


def test_dumps_are_not_written_to_a_folder_that_all_may_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv(introspection.VARIABLE, str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"other users may change it \(mode 777\)"):
        introspection.write_dump("w0", "because", {})


def test_links_in_a_folder_for_dumps_are_not_removed(monkeypatch: pytest.MonkeyPatch, shared: pathlib.Path) -> None:
    monkeypatch.setenv(introspection.VARIABLE, str(shared))
    monkeypatch.setattr(introspection, "KEPT", 1)
    secret = shared / "20200101-000000-link-1.json"
    secret.symlink_to("elsewhere")
    for _ in range(3):
        introspection.write_dump("../w0", "because", {})
    assert len(list(shared.iterdir())) == 2
    assert secret.is_symlink()


def test_a_large_dump_keeps_its_latest_events(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv(introspection.VARIABLE, str(tmp_path))
    monkeypatch.setattr(introspection, "LARGEST_FILE", 200)
    path = introspection.write_dump("w0", "because", {"account": {}, "events": list(range(1000))})
    assert path is not None
    assert path.stat().st_size <= 200
    assert "999]" in path.read_text()


def test_a_checkpoint_removes_nothing_through_a_link(
    shared: pathlib.Path, tmp_path: pathlib.Path, plant: Plant, here: None
) -> None:
    old = checkpoint.save({"epoch": 1}, tmp_path / "best").wait()
    before = sorted(os.listdir(old))
    plant(link_to(pathlib.Path(old), shared / "1"))
    new = checkpoint.save({"epoch": 2}, shared / "2", keep=1).wait()
    assert sorted(os.listdir(old)) == before
    assert os.path.exists(os.path.join(new, ".metadata"))
    keep_newest(new, 1)
    assert sorted(os.listdir(old)) == before


def test_a_checkpoint_is_not_written_through_links(
    shared: pathlib.Path, precious: pathlib.Path, plant: Plant, here: None
) -> None:
    folder = shared / "open"  # this user has made it for all users
    folder.mkdir()
    folder.chmod(0o1777)

    def act() -> pathlib.Path:
        for name in (".metadata.tmp", "__0_0.distcp", "__0_1.distcp"):
            (folder / name).symlink_to(precious)
        return folder / ".metadata.tmp"

    plant(act)
    checkpoint.save({"weight": torch.ones(3), "epoch": 1}, folder).wait()
    state = {"weight": torch.zeros(3), "epoch": 0}
    checkpoint.load(state, folder)
    assert state["epoch"] == 1
    assert precious.read_text() == "precious"


def test_a_checkpoint_is_not_written_through_a_link_of_another_user(
    shared: pathlib.Path, precious: pathlib.Path, plant: Plant, here: None
) -> None:
    plant(link_to(precious.parent, shared / "run"))
    for path in (shared / "run", shared / "run" / "1"):
        with pytest.raises(Exception, match="has put a symlink there"):
            checkpoint.save({"epoch": 1}, path).wait()
    assert [each.name for each in precious.parent.iterdir()] == ["precious"]


def test_traces_and_pictures_are_not_written_through_links(
    shared: pathlib.Path, precious: pathlib.Path, plant: Plant, here: None
) -> None:
    for name in ("trace.json", "graph.dot"):
        plant(link_to(precious, shared / name))
    with pytest.raises(OSError, match="has put a symlink there"):
        collect._write(str(shared / "trace.json"), {})
    with telegrad.autograd.context() as context_id, pytest.raises(OSError, match="has put a symlink there"):
        telegrad.insight.graph(context_id).save(shared / "graph.dot")
    assert precious.read_text() == "precious"


def test_logs_of_a_run_are_in_a_new_folder(
    monkeypatch: pytest.MonkeyPatch, shared: pathlib.Path, tmp_path: pathlib.Path, plant: Plant
) -> None:
    monkeypatch.setattr("telegrad.launch.children.time.strftime", lambda _: "now")
    monkeypatch.setattr("telegrad.launch.children.MOST_ALIKE", 10)

    def act() -> pathlib.Path:
        for number in range(10):
            (shared / (f"now_{number}" if number else "now")).symlink_to(tmp_path)
        return shared / "now"

    plant(act)
    with pytest.raises(FileExistsError):
        Output(str(shared)).raw("w0", b"line\n")
    assert list(tmp_path.iterdir()) == []


def test_modules_in_the_current_folder_are_not_imported(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The program is elsewhere and would not import them, so the processes of `telegrad run` must not, either.

    tests/test_main.py runs programs with `telegrad.local` in such a folder.
    """
    for name in ("telegrad", "torch", "json", "numpy"):
        (shared / f"{name}.py").write_text("import os; os._exit(77)\n")
    (tmp_path / "other.py").write_text("print(8)\n")
    command = ["-P", "-m", "telegrad", "run", "--role", "a", "--", sys.executable, str(tmp_path / "other.py")]
    done = subprocess.run([sys.executable, *command], cwd=shared, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8" in done.stdout
