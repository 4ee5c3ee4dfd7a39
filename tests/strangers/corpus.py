"""The initial inputs of the fuzzer: real conversations, in the form that its targets read."""

import ast
import contextlib
import itertools
import pathlib
import pickle
import struct
import tempfile
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from telegrad._core.security.noise import KEY, CipherState, DecryptionFailed, RecordReader, RecordWriter
from telegrad._core.stores.raw_stores import FileStore
from telegrad._core.stores.sealed_store import KeyValueStore, SealedStore, Sealer
from telegrad._core.wire.messages import split, unpack_numbers
from telegrad._core.wire.packing import pack, unpack
from telegrad.errors import CannotDecode, ProtocolViolation, StoreUntrusted
from tests.cluster import KEYS
from tests.strangers.adversary import CUT, DELIVER, FLIP, JOIN, RAW, RENAME, Move, Network, honest
from tests.strangers.streams import SMALL, agree, samples, scratch_of

_SEALED_VALUE = "12"
_FEW = 100_000  # elements
_TENSORS = [
    [torch.ones(3)],
    [torch.ones(2, 3).t(), torch.zeros(2, dtype=torch.int8)],
    [torch.ones(4)[1:3], torch.ones(())],
    [torch.empty(0), torch.ones(2, requires_grad=True)],
    [torch.ones(3).to_sparse()],
    [torch.ones(1).expand(5), torch.ones(300)],
    [torch.ones(2, dtype=torch.complex64).conj()],
]
_MOVE = struct.Struct("<BBBBH")


def frames(data: bytes) -> None:
    """Read a stream of frames in pieces; the first bytes are the sizes of the pieces."""
    cuts, stream = [byte + 1 for byte in data[:3]], data[3:]
    if stream:
        with scratch_of(SMALL):
            agree(stream, cuts, SMALL)


def handshake(data: bytes) -> None:
    """Play the moves of an attacker, each given by a few bytes."""
    Network().play(Move(*fields) for fields in _MOVE.iter_unpack(data[: len(data) - len(data) % _MOVE.size]))


def records(data: bytes) -> None:
    """Read changed records; the first bytes are the sizes of the pieces and the changes of a valid stream."""
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
    """Return the content that a reader decrypts before its first error."""
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


def store(data: bytes) -> None:
    """Read an entry of a store or a file; the first byte says which one."""
    if not data:
        return
    kind, content = data[0], data[1:]
    if kind % 4 == 0:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            with contextlib.suppress(StoreUntrusted):
                found = FileStore(file.name)
                found.add("n", 1)
                found.compare_set("n", "", "1")
        return
    raw = dist.HashStore()
    board = KeyValueStore(SealedStore(raw, KEYS), "p")
    board.group = "g"
    raw.set("p/n", content.decode("utf-8", "replace"))
    if kind % 4 == 1:
        board.add_hint("n")
        assert board.hint("n") >= 0
    else:
        with contextlib.suppress(StoreUntrusted):
            assert board.read("n") in ("", _SEALED_VALUE)


def decoders(data: bytes) -> None:
    """Decode a description of tensors, given as text, and the numbers of a frame's body."""
    for read in (unpack_numbers, split):
        with contextlib.suppress(ProtocolViolation):
            read(data)
    try:
        described = ast.literal_eval(data.decode("utf-8", "replace").replace("\0", " "))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return
    with contextlib.suppress(CannotDecode):
        for tensor in unpack(pickle.dumps(described), [torch.zeros(64)]):
            if tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.numel() < _FEW:
                with contextlib.suppress(RuntimeError):  # torch may refuse, but not read outside
                    tensor.clone()  # reads all of its memory


TARGETS: dict[str, Callable[[bytes], None]] = {
    "frames": frames,
    "handshake": handshake,
    "records": records,
    "store": store,
    "decoders": decoders,
}


def beginnings(target: str) -> Iterator[bytes]:
    if target == "frames":
        for stream in samples():
            yield from (cuts + stream for cuts in (b"\0\0\0", b"\x1b\x05\x80", b"\xff\xff\xff"))
        return
    if target == "records":
        yield from (bytes([9, 99, 255, at, value, 0, 0, 0, 0]) + behind for at, value, behind in _TAMPERED)
        return
    if target == "store":
        sealed = Sealer(KEYS, "life").seal("g", "p/n", _SEALED_VALUE, 1)
        yield from (
            bytes([kind]) + text.encode() for kind in (1, 2) for text in ("", "7", "absent", sealed, sealed[:-1])
        )
        entry = b"\2\0\0\0/n\1\0\0\x001"
        yield from (b"\0" + content for content in (b"", entry, entry * 3, entry[:-1], b"\2\0\0\0-/n\0\0\0\0"))
        return
    if target == "decoders":
        yield from (repr(pickle.loads(pack(tensors)[0])).encode() for tensors in _TENSORS)
        return
    changed = [[*honest()[:6], Move(kind, 1, 5, 40, 1)] for kind in _CHANGES]
    for game in (honest(), honest() + honest(2, 0), honest(wanted=2), honest(key=1), *changed):
        yield b"".join(_MOVE.pack(*move) for move in game)


_TAMPERED = [(0, 0, b""), (0, 1, b""), (5, 128, b"x"), (90, 1, bytes(40)), (0, 0, bytes(4)), (0, 0, b"\x20\0\0\0" * 9)]
_CHANGES = (DELIVER, FLIP, CUT, JOIN, RENAME, RAW)


def write(target: str, folder: pathlib.Path) -> None:
    for number, data in enumerate(beginnings(target)):
        (folder / f"{target}-{number}").write_bytes(data)
