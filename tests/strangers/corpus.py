"""Where the fuzzer begins: real conversations, in the form that its targets read."""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Callable, Iterator

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


TARGETS: dict[str, Callable[[bytes], None]] = {"frames": frames, "handshake": handshake}


def beginnings(target: str) -> Iterator[bytes]:
    if target == "frames":
        for stream in samples():
            yield from (cuts + stream for cuts in (b"\0\0\0", b"\x1b\x05\x80", b"\xff\xff\xff"))
        return
    changed = [[*honest()[:6], Move(kind, 1, 5, 40, 1)] for kind in _CHANGES]
    for game in (honest(), honest() + honest(2, 0), honest(wanted=2), honest(key=1), *changed):
        yield b"".join(_MOVE.pack(*move) for move in game)


_CHANGES = (DELIVER, FLIP, CUT, JOIN, RENAME, RAW)


def write(target: str, folder: pathlib.Path) -> None:
    for number, data in enumerate(beginnings(target)):
        (folder / f"{target}-{number}").write_bytes(data)
