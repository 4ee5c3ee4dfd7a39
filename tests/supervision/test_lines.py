"""What is printed becomes lines."""

from __future__ import annotations

from math import inf

from telegrad.launch.output import LONGEST, PATIENCE, LineBuffer


def test_lines_come_when_they_end() -> None:
    lines = LineBuffer()
    assert lines.feed(b"one\ntw", 0.0) == [b"one"]
    assert lines.feed(b"o\n", 0.1) == [b"two"]
    assert lines.due == inf
    assert lines.flush() == []


def test_what_has_no_end_is_shown_after_a_while() -> None:
    lines = LineBuffer()
    assert lines.feed(b"name", 5.0) == []
    assert lines.feed(b"? ", 5.5) == []
    assert lines.due == 5.0 + PATIENCE
    assert lines.look(5.9) == []
    assert lines.look(6.0) == [b"name? "]
    assert lines.due == inf
    assert lines.feed(b"rest", 7.0) == []
    assert lines.flush() == [b"rest"]


def test_the_patience_is_with_each_line() -> None:
    lines = LineBuffer()
    lines.feed(b"a", 0.0)
    assert lines.feed(b"b\nc", 0.9) == [b"ab"]
    assert lines.due == 0.9 + PATIENCE


def test_a_line_that_is_written_anew_is_shown_as_it_was_last() -> None:
    lines = LineBuffer()
    assert lines.feed(b" 1%\r 2%\r", 0.0) == []
    assert lines.look(2.0) == [b" 2%"]
    assert lines.feed(b"done\r\n", 3.0) == [b"done"]


def test_no_line_grows_without_bound() -> None:
    lines = LineBuffer()
    assert lines.feed(b"x" * LONGEST, 0.0) == [b"x" * LONGEST]
    assert lines.due == inf
