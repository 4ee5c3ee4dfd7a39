"""The handshake of a connection: both ends prove that they hold a key of the group, and agree on fresh keys.

    initiator                                      acceptor
      | -- HELLO     version, random bytes ---------> |      in clear
      | <- REPLY     version, random bytes ---------- |      in clear
      | -- FIRST     -> psk, e ---------------------> |      FIRST and SECOND: see `noise`
      | <- SECOND    <- e, ee: claim ---------------- |      the initiator checks that it is the wanted worker
      | -- CLAIM     claim, wanted, stream_id ------> |      a transport message; the acceptor trusts nothing before
      | <- ACCEPTED  -------------------------------- |      a transport message

The prologue of the Noise handshake contains HELLO, REPLY and the carrier of the connection; over TLS that includes the
certificates of both ends. So the handshake fails if an attacker in the middle changes a version, or relays it between
two TLS connections. The random bytes in the prologue also make a replay of FIRST useless.

Over TCP all further data is encrypted (`records`). Over TLS and Unix sockets it is not: TLS encrypts, and each end of a
Unix socket checks the user of the other.

A refusal is a message too: both ends learn the reason. It is not authenticated, because an attacker in the middle can
end a connection anyway. Each message has a length of two bytes and at most LONGEST bytes. This limits the memory that
an unauthenticated peer can use; nothing is unpickled.

HELLO and REPLY are the same in all versions. Each end sends the newest version that it supports. Both use the older of
the two, unless one end no longer supports that. All else may change with the version (docs/stability.md).

`Refusals` limits the log records about refused connections: a few lines a minute for each host, and a count of the
others.
"""

import json
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from telegrad._core.security.keyring import Keyring
from telegrad._core.security.noise import Ciphers, DecryptionFailed, NoiseHandshake
from telegrad._core.security.tls import ALERT_NO_TLS, HANDSHAKE
from telegrad.errors import AuthenticationFailed, HandshakeError, PeerUnreachable, ProtocolViolation, VersionMismatch

MAGIC = b"TGRD"
LONGEST = 2048
NONCE = 32
PURPOSE = b"connections"  # purpose in the derivation of keys
TCP, UNIX, TLS = b"tcp", b"unix", b"tls"  # carriers of a connection; TLS is followed by both certificates

UNKNOWN_KEY, OTHER_USER, ONE_SIDED_TLS = "key", "user", "tls"  # refusal reasons that other code checks
ONE_SIDED = "one of the two workers uses TLS and the other does not: give tls=... to all workers, or to none"

Random = Callable[[int], bytes]

_OPENING = struct.Struct(f"<4sH{NONCE}s")
_HELLO, _REPLY, _FIRST, _SECOND, _CLAIM, _ACCEPTED, _REFUSAL = b"H", b"C", b"1", b"2", b"3", b"4", b"R"
_REASONS: dict[str, tuple[type[HandshakeError | PeerUnreachable], str]] = {
    "version": (
        VersionMismatch,
        "it speaks no version of the protocol that this worker knows: install the same telegrad on all workers",
    ),
    UNKNOWN_KEY: (
        AuthenticationFailed,
        "the keys differ, or the handshake was altered on the way: give all workers the same key (TELEGRAD_KEY, or "
        "key=... in the options)",
    ),
    "altered": (AuthenticationFailed, "the handshake was altered on the way"),
    OTHER_USER: (
        AuthenticationFailed,
        "it belongs to another user of this host: workers of different users connect by TCP only",
    ),
    ONE_SIDED_TLS: (AuthenticationFailed, ONE_SIDED),
    "stranger": (ProtocolViolation, "it does not accept this as a worker's connection"),
    "other": (PeerUnreachable, "another worker listens there now: the wanted worker has ended or was restarted"),
}

MOST_LINES = 5  # records about refusals per host, in each PERIOD
PERIOD = 60.0  # seconds
MOST_HOSTS = 256  # hosts counted separately
OTHERS = "other hosts"


class VersionRange(NamedTuple):
    oldest: int
    newest: int


PROTOCOL = VersionRange(8, 8)  # two adjacent versions, from the second released one on


class Hello(NamedTuple):
    name: str
    id: int
    incarnation: str
    program: str
    map: tuple[tuple[str, str], ...] = ()  # device map to the worker that receives the claim


class StreamId(NamedTuple):
    """The connection, and the stream of it, that a socket belongs to."""

    connection: str = ""
    lane: int = 0  # 0: the connection itself; 1 or -1: a further stream for data that the initiator sends or receives


ITSELF = StreamId()
PROBE = StreamId("probe")  # the initiator only checks that both can connect to each other, and closes the connection


class _End:
    """The common part of both ends: splitting the stream into messages, and refusals."""

    def __init__(self, mine: Hello, carrier: bytes, random: Random, spoken: VersionRange, awaits: bytes) -> None:
        self._state = awaits  # the kind of the next message
        self.carrier = carrier  # must be final when the first message is received
        self.done = False
        self.peer: Hello | None = None
        self.ciphers: Ciphers | None = None  # set when done
        self.version = 0  # the common version, set after HELLO and REPLY
        self.refusal = ""  # the reason given by the peer, if it refused
        self.last_bytes = b""  # after an error: data to send before closing the connection
        self._mine = mine
        self._random = random
        self._spoken = spoken
        self.leftover = b""  # received bytes that are not processed; when done, those after the handshake
        self._prologue = b"telegrad"
        self._ciphers: Ciphers | None = None

    def receive(self, data: bytes) -> bytes:
        """Process received bytes; return the bytes to send. Raise HandshakeError if the peer does not follow the
        protocol, or cannot be authenticated, and PeerUnreachable if it is a worker of this group, but not the wanted
        one."""
        self.leftover += data
        answer = b""
        while not self.done and (message := self._next()) is not None:
            try:
                answer += self._take(message[:1], message[1:])
            except DecryptionFailed:
                raise self._refuse("altered", _REASONS["altered"][1]) from None
        return answer

    def _next(self) -> bytes | None:
        if len(self.leftover) < 2:
            return None
        size = int.from_bytes(self.leftover[:2], "little")
        if not 1 <= size <= LONGEST:
            raise self._refuse("stranger", "it sent an invalid message")
        # A TLS client greets with the bytes 16 03 01. Here they read as a valid length, 790, and a kind that does not
        # exist.
        if self.leftover[:3] == HANDSHAKE + b"\x01":
            self.last_bytes = ALERT_NO_TLS
            raise AuthenticationFailed(ONE_SIDED)
        # This is checked before the rest of the message has arrived, so that another kind of program is refused at
        # once. In each state one kind of message is allowed, so messages can be neither repeated nor reordered.
        if self.leftover[2:3] not in (self._state, _REFUSAL, b""):
            raise self._refuse("stranger", "it sent an unexpected message")
        if len(self.leftover) < 2 + size:
            return None
        message, self.leftover = self.leftover[2 : 2 + size], self.leftover[2 + size :]
        if message[:1] == _REFUSAL:
            raise self._refused(message[1:])
        return message

    def _take(self, kind: bytes, body: bytes) -> bytes:
        raise NotImplementedError

    def _say(self, kind: bytes, body: bytes) -> bytes:
        size = len(kind) + len(body)
        if size > LONGEST:
            raise HandshakeError(
                f"this worker's description of itself has {size} bytes, of at most {LONGEST}: its name or a device map "
                "is too long"
            )
        return size.to_bytes(2, "little") + kind + body

    def _greet(self, kind: bytes) -> bytes:
        opening = _OPENING.pack(MAGIC, self._spoken.newest, self._random(NONCE))
        self._prologue += kind + opening
        return self._say(kind, opening)

    def _open(self, kind: bytes, body: bytes) -> None:
        if len(body) != _OPENING.size or body[:4] != MAGIC:
            raise self._refuse("stranger", "it sent an invalid greeting")
        _, newest, _ = _OPENING.unpack(body)
        # Both ends compute the same minimum. An attacker who lowers a version in transit changes the prologue, and so
        # makes the Noise handshake fail.
        self.version = min(newest, self._spoken.newest)
        if self.version < self._spoken.oldest:
            raise self._refuse(
                "version",
                f"it speaks version {newest} of the protocol, but this worker needs at least {self._spoken.oldest}",
            )
        self._prologue += kind + body

    def _read_claim(self, text: bytes) -> tuple[Hello, list[object]]:
        """Return the authenticated claim, and the fields after it."""
        try:
            name, id_, incarnation, program, map_, *more = json.loads(text)
            devices = tuple((str(here), str(there)) for here, there in map_)
            return Hello(str(name), int(id_), str(incarnation), str(program), devices), more
        # The sender holds the key, but may still be faulty. JSON can be nested too deeply (RecursionError), or have a
        # number such as 1e999, which is infinite and no int (OverflowError).
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise self._refuse("stranger", "it holds the key, but sent an invalid claim") from None

    def _refuse(self, reason: str, why: str) -> HandshakeError | PeerUnreachable:
        self.last_bytes = refusal(reason)
        return _REASONS[reason][0](why)

    def _refused(self, reason: bytes) -> HandshakeError | PeerUnreachable:
        text = reason.decode("ascii", "replace")
        self.refusal = text if text in _REASONS else "stranger"
        kind, why = _REASONS[self.refusal]
        return kind(f"the other end refused: {why}")


class Initiator(_End):
    """The end that connected, to reach the worker of incarnation `wanted`."""

    def __init__(
        self,
        keys: Keyring,
        mine: Hello,
        wanted: str,
        carrier: bytes = TCP,
        stream_id: StreamId = ITSELF,
        attempt: int = 0,
        random: Random = secrets.token_bytes,
        spoken: VersionRange = PROTOCOL,
    ) -> None:
        """`attempt` is the index of the key to use; the acceptor has refused the keys before it."""
        super().__init__(mine, carrier, random, spoken, _REPLY)
        known = keys.derive(PURPOSE)
        self._key = known[min(attempt, len(known) - 1)]
        self._has_more = attempt + 1 < len(known)
        self._wanted = wanted
        self._stream_id = stream_id
        self._noise: NoiseHandshake | None = None
        self._acceptor: Hello | None = None  # claim of the acceptor until it has accepted

    @property
    def has_other_key(self) -> bool:
        """Return True if another connection with the next key should be tried after a refusal."""
        # The refusal is not authenticated. An attacker who forges it only makes this end authenticate with the other
        # key of its ring, and tries no third one: attempts go through the ring once.
        return self._has_more and self.refusal == UNKNOWN_KEY

    def start(self) -> bytes:
        return self._greet(_HELLO)

    def _take(self, kind: bytes, body: bytes) -> bytes:
        if kind == _REPLY:
            self._open(kind, body)
            self._noise = NoiseHandshake(self._key, self._prologue + self.carrier, self._random)
            self._state = _SECOND
            return self._say(_FIRST, self._noise.write_first())
        if kind == _SECOND:
            assert self._noise is not None
            text, self._ciphers = self._noise.read_second(body)
            peer, _ = self._read_claim(text)
            # The address may have been given to another worker since. This end stops before it has sent its own claim.
            if peer.incarnation != self._wanted:
                raise self._refuse("other", _REASONS["other"][1])
            self._acceptor = peer
            self._state = _ACCEPTED
            fields = [*self._mine, self._wanted, *self._stream_id]
            return self._say(_CLAIM, self._ciphers.sending.encrypt(json.dumps(fields).encode()))
        # Only now is the peer known. An acceptor that has proved its identity may still refuse this worker.
        assert self._ciphers is not None
        self._ciphers.receiving.decrypt(body)
        self.peer = self._acceptor
        self.ciphers, self.done = self._ciphers, True
        return b""


class Acceptor(_End):
    def __init__(
        self,
        keys: Keyring,
        mine: Hello,
        carrier: bytes = TCP,
        random: Random = secrets.token_bytes,
        spoken: VersionRange = PROTOCOL,
    ) -> None:
        super().__init__(mine, carrier, random, spoken, _HELLO)
        self._keys = keys
        self.stream_id = ITSELF

    def _take(self, kind: bytes, body: bytes) -> bytes:
        if kind == _HELLO:
            self._open(kind, body)
            self._state = _FIRST
            return self._greet(_REPLY)
        if kind == _FIRST:
            self._state = _CLAIM
            answer, self._ciphers = self._meet(body).write_second(json.dumps(list(self._mine)).encode())
            return self._say(_SECOND, answer)
        assert self._ciphers is not None
        self._hear(self._ciphers.receiving.decrypt(body))
        accepted = self._say(_ACCEPTED, self._ciphers.sending.encrypt(b""))
        self.ciphers, self.done = self._ciphers, True
        return accepted

    def refuse_without_tls(self) -> HandshakeError | PeerUnreachable:
        """Return the error for a peer that does not use TLS, while this end does."""
        return self._refuse(ONE_SIDED_TLS, ONE_SIDED)

    def _meet(self, first: bytes) -> NoiseHandshake:
        """Find the key that the initiator used."""
        # FIRST does not say which key it was made with. A key fits if the tag of the empty payload verifies. Each
        # attempt needs a fresh state, because reading the message changes it.
        for key in self._keys.derive(PURPOSE):
            noise = NoiseHandshake(key, self._prologue + self.carrier, self._random)
            try:
                noise.read_first(first)
            except DecryptionFailed:
                continue
            return noise
        raise self._refuse(UNKNOWN_KEY, _REASONS[UNKNOWN_KEY][1])

    def _hear(self, text: bytes) -> None:
        """Process the initiator's claim, and check that it wants this worker."""
        claim, more = self._read_claim(text)
        match more:
            case [str() as wanted, str() as connection, -1 | 0 | 1 as lane]:
                self.stream_id = StreamId(connection, lane)
            case _:
                raise self._refuse("stranger", "it holds the key, but sent an incomplete claim")
        if wanted != self._mine.incarnation:
            raise self._refuse("other", f"worker {claim.name!r} looks for a worker that is no longer here")
        self.peer = claim


def is_hello(data: bytes) -> bool:
    """Return True if the data begins like a worker's connection without TLS."""
    return data[2:7] == _HELLO + MAGIC


def refusal(reason: str) -> bytes:
    """Return the message that gives the peer the reason of its refusal."""
    text = reason.encode()
    return (1 + len(text)).to_bytes(2, "little") + _REFUSAL + text


def host_of(origin: str) -> str:
    """Return the host of an origin, `host:port`, or the origin itself."""
    return origin.rpartition(":")[0] or origin


class Refusals:
    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # begin of the period of a host
        self._count: Counter[str] = Counter()  # refusals in the period

    def should_log(self, host: str, now: float) -> bool:
        """Count a refused connection of a host; return True if it should be logged."""
        # Anyone may connect, so the memory for hosts has a limit.
        if host not in self._since and len(self._since) >= MOST_HOSTS:
            host = OTHERS
        self._since.setdefault(host, now)
        self._count[host] += 1
        return self._count[host] <= MOST_LINES

    def left_out(self, now: float) -> list[tuple[str, int]]:
        """End the periods that are over; return the hosts with refusals that were not logged, and their number."""
        over = [host for host, since in self._since.items() if now - since >= PERIOD]
        counts = [(host, self._count.pop(host)) for host in over]
        for host in over:
            del self._since[host]
        return [(host, count - MOST_LINES) for host, count in counts if count > MOST_LINES]


def to_give_way(origins: Iterable[str]) -> int:
    """Return the index of the oldest connection of the host with the most, given the origins of all in order."""
    # The oldest of all would let one host that opens connections without pause displace those of other hosts. This way
    # it displaces its own.
    hosts: Sequence[str] = [host_of(origin) for origin in origins]
    most = Counter(hosts).most_common(1)[0][0]
    return hosts.index(most)
