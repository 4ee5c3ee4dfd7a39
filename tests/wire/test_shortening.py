"""Exceptions of any size are described and rebuilt quickly, and keep their type where possible."""

import collections
import pickle
from collections.abc import Callable
from time import thread_time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad._core.pickling.exceptions import describe, rebuild
from telegrad._core.pickling.remote_text import LARGEST, LONGEST_TEXT, brief, first_line, is_large, text_of, with_lines
from telegrad.errors import RemoteError

MANY = 1_000_000
TEXT = "x" * (64 << 20)
MOST = 0.05  # seconds; without a limit of the size, most of these take 0.2 to 2 s


class Plain:
    """An object that is pickled with all its attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value


def with_attribute(value: Any) -> Exception:
    error = ValueError("x")
    error.value = value  # type: ignore[attr-defined]
    return error


def noted(notes: list[str]) -> Exception:
    error = ValueError("x")
    error.__notes__ = notes
    return error


def chain(attribute: str) -> BaseException:
    last: BaseException | None = None
    for number in range(150):
        error = ValueError(number, TEXT)
        setattr(error, attribute, last)
        last = error
    assert last is not None
    return last


def group(members: list[Exception]) -> Exception:
    return ExceptionGroup("group", members)


LARGE: dict[str, Callable[[], BaseException]] = {
    "text": lambda: ValueError(TEXT),
    "wide text": lambda: ValueError("é" * (32 << 20)),
    "second": lambda: ValueError("a", TEXT),
    "key": lambda: KeyError(TEXT),
    "lookup": lambda: AttributeError(TEXT),
    "module": lambda: ImportError(TEXT, name=TEXT),
    "file": lambda: OSError(2, TEXT, TEXT),
    "bytes": lambda: ValueError(b"x" * (64 << 20)),
    "decoding": lambda: UnicodeDecodeError("utf-8", b"x" * (64 << 20), 5, 6, TEXT),
    "syntax": lambda: SyntaxError(TEXT, ("file", 1, 1, TEXT)),
    "arguments": lambda: ValueError(*range(MANY)),
    "list": lambda: ValueError([1] * MANY),
    "list of texts": lambda: ValueError([*map(str, range(MANY))]),
    "dict": lambda: ValueError(dict.fromkeys(range(MANY))),
    "set": lambda: ValueError(set(range(MANY))),
    "deque": lambda: ValueError(collections.deque(range(MANY))),
    "integer": lambda: ValueError(1 << 10**8),
    "nested": lambda: ValueError([[[TEXT]]]),
    "attribute": lambda: with_attribute(TEXT),
    "attribute of an object": lambda: with_attribute(Plain(TEXT)),
    "object": lambda: ValueError(Plain(TEXT)),
    "objects": lambda: ValueError([Plain(number) for number in range(50_000)]),
    "array": lambda: ValueError(np.zeros(8 << 20)),
    "tensor": lambda: ValueError(torch.zeros(8 << 20)),
    "note": lambda: noted([TEXT]),
    "notes": lambda: noted([*map(str, range(MANY))]),
    "causes": lambda: chain("__cause__"),
    "contexts": lambda: chain("__context__"),
    "members": lambda: group([ValueError(0)] * MANY),
    "large members": lambda: group([ValueError(TEXT)] * 50),
    "end": lambda: SystemExit(TEXT),
}


@pytest.mark.parametrize("kind", LARGE)
def test_an_exception_of_any_size_is_described_in_milliseconds(kind: str) -> None:
    error = LARGE[kind]()
    describe(ValueError("first"), "w1")  # for its imports, which are not measured
    start = thread_time()
    line, told = first_line(error), describe(error, "w1", "f")
    made = rebuild(told)
    assert thread_time() - start < MOST
    assert len(line) < 10_000
    assert len(told) < LARGEST
    assert len(str(made)) < 5 * LONGEST_TEXT
    assert "On worker 'w1', in f" in str(made)
    if kind not in ("decoding", "syntax", "arguments", "large members", "end"):
        assert isinstance(made, type(error))
        assert kind != "second" or made.args[0] == "a"
    else:
        assert isinstance(made, RemoteError)
        assert type(error).__name__ in str(made)


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    shown = rebuild(describe(ValueError("first" + TEXT + "last"), "w1")).args[0]
    assert shown.startswith("first")
    assert shown.endswith("last")
    assert len(shown) == LONGEST_TEXT + len("\n[...]\n")


def test_a_large_container_is_shown_by_its_first_elements_and_its_length() -> None:
    assert text_of(ValueError([*range(MANY)])) == f"<list of {MANY}: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...>"
    assert brief({"a": [TEXT]}).startswith("<dict of 1: ")
    assert text_of(ValueError("a", [0] * MANY)).startswith("('a', <list of 1000000: 0, ")


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        ValueError("x"),
        ValueError("x", 1),
        ValueError([1, 2]),
        KeyError("x"),
        KeyError(),
        OSError(2, "gone", "file"),
        UnicodeDecodeError("utf-8", b"ab", 0, 1, "bad"),
        UnicodeDecodeError("utf-8", b"a" * 2 * LARGEST, LARGEST, LARGEST + 1, "bad"),
        SyntaxError("bad", ("file", 1, 1, "x")),
        ImportError("no", name="m"),
        group([ValueError(1)]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_small_exception_keeps_its_text(error: Exception) -> None:
    assert text_of(error) == str(error)


ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
SMALL = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | inner.map(Plain) | inner.map(ValueError),
    max_leaves=20,
)
LEAVES = ["x" * 2 * LARGEST, b"x" * 2 * LARGEST, 1 << 16 * LARGEST, [0] * LARGEST, [None] * 200_000, ["a"] * 20_000]


def leaf(number: int) -> Any:
    return LEAVES[number]


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    beside = st.lists(SMALL, max_size=3)
    return st.one_of(
        st.tuples(beside, inner, beside).map(lambda parts: [*parts[0], parts[1], *parts[2]]),
        st.tuples(st.text(), inner).map(lambda parts: {parts[0]: parts[1], 1: 2}),
        st.tuples(beside, inner).map(lambda parts: ValueError(*parts[0], parts[1])),
        inner.map(Plain),
        inner.map(with_attribute),
        inner.map(lambda value: collections.deque([value])),
    )


@given(st.recursive(st.sampled_from(range(len(LEAVES))).map(leaf), around, max_leaves=3))
def test_large_parts_are_found_inside_of_any_value(value: Any) -> None:
    assert is_large(value)
    assert len(brief(value)) <= LONGEST_TEXT + 10
    assert len(describe(ValueError(value), "w1")) < LARGEST


@given(SMALL)
def test_small_values_are_not_shortened(value: Any) -> None:
    assert not is_large(value)
    assert brief(value) == repr(value)


def test_circular_values_and_repeated_parts_are_measured() -> None:
    circle: list[Any] = []
    circle.append([circle] * 5)
    assert not is_large(circle)
    assert is_large(["x" * 600] * 2 + ["y" * 600], 1_000)
    assert not is_large(["x" * 600] * 100, 1_500)  # a pickle has a repeated object once


def test_a_traceback_with_many_unfinished_frames_is_read_in_milliseconds() -> None:
    start = thread_time()
    with_lines('File "' + '", line 1, in ' * 4_000 + "\n  x")
    assert thread_time() - start < MOST


def test_a_description_above_the_size_limit_is_not_read() -> None:
    made = rebuild(pickle.dumps((None, "ValueError", "x" * 3 * LARGEST), 5))
    assert isinstance(made, RemoteError)
    assert len(str(made)) < 1_000
