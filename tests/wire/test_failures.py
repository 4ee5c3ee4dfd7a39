"""Exceptions survive the journey, and tell where they come from."""

from __future__ import annotations

import threading

import pytest

from telegrad import errors
from telegrad.wire.failures import LONGEST_TEXT, describe, rebuild


def journey(error, worker="w1"):
    try:
        raise error
    except BaseException as raised:
        return rebuild(describe(raised, worker))


class KeywordOnly(Exception):
    def __init__(self, *, code):
        super().__init__("keyword", code)
        self.code = code


class OwnText(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.b = b

    def __str__(self):
        return f"own {self.b}"


class BadText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError("x"),
        KeyError(5),
        ValueError(),
        ValueError(1, 2),
        OSError(2, "gone", "file"),
        KeywordOnly(code=3),
        OwnText(1, 2),
        UnicodeDecodeError("utf-8", b"ab", 0, 1, "bad"),
        errors.UnknownWorker("nobody"),
        TimeoutError("late"),
    ],
    ids=repr,
)
def test_type_text_and_attributes(error):
    back = journey(error)
    assert isinstance(back, type(error))
    assert type(back).__qualname__ == type(error).__qualname__
    assert back.args == error.args
    assert "'w1'" in str(back)
    assert "in journey" in str(back)
    assert str(error) in str(back)
    for key, value in vars(error).items():
        assert getattr(back, key) == value
    if isinstance(error, OSError):
        assert (back.errno, back.filename) == (error.errno, error.filename)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, KeyError, errors.CannotEncode])
def test_the_very_type(kind):
    assert type(journey(kind("text"))) is kind


def test_two_hops_tell_both_workers_in_order():
    for error in (ValueError("x"), OwnText(1, 2)):
        text = str(journey(journey(error, "inner"), "outer"))
        assert text.index("'outer'") < text.index("'inner'")
        assert isinstance(journey(journey(error, "inner"), "outer"), type(error))


def test_what_cannot_be_pickled_in_it():
    error = ValueError("x")
    error.lock = threading.Lock()
    error.code = 5
    back = journey(error)
    assert type(back) is ValueError
    assert back.code == 5
    assert not hasattr(back, "lock")
    assert "lock" in str(journey(ValueError(threading.Lock())))


def test_causes_are_told():
    try:
        raise KeyError("first")
    except KeyError as cause:
        error = ValueError("second")
        error.__cause__ = cause
    assert "first" in str(journey(error))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_ends_a_process_there_does_not_end_this_one(error):
    back = journey(error)
    assert type(back) is errors.RemoteError
    assert type(error).__name__ in str(back)


def test_texts_that_fail_or_are_endless():
    assert isinstance(journey(BadText()), (BadText, errors.RemoteError))
    assert len(str(journey(ValueError("x" * 10 * LONGEST_TEXT)).args)) > 0
    assert len(describe(RuntimeError("y" * 10 * LONGEST_TEXT), "w")) < 12 * LONGEST_TEXT


def test_printed_once():
    import traceback

    text = "".join(traceback.format_exception(journey(ValueError("once"))))
    assert text.count("On worker 'w1'") == 1
