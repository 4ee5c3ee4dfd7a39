"""Tests of how printed output is divided into lines, and written to files."""

import contextlib
import io
import os
import pathlib
from collections.abc import Iterator
from math import inf
from typing import Any
from unittest.mock import patch

import pytest

from telegrad.launch import children
from telegrad.launch.children import LONGEST, PATIENCE, STREAMS, LineBuffer, Output


def test_a_line_is_shown_when_it_is_complete() -> None:
    lines = LineBuffer()
    assert lines.feed(b"one\ntw", 0.0) == [b"one"]
    assert lines.feed(b"o\n", 0.1) == [b"two"]
    assert lines.due == inf
    assert lines.flush() == []


def test_an_incomplete_line_is_shown_after_a_while() -> None:
    lines = LineBuffer()
    assert lines.feed(b"name", 5.0) == []
    assert lines.feed(b"? ", 5.5) == []
    assert lines.due == 5.0 + PATIENCE
    assert lines.look(5.9) == []
    assert lines.look(6.0) == [b"name? "]
    assert lines.due == inf
    assert lines.feed(b"rest", 7.0) == []
    assert lines.flush() == [b"rest"]


def test_the_patience_counts_for_each_line() -> None:
    lines = LineBuffer()
    lines.feed(b"a", 0.0)
    assert lines.feed(b"b\nc", 0.9) == [b"ab"]
    assert lines.due == 0.9 + PATIENCE


def test_the_last_state_of_an_overwritten_line_is_shown() -> None:
    lines = LineBuffer()
    assert lines.feed(b" 1%\r 2%\r", 0.0) == []
    assert lines.look(2.0) == [b" 2%"]
    assert lines.feed(b"done\r\n", 3.0) == [b"done"]


def test_a_line_without_an_end_is_divided_at_the_limit() -> None:
    lines = LineBuffer()
    assert lines.feed(b"x" * LONGEST, 0.0) == [b"x" * LONGEST]
    assert lines.due == inf


def test_a_file_that_takes_a_part_at_a_time_gets_all(tmp_path: pathlib.Path) -> None:
    class Nearly(io.RawIOBase):
        text = b""

        def write(self, data: Any) -> int:
            self.text += bytes(data[:3])
            return min(3, len(data))

    output, file = Output(str(tmp_path)), Nearly()
    output._files["w"] = file
    output.raw("w", b"one line\n")
    assert file.text == b"one line\n"


def all_of(reader: int) -> bytes:
    """Return what a pipe has now."""
    os.set_blocking(reader, False)
    pieces = []
    with contextlib.suppress(BlockingIOError):
        while True:
            pieces.append(os.read(reader, LONGEST))
    return b"".join(pieces)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Make a pipe whose writer is this program's stdout and stderr."""
    reader, writer = os.pipe()
    with patch.dict(STREAMS, stdout=writer, stderr=writer), patch.object(children, "PATIENCE", 0.01):
        yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_stream_that_nobody_reads_does_not_stop_the_supervisor(tmp_path: pathlib.Path, pipe: tuple[int, int]) -> None:
    run, lines = Output(str(tmp_path)), [b"x" * 95] * 1000  # more than the pipe has room for
    run.lines("w", "stdout", lines)
    run.lines("w", "stdout", lines[:1])
    shown = all_of(pipe[0]).count(b"\n")
    run.lines("w", "stdout", [b"last"])
    left_out = f"{1001 - shown} lines left out here; {run.folder} has all"
    assert all_of(pipe[0]).decode() == f"\n[telegrad] {left_out}\n[w] last\n"


def test_the_end_tells_of_lines_that_were_left_out(tmp_path: pathlib.Path, pipe: tuple[int, int]) -> None:
    run = Output(str(tmp_path))
    run.lines("w", "stderr", [b"x" * LONGEST * 2])
    all_of(pipe[0])
    run.close()
    assert all_of(pipe[0]).decode() == f"\n[telegrad] 1 line left out here; {run.folder} has all\n"
