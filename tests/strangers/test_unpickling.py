"""No byte of a stranger reaches an unpickler, nor the parser of frames or of claims."""

import json
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad._core.pickling import pickling
from telegrad._core.security.handshake import Acceptor, Hello, Initiator
from telegrad._core.security.keyring import Keyring
from telegrad._core.wire.messages import CALL, NOTICE, FrameReader, Message, encode
from telegrad._core.worker.current import Worker
from tests.cluster import agents
from tests.strangers.door import knock, new_member, say, wait_closed

KEY = "the key of the group"
OTHER = Keyring([b"another key"])
MARK = b"said by a stranger"
exploded: list[tuple[bytes, ...]] = []


def explode(*args: bytes) -> None:
    exploded.append(args)


class Bomb:
    """An object whose pickle runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return explode, (MARK,)


@pytest.fixture(scope="module")
def worker() -> Iterator[list[Worker]]:
    with agents(2, transport="tcp", key=KEY) as workers:
        yield workers


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return the names of the traps that received marked bytes; all parsers behind the handshake have a trap."""
    sprung = []

    def guard(owner: Any, name: str, said_in: Callable[..., Any] = lambda data, *_, **__: data) -> None:
        true = getattr(owner, name)

        def trap(*args: Any, **kwargs: Any) -> Any:
            if MARK in bytes(said_in(*args, **kwargs)):
                sprung.append(name)
            return true(*args, **kwargs)

        monkeypatch.setattr(owner, name, trap)

    guard(pickle, "loads")
    guard(pickle, "load", lambda file: file.getvalue())
    guard(pickle, "Unpickler", lambda file, **_: file.getvalue())
    guard(pickling, "_Unpickler", lambda file, **_: file.getvalue())
    guard(json, "loads", lambda text, **_: text if isinstance(text, bytes) else text.encode())
    guard(FrameReader, "advance", lambda reader, count, data=None: data or reader.buffer()[:count])
    exploded.clear()
    yield sprung
    exploded.clear()


def claim() -> Hello:
    return Hello(MARK.decode(), 0, "x", "")


def with_another_key(hello: bytes, challenge: bytes) -> bytes:
    end = Initiator(OTHER, claim(), "x", random=lambda _: hello[-32:])
    end.start()
    return end.receive(challenge)


BOMB = pickle.dumps(Bomb())
FRAMES = encode(Message(CALL, 1, body=BOMB)) + encode(Message(NOTICE, body=BOMB))
TOLD = [
    lambda *_: FRAMES,
    lambda *_: BOMB,
    lambda *_: (1 + len(BOMB)).to_bytes(2, "little") + b"R" + BOMB,
    lambda *_: (1 + len(BOMB)).to_bytes(2, "little") + b"1" + BOMB,
    lambda *_: (33 + len(BOMB)).to_bytes(2, "little") + b"1" + bytes(32) + BOMB + FRAMES,
    lambda hello, challenge: with_another_key(hello, challenge) + FRAMES,
    lambda hello, challenge: challenge + FRAMES,
    lambda hello, challenge: hello + FRAMES,
]
NAMES = ["frames", "pickle", "refusal", "short key", "key", "another key", "reflection", "twice hello"]


@pytest.mark.parametrize("greeted", [False, True], ids=["at once", "after a greeting"])
@pytest.mark.parametrize("tell", TOLD, ids=NAMES)
def test_no_bytes_of_a_stranger_are_parsed(
    worker: list[Worker], reached: list[Any], tell: Callable[..., Any], greeted: bool
) -> None:
    _, b = worker
    hello = Initiator(OTHER, claim(), "x").start()
    with knock(b) as sock:
        challenge = b""
        if greeted:
            sock.sendall(hello)
            challenge = sock.recv(4096)
        else:
            challenge = Acceptor(OTHER, claim()).receive(hello)
        say(sock, tell(hello, challenge))
        wait_closed(sock)
    assert (reached, exploded) == ([], [])


def test_a_replayed_handshake_of_a_member_is_refused(worker: list[Worker], reached: list[Any]) -> None:
    _, b = worker
    end = new_member(b)
    with knock(b) as sock:
        recording = [end.start()]
        while not end.done:
            sock.sendall(recording[-1])
            recording.append(end.receive(sock.recv(4096)))
    hello, first, claim, _ = recording
    for said in (hello + first + claim + FRAMES, hello + claim + FRAMES, first + claim + FRAMES, claim + FRAMES):
        with knock(b) as sock:
            say(sock, said)
            wait_closed(sock)
    assert (reached, exploded) == ([], [])


def test_the_traps_catch_the_bytes_of_members(worker: list[Worker], reached: list[Any]) -> None:
    a, _ = worker
    assert a.agent.call("w1", operator.concat, (MARK, b"!"), None) == MARK + b"!"
    assert {"advance", "loads"} <= {*reached}
    assert a.agent.call("w1", type, (Bomb(),), None) is type(None)
    assert exploded == [(MARK,)]
