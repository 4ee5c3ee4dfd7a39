"""Where the fuzzer begins: real conversations, in the form that its targets read."""

from __future__ import annotations

import itertools
import pathlib
import struct
from collections.abc import Callable, Iterator

from telegrad.errors import ProtocolViolation
from telegrad.transport.noise import KEY, CipherState, DecryptionFailed
from telegrad.transport.records import RecordReader, RecordWriter
from tests.strangers.adversary import CUT, DELIVER, FLIP, JOIN, RAW, RENAME, Move, Network, honest
from tests.strangers.streams import SMALL, agree, samples, scratch_of

_MOVE = struct.Struct("<BBBBH")


def frames(data: bytes) -> None:
    """The first bytes say how the rest is cut."""
    cuts, stream = [byte + 1 for byte in data[:3]], data[3:]
    if stream:
        with scratch_of(SMALL):
            agree(stream, cuts, SMALL)


def handshake(data: bytes) -> None:
    """A game of a stranger, some bytes for each move."""
    whole = len(data) - len(data) % _MOVE.size
    Network().play(Move(*fields) for fields in _MOVE.iter_unpack(data[:whole]))


def records(data: bytes) -> None:
    """The first bytes say how the rest is cut, and which bytes of a true stream are changed before it."""
    cuts, changes, behind = [byte + 1 for byte in data[:3]], data[3:9], data[9:]
    writer, contents = RecordWriter(CipherState(bytes(KEY))), samples()[:4]
    stream = bytearray(b"".join(map(writer.encrypt, contents)))
    for at, value in zip(changes[::2], changes[1::2], strict=False):
        stream[at * 7 % len(stream)] ^= value
    stream += behind
    found, intact = decrypted(bytes(stream), cuts or [1]), b"".join(contents)
    assert intact.startswith(found)
    assert any(changes[1::2]) or found == intact


def decrypted(stream: bytes, cuts: list[int]) -> bytes:
    """What a reader takes before it refuses something."""
    reader, found, at = RecordReader(CipherState(bytes(KEY))), b"", 0
    target = memoryview(bytearray(SMALL))
    for cut in itertools.cycle(cuts):
        buffer = reader.buffer()
        came = min(cut, len(buffer), len(stream) - at)
        buffer[:came] = stream[at : at + came]
        at += came
        try:
            while count := reader.decrypt_into(target, came):
                found, came = found + bytes(target[:count]), 0
        except (DecryptionFailed, ProtocolViolation):
            return found
        if at == len(stream):
            return found
    raise AssertionError("there are no cuts")


TARGETS: dict[str, Callable[[bytes], None]] = {"frames": frames, "handshake": handshake, "records": records}


def beginnings(target: str) -> Iterator[bytes]:
    if target == "frames":
        for stream in samples():
            yield from (cuts + stream for cuts in (b"\0\0\0", b"\x1b\x05\x80", b"\xff\xff\xff"))
        return
    if target == "records":
        yield from (bytes([9, 99, 255, at, value, 0, 0, 0, 0]) + behind for at, value, behind in _TAMPERED)
        return
    changed = [[*honest()[:6], Move(kind, 1, 5, 40, 1)] for kind in _CHANGES]
    for game in (honest(), honest() + honest(2, 0), honest(wanted=2), honest(key=1), *changed):
        yield b"".join(_MOVE.pack(*move) for move in game)


_TAMPERED = [(0, 0, b""), (0, 1, b""), (5, 128, b"x"), (90, 1, bytes(40)), (0, 0, bytes(4)), (0, 0, b"\x20\0\0\0" * 9)]
_CHANGES = (DELIVER, FLIP, CUT, JOIN, RENAME, RAW)


def write(target: str, folder: pathlib.Path) -> None:
    for number, data in enumerate(beginnings(target)):
        (folder / f"{target}-{number}").write_bytes(data)
