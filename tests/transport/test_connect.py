"""A connection that the other end closes at some point of the handshake, as when a worker is killed."""

from __future__ import annotations

import random
import socket

import pytest

from telegrad.errors import HandshakeError, PeerUnreachable
from telegrad.keyring import Keyring, new_key
from telegrad.transport.connect import Target, connect
from telegrad.transport.handshake import Acceptor, Claim, StreamId
from tests.cluster import PATIENCE, in_threads

ME, OTHER = Claim("w0", 0, "life of w0", ""), Claim("w1", 1, "life of w1", "")


@pytest.mark.parametrize("seed", range(20))
def test_who_ends_the_connection_in_the_handshake_is_unreachable(seed: int) -> None:
    """It has died, or is about to: that is no other protocol."""
    keys, chance = Keyring([new_key()]), random.Random(seed)
    answers = chance.randrange(3)  # of three
    part = chance.randrange(10)  # bytes of the next one
    server = socket.create_server(("127.0.0.1", 0))
    target = Target("w1", OTHER.incarnation, "", server.getsockname(), StreamId(""))

    def die() -> None:
        with server, server.accept()[0] as sock:
            sock.settimeout(PATIENCE)
            end = Acceptor(keys, OTHER)
            for _ in range(answers):
                sock.sendall(end.receive(sock.recv(4096)))
            sock.sendall(end.receive(sock.recv(4096))[:part])

    def reach() -> None:
        with pytest.raises(PeerUnreachable, match=r"'w1' broke off the handshake .*the call has not run") as raised:
            connect(target, keys, ME, None, "tcp", PATIENCE, 0.0)
        assert not isinstance(raised.value, HandshakeError)

    in_threads(die, reach)
