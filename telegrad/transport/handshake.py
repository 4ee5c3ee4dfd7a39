"""Two ends of a new connection prove to each other that they hold the group's key; nothing else is read before.

    initiator                                   acceptor
      | -- HELLO  version, nonce ----------------> |
      | <- CHALLENGE version, nonce -------------- |
      | -- PROOF  claim, whom, stream_id, mac ------> |      the mac covers all that was said, and the role
      | <- PROOF  claim, mac --------------------- |

A claim (who I am) is believed only with its mac. Fresh nonces from both sides make a recording worthless, the roles in
the macs a reflection. A refusal is a message too, so that both ends know why. Every message is a length of two bytes
and at most LONGEST bytes, so that a stranger can make this end keep no more than that; nothing is ever unpickled.

HELLO and CHALLENGE stay as they are in all versions: each end says the newest that it speaks, and both speak the older
of the two, unless one of them does not know that any more. All else may change with the version (docs/stability.md).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from typing import NamedTuple

from telegrad.errors import AuthenticationFailed, HandshakeError, PeerUnreachable, ProtocolViolation, VersionMismatch

MAGIC = b"TGRD"
LONGEST = 2048
NONCE = 32
MAC = 32

_OPENING = struct.Struct(f"<4sH{NONCE}s")
_HELLO, _CHALLENGE, _PROOF, _REFUSAL = b"H", b"C", b"P", b"R"
_REASONS: dict[str, tuple[type[HandshakeError | PeerUnreachable], str]] = {
    "version": (
        VersionMismatch,
        "it speaks no version of the protocol that is known here: install the same telegrad on all workers",
    ),
    "key": (
        AuthenticationFailed,
        "the keys differ: give all workers the same key (TELEGRAD_KEY, or key=... in the options)",
    ),
    "stranger": (ProtocolViolation, "it does not take this for a worker's connection"),
    "other": (PeerUnreachable, "another worker listens there now: the one that was wanted has ended or was restarted"),
}


class Spoken(NamedTuple):
    """The versions of the protocol that a worker speaks."""

    oldest: int
    newest: int


PROTOCOL = Spoken(7, 7)  # from the second one that is released on, two neighbours


class Claim(NamedTuple):
    """Who a worker says it is."""

    name: str
    id: int
    incarnation: str
    program: str
    map: tuple[tuple[str, str], ...] = ()  # from its devices to those of the worker to whom it says this


class StreamId(NamedTuple):
    """Which stream of which connection this is."""

    connection: str = ""
    lane: int = 0  # 0: the connection itself; a further stream for what the initiator sends, 1, or receives, -1


ITSELF = StreamId()


class _End:
    """What both ends share: cutting the stream into messages, and refusing."""

    def __init__(self, key: bytes, mine: Claim, nonce: bytes | None = None, spoken: Spoken = PROTOCOL) -> None:
        self.done = False
        self.peer: Claim | None = None
        self.version = 0  # the one that both speak, once they have greeted each other
        self.parting = b""  # after an error: worth sending before the connection is closed
        self._key = key
        self._mine = mine
        self._nonce = nonce or secrets.token_bytes(NONCE)
        self._spoken = spoken
        self._buffer = b""
        self._said = hashlib.sha256()  # everything that crossed, both ways

    @property
    def leftover(self) -> bytes:
        """Bytes that came behind the handshake: they are frames."""
        return self._buffer

    def receive(self, data: bytes) -> bytes:
        """Take in bytes; the bytes to send in answer.

        Raises:
            HandshakeError: the other end is not what it should be.
            PeerUnreachable: it is a worker of this group, but not the wanted one.
        """
        self._buffer += data
        answer = b""
        while not self.done and (message := self._next()) is not None:
            answer += self._take(message[:1], message[1:])
        return answer

    def _next(self) -> bytes | None:
        if len(self._buffer) < 2:
            return None
        size = int.from_bytes(self._buffer[:2], "little")
        if not 1 <= size <= LONGEST:
            raise self._refuse("stranger", "it sent what is no message of this protocol")
        if self._buffer[2:3] not in (self._awaits(), _REFUSAL, b""):
            raise self._refuse("stranger", "it sent what does not belong here")
        if len(self._buffer) < 2 + size:
            return None
        message, self._buffer = self._buffer[2 : 2 + size], self._buffer[2 + size :]
        if message[:1] == _REFUSAL:
            raise self._refused(message[1:])
        return message

    def _awaits(self) -> bytes:
        raise NotImplementedError

    def _take(self, kind: bytes, body: bytes) -> bytes:
        raise NotImplementedError

    def _say(self, kind: bytes, body: bytes) -> bytes:
        self._said.update(kind + body)
        return (1 + len(body)).to_bytes(2, "little") + kind + body

    def _opening(self) -> bytes:
        return _OPENING.pack(MAGIC, self._spoken.newest, self._nonce)

    def _open(self, kind: bytes, body: bytes) -> None:
        if len(body) != _OPENING.size or body[:4] != MAGIC:
            raise self._refuse("stranger", "it sent what is no greeting of this protocol")
        _, newest, _ = _OPENING.unpack(body)
        self.version = min(newest, self._spoken.newest)
        if self.version < self._spoken.oldest:
            raise self._refuse(
                "version", f"it speaks version {newest} of the protocol, this worker none before {self._spoken.oldest}"
            )
        self._said.update(kind + body)

    def _mac(self, role: bytes, fields: bytes) -> bytes:
        return hmac.new(self._key, b"telegrad " + role + self._said.digest() + fields, hashlib.sha256).digest()

    def _prove(self, role: bytes, fields: object) -> bytes:
        text = json.dumps(fields).encode()
        return self._say(_PROOF, self._mac(role, text) + text)

    def _check(self, role: bytes, body: bytes) -> tuple[Claim, list[object]]:
        """The claim that is proven, and what stands behind it."""
        mac, text = body[:MAC], body[MAC:]
        if not hmac.compare_digest(mac, self._mac(role, text)):
            raise self._refuse("key", _REASONS["key"][1])
        self._said.update(_PROOF + body)
        try:
            name, id_, incarnation, program, map_, *more = json.loads(text)
            devices = tuple((str(here), str(there)) for here, there in map_)
            return Claim(str(name), int(id_), str(incarnation), str(program), devices), more
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise self._refuse("stranger", "it holds the key, but what it claims is no claim") from None

    def _refuse(self, reason: str, why: str) -> HandshakeError | PeerUnreachable:
        text = reason.encode()
        self.parting = (1 + len(text)).to_bytes(2, "little") + _REFUSAL + text
        return _REASONS[reason][0](why)

    def _refused(self, reason: bytes) -> HandshakeError | PeerUnreachable:
        kind, why = _REASONS.get(reason.decode("ascii", "replace"), _REASONS["stranger"])
        return kind(f"the other end refused: {why}")


class Initiator(_End):
    """The end that connected, to reach the worker of this incarnation."""

    def __init__(
        self,
        key: bytes,
        mine: Claim,
        wanted: str,
        nonce: bytes | None = None,
        stream_id: StreamId = ITSELF,
        spoken: Spoken = PROTOCOL,
    ) -> None:
        super().__init__(key, mine, nonce, spoken)
        self._wanted = wanted
        self._stream_id = stream_id
        self._state = _CHALLENGE

    def start(self) -> bytes:
        """The first bytes to send."""
        return self._say(_HELLO, self._opening())

    def _awaits(self) -> bytes:
        return self._state

    def _take(self, kind: bytes, body: bytes) -> bytes:
        if kind == _CHALLENGE:
            self._open(kind, body)
            self._state = _PROOF
            return self._prove(b"initiator", [*self._mine, self._wanted, *self._stream_id])
        self.peer, _ = self._check(b"acceptor", body)
        self.done = True
        return b""


class Acceptor(_End):
    """The end that was connected to."""

    def __init__(self, key: bytes, mine: Claim, nonce: bytes | None = None, spoken: Spoken = PROTOCOL) -> None:
        super().__init__(key, mine, nonce, spoken)
        self.stream_id = ITSELF
        self._state = _HELLO

    def _awaits(self) -> bytes:
        return self._state

    def _take(self, kind: bytes, body: bytes) -> bytes:
        if kind == _HELLO:
            self._open(kind, body)
            self._state = _PROOF
            return self._say(_CHALLENGE, self._opening())
        claim, more = self._check(b"initiator", body)
        match more:
            case [str() as wanted, str() as connection, -1 | 0 | 1 as lane]:
                self.stream_id = StreamId(connection, lane)
            case _:
                raise self._refuse("stranger", "it holds the key, but does not say what it wants")
        if wanted != self._mine.incarnation:
            raise self._refuse("other", f"worker {claim.name!r} looks for a worker that is not here any more")
        self.peer = claim
        self.done = True
        return self._prove(b"acceptor", list(self._mine))
