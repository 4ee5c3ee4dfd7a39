"""Tests of the address that a worker publishes, and of the URLs that name the rendezvous of a group."""

import contextlib
import socket
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad import errors
from telegrad._core import sockets
from telegrad._core.sockets import (
    ADDRESS_VARIABLE,
    ELSEWHERE,
    host_identity,
    is_here,
    local_address_towards,
    own_address,
    split,
    spot_of,
)
from telegrad._core.stores.raw_stores import serve_tcp
from telegrad.errors import UsageError


@pytest.fixture(autouse=True)
def no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)


def names(monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    """Let the resolver know these names only, and numbers."""
    real = socket.getaddrinfo

    def resolve(host: str | bytes, *args: Any, **kwargs: Any) -> Any:
        host = host.decode() if isinstance(host, bytes) else host
        if host in known:
            host = known[host]
        elif any(letter in "ghijklmnopqrstuvwxyz" for letter in host):
            raise socket.gaierror(f"unknown: {host}")
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1"), ("127.0.0.9", None)]
)
def test_loopback_is_reached_from_loopback(host: str, own: str | None) -> None:
    assert local_address_towards(host) == (own or "127.0.0.1")


def test_a_store_host_that_cannot_be_resolved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch)
    with pytest.raises(errors.UsageError, match=r"'nowhere'.*MASTER_ADDR"):
        own_address(None, "nowhere")


@pytest.mark.parametrize(("route", "published"), [("10.1.2.3", "10.1.2.3"), (None, "127.0.0.1")])
def test_a_host_named_as_loopback_publishes_an_address_of_use_to_others(
    monkeypatch: pytest.MonkeyPatch, route: str | None, published: str
) -> None:
    names(monkeypatch, node0="127.0.1.1", localhost="127.0.0.1")
    real = sockets._source
    monkeypatch.setattr(sockets, "_source", lambda family, to: route if to[0] == ELSEWHERE else real(family, to))
    assert own_address(None, "node0") == published
    assert own_address(None, "localhost") == "127.0.0.1"


def test_without_a_store_host_the_host_name_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "myself")
    names(monkeypatch, myself="127.0.0.5")
    assert own_address(None, None) == "127.0.0.5"
    names(monkeypatch, myself=ELSEWHERE)  # a name that means another machine
    assert own_address(None, None) == "127.0.0.1"
    names(monkeypatch)
    assert own_address(None, None) == "127.0.0.1"


def test_the_option_wins_over_the_variable_and_both_over_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.3")
    assert own_address("127.0.0.2", "localhost") == "127.0.0.2"
    assert own_address(None, "localhost") == "127.0.0.3"


SEVERAL = ["0.0.0.0", "::", "0", "255.255.255.255", "127.255.255.255", "224.0.0.1", "239.255.255.250"]
NO_HOST = ["a" * 300, "\u00fc" * 300, "\ud800", "\udcff", "a\0b", "a..b", "ff02::1", "ff02::1%lo", "x" * 64]


@pytest.mark.parametrize("wanted", [ELSEWHERE, "2001:db8::1", *SEVERAL, *NO_HOST, "::ffff:224.0.0.1", "::ffff:0.0.0.0"])
def test_an_address_that_others_cannot_reach_here_is_refused(wanted: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        own_address(wanted, None)
    assert repr(wanted) in str(caught.value)
    assert ADDRESS_VARIABLE in str(caught.value)
    assert "it is not the address of a single host" in str(caught.value) or wanted not in SEVERAL


@pytest.mark.parametrize("wanted", ["127.0.0.1", "127.0.0.9", "::1", "::ffff:127.0.0.1"])
def test_each_address_of_this_host_is_taken(wanted: str) -> None:
    assert own_address(wanted, None) == wanted


@pytest.mark.parametrize("host", NO_HOST[:6])
def test_a_name_that_no_resolver_takes_is_no_host_of_a_store(host: str) -> None:
    with pytest.raises(errors.UsageError, match="cannot be resolved"):
        sockets.check_resolves(host)
    assert sockets.listening_address(host) in ("0.0.0.0", "::")


@pytest.mark.parametrize("host", ["224.0.0.1", "ff02::1", "255.255.255.255"])
def test_an_address_of_several_hosts_is_no_host_of_a_store(host: str) -> None:
    with pytest.raises(errors.UsageError, match=f"'{host}' is a multicast or broadcast address.*MASTER_ADDR"):
        sockets.check_resolves(host)


def test_a_link_local_address_needs_its_interface() -> None:
    with pytest.raises(errors.UsageError, match="write fe80::1%eth0"):
        sockets.check_resolves("fe80::1")
    sockets.check_resolves(f"fe80::1%{socket.if_indextoname(1)}")


def test_a_host_without_proc_has_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "open", Mock(side_effect=FileNotFoundError), raising=False)
    assert host_identity() == host_identity()
    assert socket.gethostname() in host_identity()


@pytest.mark.parametrize(("host", "is_told"), [("192.0.2.1", True), ("127.0.0.1", False), ("localhost", False)])
def test_a_store_that_listens_at_all_addresses_warns_of_it(
    caplog: pytest.LogCaptureFixture, host: str, is_told: bool
) -> None:
    store, _ = serve_tcp(host, 0)
    assert ("is not an address of this host" in caplog.text) == is_told
    del store


# URLs


URLS = st.lists(
    st.one_of(
        st.sampled_from(["tcp:", "env:", "file:", "//", "[", "]", "::1", ":", "@", ",", "?", "0", "\u2100", " "]),
        st.text(max_size=3),
    )
).map("".join)


@settings(max_examples=500, deadline=None)
@given(URLS)
def test_a_url_is_split_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        host, port = spot_of(split(f"tcp://{text}"))
        assert host
        assert 0 < port < 65536
    with contextlib.suppress(UsageError):
        split(text)


@pytest.mark.parametrize("url", ["tcp://[::1", "tcp://a\u2100b:80"])
def test_the_error_of_an_invalid_url_shows_the_url(url: str) -> None:
    with pytest.raises(UsageError, match=r"is not a URL .*write tcp://HOST:PORT"):
        spot_of(split(url))


def test_several_hosts_in_a_url_are_refused_with_an_alternative() -> None:
    with pytest.raises(UsageError, match=r"several hosts.*etcd://HOST:2379"):
        spot_of(split("tcp://a:1,b:2"))


def test_addresses_of_this_host_are_recognized() -> None:
    assert is_here("127.0.0.1")
    assert is_here("localhost")
    assert not is_here("192.0.2.1")
    assert not is_here("nowhere.invalid")
