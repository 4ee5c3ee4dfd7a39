"""Where members of dynamic groups are found on a host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.errors import UsageError
from telegrad.group import places
from telegrad.group.places import HAS_NAMES, somebody_stays_at, split, spots, stay_at
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


URLS = st.lists(
    st.one_of(
        st.sampled_from(["tcp:", "env:", "file:", "//", "[", "]", "::1", ":", "@", ",", "?", "0", "\u2100", " "]),
        st.text(max_size=3),
    )
).map("".join)


@settings(max_examples=2_000, deadline=None)
@given(URLS)
def test_a_url_is_split_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        for host, port in spots(split(f"tcp://{text}")):
            assert host
            assert 0 < port < 65536
    with contextlib.suppress(UsageError):
        split(text)


@pytest.mark.parametrize("url", ["tcp://[::1", "tcp://a\u2100b:80", "tcp://[::1]:80,[::2:80"])
def test_the_error_of_a_url_that_is_none_shows_it(url: str) -> None:
    with pytest.raises(UsageError, match=r"is no URL .*write tcp://HOST:PORT"):
        spots(split(url))
