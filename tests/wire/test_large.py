"""Large values other than tensors arrive as by plain pickle, and no step holds the interpreter for long."""

import array
import io
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from telegrad._core.pickling import reducers, segments
from telegrad._core.pickling.pickling import MANY, _pieces, decode, encode
from telegrad._core.pickling.segments import PIECE
from telegrad._core.wire.packing import pack, unpack
from telegrad._core.wire.tensors import address_of, copy_of
from telegrad.errors import CannotDecode, CannotEncode
from tests.cluster import in_background, wait_until
from tests.trees import DATA, LARGE, LEAVES, TREES, OwnText, Record, Slotted, alike
from tests.wire.test_pickling import journey


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


ANY = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def sharing(value: Any) -> list[int]:
    """Number the distinct objects inside of a value, in the order of their appearance."""
    numbers: dict[int, int] = {}
    found: list[int] = []

    def visit(part: Any) -> None:
        known = id(part) in numbers
        found.append(numbers.setdefault(id(part), len(numbers)))
        if known or isinstance(part, int | float | type(None)) or (isinstance(part, str) and len(part) < 2):
            return
        if isinstance(part, dict):
            for key, inner in part.items():
                visit(key)
                visit(inner)
        elif isinstance(part, list | tuple) and len(part) < 100:
            for inner in part:
                visit(inner)
        elif isinstance(part, Record | Slotted):
            visit(part.content)

    visit(value)
    return found


@ANY
@given(TREES)
def test_any_value(value: Any) -> None:
    alone = pickle.loads(pickle.dumps(value, 5))
    assert alike(journey(value), alone)
    assert alike(journey(((value, 1), {"key": value})), ((alone, 1), {"key": alone}))


@ANY
@given(st.lists(LEAVES, min_size=1, max_size=3))
def test_shared_objects_stay_shared(leaves: list[Any]) -> None:
    value = [leaves, [*leaves, *leaves], {"all": tuple(leaves)}, Record("x", leaves)]
    alone = pickle.loads(pickle.dumps(value, 5))
    if not any(isinstance(leaf, float | int | str) and not isinstance(leaf, OwnText) for leaf in leaves):
        assert sharing(journey(value)) == sharing(alone)
    assert alike(journey(value), alone)
    args = (*leaves, *leaves)
    (back, _), (expected, _) = journey((args, {})), pickle.loads(pickle.dumps((args, {}), 5))
    assert alike(back, expected)
    assert all(one is other for one, other in zip(back, back[len(leaves) :], strict=False) if isinstance(one, list))


def test_a_large_text_that_is_used_twice_arrives_as_one_object() -> None:
    text = "é" * LARGE
    first, second, record = journey([text, text, Record(text, [text])])
    assert first is second is record.name is record.content[0]


def test_containers_that_contain_themselves() -> None:
    ring: list[Any] = list(range(10_000))
    ring += [DATA[:LARGE], ring]
    back = journey(ring)
    assert back[-1] is back
    assert back[-2] == DATA[:LARGE]
    table: dict[Any, Any] = dict.fromkeys(range(10000), "x")
    table["self"] = [table]
    assert journey(table)["self"][0].keys() == table.keys()


@pytest.mark.parametrize(
    ("value", "blobs"),
    [
        (DATA[:LARGE], 1),
        ([DATA[:LARGE], DATA[1 : LARGE + 1]], 2),
        (bytearray(DATA[:LARGE]), 1),
        ("x" * LARGE, 1),
        ("é" * LARGE, 1),
        ({"deep": [("x" * LARGE, DATA[:LARGE])]}, 2),
        (Record("x" * LARGE, {"a": "é" * LARGE}), 2),
        (array.array("d", bytes(LARGE)), 1),
        (io.BytesIO(DATA[:LARGE]), 1),
        (numpy.ones(LARGE), 1),
        (list(range(300_000)), 1),
        ([DATA[:LARGE]] * 100, 1),
        ([bytes([number]) * LARGE for number in range(200)], 1),
        ([str(number) * LARGE for number in range(100)], None),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, int) else type(value).__name__,
)
def test_large_parts_are_sent_beside_the_pickle(value: Any, blobs: int | None) -> None:
    ways: list[Any] = [value, ((value,), {}), ((), {"key": value})]
    for each in ways:
        body, tensors, *_ = encode(each, True)
        assert len(body) < 2 * segments.LONGEST_RUN
        assert len(tensors) < 200
        assert blobs is None or len(tensors) == blobs
    assert alike(journey(value), value)


def test_the_sender_does_not_copy_bytes_and_texts() -> None:
    text = "x" * LARGE
    (blob,) = encode([DATA], True).tensors
    assert blob.data_ptr() == address_of(memoryview(DATA))
    (first,), (second,) = encode(text, True).tensors, encode([Record(text, None)], True).tensors
    assert first.data_ptr() == second.data_ptr()


def test_blobs_keep_the_memory_of_their_value_alive() -> None:
    value = [DATA[:LARGE] + b"end", "x" * LARGE + "end"]
    blobs = encode(value, True).tensors
    del value
    assert [bytes(blob[-3:].tolist()) for blob in blobs] == [b"end", b"end"]


def test_later_changes_of_a_value_are_not_sent() -> None:
    data, elements = bytearray(DATA[:LARGE]), array.array("b", DATA[:LARGE])
    body, tensors, *_ = encode([data, elements], True)
    data[:4] = elements[:4] = array.array("b", b"else")
    data += b"more"  # refused if the memory of the bytearray were exported
    elements.append(1)
    assert decode(body, tensors) == [DATA[:LARGE], array.array("b", DATA[:LARGE])]


def test_received_values_do_not_share_the_received_memory() -> None:
    body, tensors, *_ = encode([bytearray(DATA[:LARGE]), DATA[:LARGE], "x" * LARGE, io.BytesIO(DATA[:LARGE])], True)
    received = [tensor.clone() for tensor in tensors]
    back = decode(body, received)
    for tensor in received:
        tensor.zero_()
    data, content, text, file = back
    assert (data, content, text, file.getvalue()) == (DATA[:LARGE], DATA[:LARGE], "x" * LARGE, DATA[:LARGE])
    data += b"more"
    file.write(b"else")


def test_received_texts_have_the_form_of_ordinary_texts() -> None:
    for text in ("x" * LARGE, "é" * LARGE, "日" * LARGE, "a" * LARGE + "\U0001f600", "a" * LARGE + "\udc80"):
        back, plain = journey(text), "".join(list(text))
        assert sys.getsizeof(back) == sys.getsizeof(plain)
        assert hash(back) == hash(text)
        assert {back: 1}[text] == 1
        assert sys.getrefcount(back) == sys.getrefcount(plain)


def test_a_text_that_is_not_valid_utf_8_is_refused() -> None:
    body, (blob,), *_ = encode("é" * LARGE, True)
    for wrong in (b"\xff" * 9, b"\xc3", b"a" * PIECE + b"\x80\x80", b"\x80" * 2 * PIECE):
        with pytest.raises(CannotDecode, match="utf-8"):
            decode(body, [copy_of(memoryview(wrong))])
    with pytest.raises(CannotDecode):
        decode(encode([DATA[:LARGE]], True).body, [blob[:100]])


def test_an_array_of_a_machine_with_another_byte_order(monkeypatch: pytest.MonkeyPatch) -> None:
    values = array.array("i", range(LARGE))
    body, tensors, *_ = encode(values, True)
    other = array.array("i", values)
    other.byteswap()
    (swapped,) = encode(other, True).tensors
    here = reducers._format_of("i")
    monkeypatch.setattr(reducers, "_format_of", lambda typecode: here ^ 1)
    swapped_body = encode(other, True).body
    monkeypatch.undo()
    assert (decode(swapped_body, [swapped]), decode(body, tensors)) == (values, values)


@pytest.mark.parametrize("many", [10, 20_000])
def test_errors_of_large_values_are_those_of_small_ones(many: int) -> None:
    with pytest.raises(CannotEncode, match=r"argument 0\[\d+\] .*cannot be sent"):
        encode((([*range(many), threading.Lock()],), {}), True)
    with pytest.raises(CannotEncode, match="no"):
        encode([*range(many), DATA, Failing(ValueError("no"))], True)
    with pytest.raises(CannotEncode, match="odd"):
        encode([*range(many), Failing(RuntimeError("odd"))], True)


def test_a_dict_that_changes_while_it_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict that changes between two pieces is pickled again in one piece."""
    table: dict[int, Any] = dict.fromkeys(range(100_000), ())
    more = iter(range(100_000, 200_000))
    write = segments.SegmentWriter.write

    def change(self: Any, data: Any) -> None:
        write(self, data)
        table[next(more)] = bytearray(DATA[:LARGE])

    monkeypatch.setattr(segments.SegmentWriter, "write", change)
    back = journey([table])[0]
    assert len(back) > 100_000
    assert back == table


def test_a_container_that_another_thread_changes() -> None:
    """A large container of atoms is sent in a state that it had at one moment."""
    table = {number: number for number in range(20_000)}
    numbers, stop = [0] * 200_000, threading.Event()

    def change() -> None:
        number = 20_000
        while not stop.is_set():
            table[number] = number
            del table[number - 20_000]
            number += 1
            for place in range(0, len(numbers), 10_000):
                numbers[place] += 1
            numbers.append(numbers.pop())

    with in_background(change):
        try:
            for _ in range(5):
                (back, more), _ = journey(((table, numbers), {}))
                assert 19_999 <= len(back) <= 20_001
                assert sorted(back) == list(range(min(back), min(back) + len(back)))
                assert len(more) in (199_999, 200_000)
        finally:
            stop.set()


@pytest.mark.parametrize("kind", [dict.fromkeys, set])
def test_a_container_that_changes_between_two_pieces(kind: Callable[..., Any]) -> None:
    """The test makes the change that another thread would make by chance."""
    table = kind(range(3 * MANY))
    pieces = _pieces(table)
    assert [*next(pieces)] == [*range(MANY)]
    table.update({-1: None} if isinstance(table, dict) else {-1})
    assert [*next(pieces)] == [*range(MANY, 2 * MANY)]


@pytest.mark.parametrize(
    "value",
    [
        DATA,
        bytearray(DATA),
        "x" * 5 * LARGE,
        "é" * 5 * LARGE,
        array.array("b", DATA),
        list(range(500_000)),
        [{"a": [1]}] * 9,
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_step_takes_more_than_a_piece(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is held for pieces of text and of frames; `copy` copies everything else."""
    written: list[int] = []
    read: list[int] = []
    write, next_ = segments.SegmentWriter.write, segments.SegmentReader.read

    def note_write(self: Any, data: Any) -> None:
        if type(data) is not bytes or data is not value:
            written.append(len(data))
        write(self, data)

    def note_read(self: Any, size: int) -> bytes:
        read.append(size)
        return next_(self, size)

    monkeypatch.setattr(segments.SegmentWriter, "write", note_write)
    monkeypatch.setattr(segments.SegmentReader, "read", note_read)
    assert journey(value) == value
    bounds = 1 << 17
    assert all(size < bounds for size in written if size != len(DATA))
    assert all(size < bounds for size in read)


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"x" * (64 << 20),
        lambda: bytearray(64 << 20),
        lambda: "x" * (64 << 20),
        lambda: "é" * (16 << 20),
        lambda: array.array("d", bytes(64 << 20)),
        lambda: io.BytesIO(bytes(64 << 20)),
        lambda: list(range(500_000)),
        lambda: [[number] for number in range(100_000)],
    ],
    ids=["bytes", "bytearray", "ascii", "text", "array", "file", "numbers", "lists"],
)
def test_other_threads_run_while_a_large_value_is_pickled(make: Any) -> None:
    """The switch interval is endless, so the thread that pickles has to release the interpreter itself.

    A busy machine may begin the other thread too late for it, so each way is tried until it takes a turn.
    """
    interval, stop, turns = sys.getswitchinterval(), threading.Event(), [0]

    def take_turns() -> None:
        while not stop.wait(1e-4):
            turns[0] += 1

    def has_turns_during(work: Callable[[], object]) -> bool:
        before = turns[0]
        work()
        return turns[0] > before

    value = make()
    body, tensors, *_ = encode([value], True)
    assert alike(decode(body, tensors), [value])
    with in_background(take_turns):
        try:
            sys.setswitchinterval(1000)
            if isinstance(value, bytearray | list | array.array):  # the other types are not copied by the sender
                wait_until(lambda: has_turns_during(lambda: encode([value], True)))
            wait_until(lambda: has_turns_during(lambda: decode(body, tensors)))
        finally:
            sys.setswitchinterval(interval)
            stop.set()


@pytest.mark.parametrize(
    "mode", [lambda: torch.device("meta"), FakeTensorMode, torch.inference_mode], ids=["meta", "fake", "inference"]
)
def test_in_any_mode_of_torch(mode: Any) -> None:
    value = [
        DATA,
        "x" * LARGE,
        "é" * LARGE,
        bytearray(DATA),
        array.array("b", DATA),
        list(range(200_000)),
        Record("x" * LARGE, 1),
    ]
    with mode():
        body, tensors, *_ = encode(value, True)
        meta, blobs, _ = pack(tensors)
    assert alike(decode(body, unpack(meta, blobs)), value)  # type: ignore[arg-type]
    body, tensors, *_ = encode(value, True)
    meta, carried, _ = pack(tensors)
    with mode():
        back = decode(body, unpack(meta, carried))  # type: ignore[arg-type]
    assert alike(back, value)
