"""Where members of dynamic groups are found on a host."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from telegrad.group import places
from telegrad.group.places import HAS_NAMES, somebody_stays_at, stay_at
from tests.other_user import NOBODY, become_nobody, is_root

PLACE = ("127.0.0.1", 1)


@pytest.mark.skipif(not HAS_NAMES, reason="there are no such sockets here")
def test_names_of_any_bytes_harm_nobody() -> None:
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(b"\0\xff\xfe")
        assert not somebody_stays_at(("127.0.0.1", 1))


@pytest.mark.skipif(not HAS_NAMES, reason="there are no such sockets here")
@pytest.mark.parametrize("tells_owners", [True, False])
def test_a_member_is_seen_until_it_leaves(tells_owners: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not tells_owners:
        monkeypatch.setattr(places, "_asked_names", refuse)
    sign = stay_at(PLACE, "life")
    assert sign is not None
    assert somebody_stays_at(PLACE)
    assert not somebody_stays_at(("127.0.0.1", 2))
    sign.close()
    assert not somebody_stays_at(PLACE)


def refuse() -> Iterator[tuple[bytes, int | None]]:
    raise OSError("an old kernel")


@pytest.mark.skipif(not HAS_NAMES or not is_root(), reason="only root can be another user")
def test_a_name_that_another_user_has_taken_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    name = places._name(PLACE)
    reading, writing = os.pipe()
    holding = os.fork()
    if not holding:
        try:
            become_nobody()
            squat = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            squat.bind(f"\0{name}squat")
            os.write(writing, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 1) == b"x"
        assert not somebody_stays_at(PLACE)
        assert [record for record in caplog.records if f"user {NOBODY} of this host" in record.getMessage()]
    finally:
        os.kill(holding, signal.SIGKILL)
        os.waitpid(holding, 0)
        os.close(reading)
        os.close(writing)
