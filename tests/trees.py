"""Random values with large parts that are no tensors, and a comparison of such values."""

import array
import collections
import dataclasses
import io
from typing import Any

import numpy
import torch
from hypothesis import strategies as st

from telegrad._core.pickling.segments import OWN_FROM

LARGE = OWN_FROM


@dataclasses.dataclass
class Record:
    name: str
    content: Any


class Slotted:
    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and alike(self.content, other.content)


class OwnBytes(bytes):
    pass


class OwnText(str):
    pass


class OwnList(list[Any]):
    pass


def alike(one: Any, other: Any) -> bool:
    """Return True if two values are equal, with equal types in every place."""
    if type(one) is not type(other):
        return False
    if isinstance(one, numpy.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.flags.writeable == other.flags.writeable
            and one.flags.f_contiguous == other.flags.f_contiguous
            and (one.tolist() == other.tolist() if one.dtype.hasobject else one.tobytes() == other.tobytes())
        )
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and len(one) > 1000:
        return list(map(type, one)) == list(map(type, other)) and one == other
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return alike(list(one.items()), list(other.items()))
    if isinstance(one, Record):
        return alike([one.name, one.content], [other.name, other.content])
    if isinstance(one, io.BytesIO):
        return (one.getvalue(), one.tell(), one.__dict__) == (other.getvalue(), other.tell(), other.__dict__)
    if isinstance(one, Exception):
        return alike(one.args, other.args)
    if isinstance(one, array.array):
        return (one.typecode, one.tobytes()) == (other.typecode, other.tobytes())
    return bool(one == other)


def _read_only(values: Any) -> Any:
    values.flags.writeable = False
    return values


def _at(content: bytes, position: int) -> io.BytesIO:
    file = io.BytesIO(content)
    file.seek(position)
    return file


DATA = numpy.random.default_rng(0).integers(0, 256, 5 * LARGE, dtype=numpy.uint8).tobytes()
SIZES = st.sampled_from([0, 1, 70_000, LARGE - 1, LARGE, LARGE + 1, 2 * LARGE + 13])
TEXTS = ("a", "é", "日", "\U0001f600", "a\ud800", "\x00")
ARRAYS = st.sampled_from(
    [
        numpy.arange(LARGE, dtype=">i4"),
        numpy.asfortranarray(numpy.arange(2 * LARGE).reshape(2, LARGE)),
        numpy.arange(4 * LARGE).reshape(4, LARGE)[::2, ::-3],
        numpy.zeros(LARGE, dtype=[("x", "f8"), ("y", "i4")]),
        numpy.array([None, "text", 3] * 2000, dtype=object),
        _read_only(numpy.ones(LARGE)),
        numpy.array(3.5),
        numpy.zeros((0, 7)),
        numpy.full(LARGE, "2020-01-01", dtype="datetime64[s]"),
        numpy.broadcast_to(numpy.arange(LARGE), (2, LARGE)).copy(),
    ]
)
LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    SIZES.map(lambda size: DATA[:size]),
    SIZES.map(lambda size: bytearray(DATA[:size])),
    SIZES.map(lambda size: OwnBytes(DATA[:size])),
    st.builds(lambda text, size: text * size, st.sampled_from(TEXTS), SIZES),
    st.builds(lambda text, size: OwnText(text * size), st.sampled_from(TEXTS), SIZES),
    st.builds(lambda code, size: array.array(code, bytes(8 * (size // 8))), st.sampled_from("bhilqdf"), SIZES),
    st.builds(_at, SIZES.map(lambda size: DATA[:size]), st.integers(0, 9)),
    st.sampled_from([5, 5000, 100_000]).map(lambda count: list(range(count))),
    st.sampled_from([5, 5000]).map(lambda count: {str(number): number / 3 for number in range(count)}),
    st.sampled_from([5, 5000]).map(lambda count: {(number, str(number)) for number in range(count)}),
    st.sampled_from([5, 5000]).map(lambda count: tuple(str(number) for number in range(count))),
    ARRAYS,
    SIZES.map(lambda size: torch.arange(size, dtype=torch.int16)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(OwnList),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Record, st.text(max_size=3), inner),
        st.builds(Slotted, inner),
        inner.map(lambda value: ValueError("bad", value)),
        inner.map(lambda value: collections.OrderedDict(a=value, b=value)),
        inner.map(lambda value: [value, value]),
    ),
    max_leaves=6,
)
