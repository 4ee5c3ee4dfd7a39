"""Tests of the notes by which the next worker that serves the store of a dynamic group finds the directory."""

import os
import pathlib
import shutil
import time

import pytest
import torch.distributed as dist

import telegrad.rpc as rpc
from telegrad._core.sockets import host_identity
from telegrad._core.stores import find_directory
from telegrad._core.stores.find_directory import Pointer
from tests.cluster import PATIENCE, free_port, processes, wait_until
from tests.group.test_finding import Finder, finder, has_started, hold, kept, pointer_in_note, values
from tests.rpc.members import call, join

__all__ = ["finder"]


def test_a_note_is_used_for_the_store_of_its_port_only(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(finder.find(dist.HashStore(), True))
    assert find_directory.noted(finder.port) is not None
    assert find_directory.noted(free_port()) is None
    monkeypatch.setattr(find_directory, "host_identity", lambda: "another boot")
    assert find_directory.noted(finder.port) is None


@pytest.mark.parametrize("change", ["none", "other", "emptied"])
def test_a_note_is_found_from_another_login(
    finder: Finder, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, change: str
) -> None:
    for name in ("run", "other"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    hold(finder.find(dist.HashStore(), True))
    if change == "none":
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    elif change == "other":
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "other"))
    else:
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").mkdir(mode=0o700)
        find_directory.note(free_port(), pointer_in_note(finder))  # removes the notes of directories that have ended
    found = finder.find(dist.HashStore(), True)
    assert not has_started(found)
    assert values(found.directory) == [b"kept"]


def test_notes_of_ended_directories_are_removed(finder: Finder, tmp_path: pathlib.Path) -> None:
    over, old, recent, ended, began, elsewhere = (free_port() for _ in range(6))
    find_directory.note(over, Pointer("127.0.0.1", free_port(), host_identity(), f"{tmp_path}/removed"))
    path = pathlib.Path(find_directory._note_path(over))
    others = [path.with_name(f"{'0' * find_directory.MACHINE}-{port}") for port in (old, recent)]
    for other in others:
        other.write_text("note of another host")
    os.utime(others[0], (0, 0))
    # Of another network namespace: only its file shows if the directory has ended.
    for port, folder in ((ended, path.parent), (began, path.parent), (elsewhere, tmp_path)):
        others.append(path.with_name(f"{'0' * find_directory.MACHINE}-{port}"))
        others[-1].write_text(Pointer("127.0.0.1", 9, "another", f"{folder}/removed.sqlite").to_json())
    for other in (others[2], others[4]):
        os.utime(other, (time.time() - 2 * find_directory.SETTLED,) * 2)
    finder.find(dist.HashStore(), True)
    assert [each.exists() for each in (path, *others)] == [False, False, True, False, True, True]
    for other in others:
        other.unlink(missing_ok=True)


@pytest.mark.parametrize("how", ["leave", "close"])
def test_the_note_is_removed_when_the_directory_ends(finder: Finder, how: str) -> None:
    found = finder.find(dist.HashStore(), True)
    path, other = (pathlib.Path(find_directory._note_path(port)) for port in (finder.port, free_port()))
    other.write_text(found.keeping.pointer._replace(path="of another directory").to_json())
    assert path.exists()
    getattr(found.keeping, how)()
    wait_until(lambda: not path.exists())
    wait_until(lambda: not os.path.exists(kept(found).path))
    assert other.exists()
    other.unlink()


def test_a_note_in_a_folder_that_others_may_write_is_not_used(
    finder: Finder, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    find_directory.note(finder.port, Pointer("127.0.0.1", 9, host_identity(), f"{tmp_path}/planted"))
    assert find_directory.noted(finder.port) is not None
    (tmp_path / "state" / "telegrad" / "directory").chmod(0o777)
    assert find_directory.noted(finder.port) is None
    assert "using another folder" in caplog.text


def test_a_note_that_cannot_be_written_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(find_directory, "replacing", refuse)
    find_directory.note(free_port(), Pointer("127.0.0.1", 9, host_identity(), str(tmp_path)))
    assert "No space left on device" in caplog.text
    assert "begins another group" in caplog.text


@pytest.mark.parametrize("note", ["", "[", "[]", '["h", "p", 1, 2, 3]'])
def test_a_damaged_note_is_ignored(finder: Finder, note: str) -> None:
    pathlib.Path(find_directory._note_path(finder.port)).write_text(note)
    assert finder.find(dist.HashStore(), True).keeping is not None


def test_a_restarted_worker_that_gives_its_host_another_name_joins_the_running_group() -> None:
    port = free_port()
    with processes(4) as (boss, x, again, late):
        boss.run(join, "boss", f"tcp://127.0.0.1:{port}", 0)
        x.run(join, "x", f"tcp://127.0.0.1:{port}")
        boss.kill()
        boss.join()
        again.run(join, "boss", f"tcp://localhost:{port}", 0)
        late.run(join, "late", f"tcp://127.0.0.1:{port}")
        for process in (x, again, late):
            process.run(rpc.wait_for_workers, ["boss", "late", "x"], PATIENCE)
            assert process.run(call, "boss") == 3
