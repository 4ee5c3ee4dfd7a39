"""The URLs that name where a group meets."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad._core.stores.address import is_here, split, spot_of
from telegrad.errors import UsageError

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
        host, port = spot_of(split(f"tcp://{text}"))
        assert host
        assert 0 < port < 65536
    with contextlib.suppress(UsageError):
        split(text)


@pytest.mark.parametrize("url", ["tcp://[::1", "tcp://a\u2100b:80"])
def test_the_error_of_a_url_that_is_none_shows_it(url: str) -> None:
    with pytest.raises(UsageError, match=r"is not a URL .*write tcp://HOST:PORT"):
        spot_of(split(url))


@pytest.mark.parametrize("url", ["tcp://a", "tcp://:80", "tcp://a:0", "tcp://a:99999", "tcp://a:x"])
def test_a_url_without_host_and_port_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="names no host and port"):
        spot_of(split(url))


def test_several_places_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(UsageError, match=r"several hosts.*etcd://HOST:2379"):
        spot_of(split("tcp://a:1,b:2"))


def test_which_addresses_are_this_hosts() -> None:
    assert is_here("127.0.0.1")
    assert is_here("localhost")
    assert not is_here("192.0.2.1")
    assert not is_here("nowhere.invalid")
