"""Where members of dynamic groups are found on a host."""

from __future__ import annotations

import socket

import pytest

from telegrad.group.places import HAS_NAMES, somebody_stays_at


@pytest.mark.skipif(not HAS_NAMES, reason="there are no such sockets here")
def test_names_of_any_bytes_harm_nobody() -> None:
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(b"\0\xff\xfe")
        assert not somebody_stays_at(("127.0.0.1", 1))
