"""What is seen of other processes from outside, whatever they have prepared for that."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import pytest

from telegrad.insight import seen_groups

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the kernel tells nothing of others here")


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_process_is_sent_no_signal_for_a_file_that_is_only_named_like_its_stacks(
    tmp_path: pathlib.Path, kind: str
) -> None:
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


def test_long_lines_of_stacks_take_no_time() -> None:
    begun = time.monotonic()
    assert seen_groups._where('File "' * (seen_groups.MOST_OF_STACKS // 6)) == ""
    assert time.monotonic() - begun < 10
