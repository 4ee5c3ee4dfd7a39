"""A network that an attacker controls: the attacker reads all messages, and decides what each end receives.

Moves are plain numbers taken modulo the number of choices, so any numbers are valid moves: hypothesis and the fuzzer
use the same ones. The invariant is agreement: an end that is done has talked with one other end, which holds the same
key, has the claimed identity, and has sent each byte that was received.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from telegrad._core.security.handshake import LONGEST, Acceptor, Hello, Initiator
from telegrad._core.security.keyring import Keyring
from telegrad.errors import HandshakeError, PeerUnreachable

NAMED = (HandshakeError, PeerUnreachable)
MOST_ENDS = 8
MEMBERS = [Hello(name, id_, f"incarnation of {name}", "") for id_, name in enumerate("abc")]
KEYS = [Keyring([b"the key of the group"]), Keyring([b"the key of a stranger"])]

INITIATE, ACCEPT, DELIVER, FLIP, CUT, JOIN, RENAME, RAW = range(8)


class Move(NamedTuple):
    """A move of the attacker: the receiving end, one of the messages seen so far, and its change."""

    kind: int
    end: int = 0
    message: int = 0
    at: int = 0
    value: int = 0


class Party:
    """An end of a handshake, with the bytes that it has sent and received."""

    def __init__(self, end: Initiator | Acceptor, claim: Hello, key: Keyring, wanted: Hello | None = None) -> None:
        self.end, self.claim, self.key, self.wanted = end, claim, key, wanted
        self.said, self.heard = b"", b""
        self.grounds = b""  # the accepted bytes at the time of its last message
        self.failed = False

    @property
    def understood(self) -> bytes:
        """Return the received bytes, without those behind the handshake."""
        return self.heard[: len(self.heard) - len(self.end.leftover)]


class Network:
    """All ends, and every message that was sent."""

    def __init__(self) -> None:
        self.parties: list[Party] = []
        self.messages: list[bytes] = [b""]
        self._random = itertools.count(1)

    def play(self, moves: Iterable[Move]) -> None:
        for move in moves:
            self._make(move)
        self.check()

    def _make(self, move: Move) -> None:
        kind = move.kind % 8
        if kind in (INITIATE, ACCEPT):
            if len(self.parties) < MOST_ENDS:
                self._begin(kind, move)
            return
        message = self.messages[move.message % len(self.messages)]
        if self.parties:
            self.deliver(self.parties[move.end % len(self.parties)], self._changed(kind, message, move))

    def _begin(self, kind: int, move: Move) -> None:
        me = MEMBERS[move.end % len(MEMBERS)]
        wanted = MEMBERS[move.message % len(MEMBERS)]
        key = KEYS[move.value % len(KEYS)]

        def random(size: int) -> bytes:
            return next(self._random).to_bytes(size, "little")

        if kind == ACCEPT:
            self.parties.append(Party(Acceptor(key, me, random=random), me, key))
            return
        end = Initiator(key, me, wanted.incarnation, random=random)
        self.parties.append(Party(end, me, key, wanted))
        self._overhear(self.parties[-1], end.start())

    def _changed(self, kind: int, message: bytes, move: Move) -> bytes:
        at = move.at % (len(message) + 1)
        if kind == FLIP:
            return (
                message[:at] + bytes(byte ^ (move.value % 255 + 1) for byte in message[at : at + 1]) + message[at + 1 :]
            )
        if kind == CUT:
            return message[:at] if move.value % 2 else message[at:]
        if kind == JOIN:
            return message + self.messages[move.value % len(self.messages)]
        if kind == RENAME:  # claims to be another step of the handshake
            return message[:2] + b"HC1234R"[move.value % 7 :][:1] + message[3:]
        if kind == RAW:
            return move.value.to_bytes(8, "little")[: move.at % 9]
        return message

    def deliver(self, party: Party, data: bytes) -> None:
        """Deliver bytes as a driver does: nothing after an error or after the end of the handshake."""
        if party.failed or party.end.done:
            return
        party.heard += data
        try:
            self._overhear(party, party.end.receive(data))
        except NAMED:
            party.failed = True
            self.messages.append(party.end.last_bytes)
        assert len(party.end.leftover) <= 2 + LONGEST + len(data)

    def _overhear(self, party: Party, said: bytes) -> None:
        if said:
            party.said += said
            party.grounds = party.understood
            self.messages.append(said)

    def check(self) -> None:
        """Assert that each end that is done agrees on everything with exactly one other end."""
        partners = [self._partner(party) for party in self.parties if party.end.done]
        assert len(set(map(id, partners))) == len(partners), "two ends talked with the same one"

    def _partner(self, party: Party) -> Party:
        for other in self.parties:
            if (
                type(other.end) is not type(party.end)
                and other.key == party.key
                and other.claim == party.end.peer
                and other.wanted in (None, party.claim)
                and party.wanted in (None, other.claim)
                and other.said == party.understood
                and party.said.startswith(other.grounds)
            ):
                return other
        raise AssertionError(f"{party.claim} takes {party.end.peer} for authentic, who did not say this")

    @property
    def done(self) -> int:
        return sum(party.end.done for party in self.parties)


def honest(initiator: int = 0, acceptor: int = 1, *, wanted: int | None = None, key: int = 0) -> list[Move]:
    """Return moves without changes: an end calls another, or reaches one that it did not want."""
    return [
        Move(INITIATE, initiator, acceptor if wanted is None else wanted, 0, key),
        Move(ACCEPT, acceptor),
        *(Move(DELIVER, message % 2, message) for message in range(1, 7)),
    ]
