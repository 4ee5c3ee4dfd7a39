"""Elastic groups whose directory is killed, with the worker that keeps it and the store, or without."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad._core.directory.client import EmbeddedDirectory
from telegrad._core.directory.directory import Swap
from telegrad._core.joining.form_generations import DirectoryLease
from telegrad._core.joining.quorum import COME, GENERATION
from tests.cluster import Process, processes, wait_until
from tests.rpc.test_elastic import end, is_right, place, train

__all__ = ["place"]  # a fixture


def kill_directory() -> None:
    """Kill the process of the directory, where this worker keeps it."""
    for each in holders:
        keeping = each.found.keeping if each.found is not None else None
        if keeping is not None and keeping._keeper is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeping._keeper.pid, signal.SIGKILL)


holders: list[DirectoryLease] = []  # of this process


def work(place: str, name: str, folder: str, fatal: int = 0, kills: str = "") -> dict[str, int]:
    """Make steps as `train` does; return the last state.

    `fatal`: the generation as whose decider this worker dies at once. `kills`: "with" has the directory die with it,
    "often" kills the directory three times.
    """
    hold, swap = DirectoryLease.hold, EmbeddedDirectory.swap

    def note(self: DirectoryLease, *arguments: Any) -> None:
        hold(self, *arguments)
        holders.append(self)

    def die(self: EmbeddedDirectory, key: str, *arguments: Any) -> Swap:
        found = swap(self, key, *arguments)
        if key.startswith(COME):
            (pathlib.Path(folder) / f"come {name}").touch()
        if key == GENERATION and found.done and json.loads(arguments[0])[0] == fatal:
            if kills:
                kill_directory()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(DirectoryLease, "hold", note)  # noqa: B010 - a method, to which mypy lets nobody assign
    setattr(EmbeddedDirectory, "swap", die)  # noqa: B010
    if kills == "often":
        threading.Thread(target=kill_often, daemon=True).start()
    state: dict[str, int] = train(place, name, folder, 2, 3)[0]
    return state


def kill_often() -> None:
    for _ in range(3):  # and not without an end: on a busy host, it takes as long to start the process again
        time.sleep(random.uniform(0.3, 1.5))
        kill_directory()


def told(folder: pathlib.Path) -> Iterator[tuple[int, int, list[str]]]:
    """Return what all workers have written down: numbers, sizes and the members that were there."""
    for path in folder.glob("log *"):
        for line in path.read_text().splitlines():
            yield json.loads(line)


def wait_for(folder: pathlib.Path, number: int, size: int) -> None:
    """Wait until a generation of that number, or a later one, has that size."""
    wait_until(lambda: any(each[0] >= number and each[1] == size for each in told(folder)))


def check(folder: pathlib.Path) -> None:
    """Check that there was one generation of each number: all that were in it have seen the same members."""
    seen: dict[int, set[str]] = {}
    for number, size, lives in told(folder):
        known = seen.setdefault(number, set(lives))
        assert len(known | set(lives)) <= size, f"there were two generations {number}: {known}, {lives}"
        known.update(lives)


def end_and_check(folder: pathlib.Path, made: list[Process]) -> None:
    states = end(folder, made)
    assert all(state == states[0] and is_right(state) for state in states)
    check(folder)


@pytest.mark.parametrize("kills", ["", "with"])
def test_one_that_keeps_all_dies_as_it_has_formed_a_generation(place: str, tmp_path: pathlib.Path, kills: str) -> None:
    """It came first, so it serves the store, keeps the directory and decides; those who are left form the next one."""
    with processes(4) as made:
        made[0].begin(work, place, "w0", str(tmp_path), 1, kills)
        wait_until((tmp_path / "come w0").exists)
        for number, process in enumerate(made[1:3], 1):
            process.begin(work, place, f"w{number}", str(tmp_path))
        made[0].join()
        wait_for(tmp_path, 2, 2)
        made[3].begin(work, place, "w3", str(tmp_path))
        wait_for(tmp_path, 3, 3)
        end_and_check(tmp_path, made[1:])
    assert {number for number, *_ in told(tmp_path)} == {1, 2, 3}


@pytest.mark.parametrize("kills", ["", "with"])
def test_one_that_keeps_all_dies_as_it_has_formed_a_later_generation(
    place: str, tmp_path: pathlib.Path, kills: str
) -> None:
    with processes(4) as made:
        made[0].begin(work, place, "w0", str(tmp_path), 2, kills)
        wait_until((tmp_path / "come w0").exists)
        made[1].begin(work, place, "w1", str(tmp_path))
        wait_for(tmp_path, 1, 2)
        for number, process in enumerate(made[2:], 2):
            process.begin(work, place, f"w{number}", str(tmp_path))
            time.sleep(0.3)
        if made[0].join(0) is None:  # another has decided
            made[0].kill()
        wait_for(tmp_path, 3, 3)
        end_and_check(tmp_path, made[1:])


@pytest.mark.timeout(150)
def test_the_directory_is_killed_again_and_again(place: str, tmp_path: pathlib.Path) -> None:
    with processes(6) as made:
        for number, process in enumerate(made[:3]):
            process.begin(work, place, f"w{number}", str(tmp_path), 0, "often")
        wait_for(tmp_path, 1, 3)
        for number in range(3):
            made[number].kill()
            made[number + 3].begin(work, place, f"w{number}", str(tmp_path), 0, "often")
            last = max(each[0] for each in told(tmp_path))
            wait_for(tmp_path, last + 1, 3)
        end_and_check(tmp_path, made[3:])
