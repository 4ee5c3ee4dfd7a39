"""Texts of other processes are escaped in the log."""

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

import telegrad
from telegrad._core.texts import safe

assert telegrad  # the import installs the filter


@pytest.fixture
def logged() -> io.StringIO:
    return io.StringIO()


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 世界 ✓", "a\u00a0b", r"C:\path\x1b"])
def test_safe_texts_are_not_changed(text: str) -> None:
    assert safe(text) is text or safe(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\x9b31m\x7f\x00", r"\x9b31m\x7f\x00"),
        ("user\u202egpj.exe\u2066\u061c\u200f", r"user\u202egpj.exe\u2066\u061c\u200f"),
        ("a\nb\tc\r\u2028", r"a\nb\tc\r\u2028"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert safe(text) == shown
    assert safe("a\nb\tc\r", lines=True) == "a\nb\tc\\r"


@given(st.text())
def test_any_text_becomes_printable(text: str) -> None:
    shown = safe(text)
    assert all(each.isprintable() or each.isspace() for each in shown)
    assert not set(shown) & set("\n\r\t\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029")
    assert safe(shown) == shown
    shown.encode()


class Textless:
    def __repr__(self) -> str:
        raise ValueError("no text")


def test_a_value_without_a_text_fails_no_code_that_logs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("telegrad")
    monkeypatch.setattr(log, "propagate", False)
    log.warning("telegrad: %r failed", Textless())
    assert "ValueError: no text" in capsys.readouterr().err


def test_log_records_are_escaped(logged: io.StringIO) -> None:
    handler = logging.StreamHandler(logged)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log = logging.getLogger("telegrad")
    log.addHandler(handler)
    try:
        log.warning("telegrad: worker %r runs %s: %s", "w0", "f\x1b[2J", ValueError("x\nERROR forged\x9b"))
        log.warning("telegrad: %d of %s:\n  plain", 3, "w0")
        try:
            raise ValueError("\x1b]0;title\x07")
        except ValueError:
            log.exception("telegrad: work failed")
    finally:
        log.removeHandler(handler)
    said = logged.getvalue()
    assert said.startswith("WARNING telegrad: worker 'w0' runs f\\x1b[2J: x\n  ERROR forged\\x9b\n")
    assert "WARNING telegrad: 3 of w0:\n  plain\n" in said
    assert "ValueError: \\x1b]0;title\\x07" in said
    assert all(each.isprintable() or each == "\n" for each in said)
