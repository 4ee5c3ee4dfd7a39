"""Groups of processes that hang are explained within two seconds."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from telegrad._core.sockets import HAS_UNIX
from telegrad.insight import seen_groups
from telegrad.insight.history import GroupSnapshot
from telegrad.insight.phrases import NOTE, Finding
from telegrad.insight.report import Report
from telegrad.insight.seen_groups import HostGroup
from telegrad.reporting import debug_server
from tests.cluster import PATIENCE, Process, free_port, processes
from tests.insight.hangs import HANGS, Hang, Stage, work

LONG = 0.3  # seconds, shorter than the default so that the tests are short
WITHIN = 2.0  # seconds

pytestmark = pytest.mark.skipif(not HAS_UNIX, reason="workers can be queried from outside on Linux only")


@contextmanager
def hanging(hang: Hang, folder: pathlib.Path) -> Iterator[list[Process]]:
    """Start a group of processes, and wait until it hangs."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    stage = Stage(free_port(), str(pipe))
    try:
        with processes(hang.size) as group:
            try:
                for rank, process in enumerate(group):
                    process.begin(hang.run, rank, stage)
                for _ in range(hang.signals):
                    assert select.select([reading], [], [], PATIENCE)[0], "it does not come to where it hangs"
                    os.read(reading, 1)
                yield group
            finally:
                for process in group:
                    with suppress(ProcessLookupError):
                        process.kill(signal.SIGKILL)
    finally:
        os.close(reading)


def explained(group: list[Process], hang: Hang) -> tuple[Report, str, float]:
    until = time.monotonic() + LONG + 2 * WITHIN
    while True:
        begun = time.monotonic()
        report = Report(look_at(group), LONG)
        told = report.text()
        took = time.monotonic() - begun
        done = is_it(hang, report.findings, told) and report.status == expected_status(hang) and took < WITHIN
        if done or time.monotonic() > until:
            return report, told, took


def look_at(group: list[Process]) -> GroupSnapshot:
    pids = {process.pid for process in group}
    return HostGroup(place for place in debug_server.places() if place.pid in pids).look()


def expected_status(hang: Hang) -> int:
    return 0 if not hang.kind else 2 if hang.kind == "silent" else 1


def is_it(hang: Hang, found: list[Finding], told: str) -> bool:
    said = " ".join(told.split())
    first = (found[0].kind, *found[0].workers) if found else ("",)
    return first == (hang.kind, *hang.workers) and all(words in said for words in hang.words)


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_explained(name: str, tmp_path: pathlib.Path) -> None:
    hang = HANGS[name]
    with hanging(hang, tmp_path) as group:
        report, told, took = explained(group, hang)
    print(f"{told}\nin {took:.2f} s")
    assert is_it(hang, report.findings, told)
    assert report.status == expected_status(hang)
    assert took < WITHIN


def test_a_working_group_has_no_findings(tmp_path: pathlib.Path) -> None:
    at_work = Hang(3, work, "", (), (), 3)
    titles: list[str] = []
    with hanging(at_work, tmp_path) as group:
        for _ in range(20):
            sight = look_at(group)
            titles += {each.title for each in Report(sight).findings if each.weight > NOTE}
            assert len(sight.accounts) == 3
    assert len(titles) < 2, titles  # on a busy machine, one step may be a long wait


# Other processes, which may imitate workers


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_process_with_an_imitated_stacks_file_gets_no_signal(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "memfd:stacks-of-telegrad"
    if kind == "file":
        path.touch()
    else:
        os.mkfifo(path)
    opened = os.open(path, os.O_RDWR)
    try:
        program = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
        with subprocess.Popen(program, pass_fds=[opened], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert seen_groups.stacks_of(process.pid, opened) == ""
            assert process.poll() is None
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait() == 0
    finally:
        os.close(opened)


def test_long_lines_of_stacks_are_parsed_quickly() -> None:
    begun = time.monotonic()
    assert seen_groups._where('File "' * (seen_groups.MOST_OF_STACKS // 6)) == ""
    assert time.monotonic() - begun < 10
