"""How TCP connections are set up: when the kernel sends lost packets again."""

from __future__ import annotations

import socket
import sys

import pytest

from telegrad._core.sockets import tune_tcp

LINEAR, LONGEST = 16, 44  # TCP_THIN_LINEAR_TIMEOUTS; TCP_RTO_MAX_MS, since Linux 6.15


def setting(sock: socket.socket, number: int) -> int | None:
    """Return the setting, None where this kernel has no such option."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, number)
    except OSError:
        return None


@pytest.mark.skipif(sys.platform != "linux", reason="options of Linux")
@pytest.mark.parametrize("silence", [0.0, 10.0])
def test_what_is_lost_is_sent_again_soon(silence: float) -> None:
    with socket.socket() as sock:
        has_longest = setting(sock, LONGEST) is not None
        tune_tcp(sock, silence)
        assert setting(sock, LINEAR) == 1
        assert setting(sock, LONGEST) == (1000 if has_longest else None)
