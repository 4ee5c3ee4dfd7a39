"""Tests of the URLs of Redis servers, and of refused replies to INFO and CONFIG GET."""

from __future__ import annotations

import pytest

from telegrad.directories.redis_messages import DURABLE, Address, find_faults, parse, parse_info
from telegrad.errors import InvalidArgument

INFO = {"redis_version": "7.0.15", "redis_mode": "standalone", "role": "master", "maxmemory_policy": "noeviction"}


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://host", Address("host", 6379, 0, (), None)),
        ("redis://host:7000/", Address("host", 7000, 0, (), None)),
        ("redis://host/12", Address("host", 6379, 12, (), None)),
        ("redis://[::1]:7000/1", Address("::1", 7000, 1, (), None)),
        ("redis://:secret@host", Address("host", 6379, 0, ("secret",), None)),
        ("redis://me:se%2Fcr%40et@host:1", Address("host", 1, 0, ("me", "se/cr@et"), None)),
        ("redis://me:@host", Address("host", 6379, 0, ("me", ""), None)),  # a user that needs no password
        ("rediss://host", Address("host", 6379, 0, (), {})),
        ("rediss://host?ssl_ca_certs=/a/b.pem", Address("host", 6379, 0, (), {"ssl_ca_certs": "/a/b.pem"})),
    ],
)
def test_addresses_are_read(url: str, address: Address) -> None:
    assert parse(url) == address


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://:secret@host", "redis://"),
        ("redis://:secret@", "redis://"),
        ("redis://:secret@host:port", "redis://"),
        ("redis://:secret@host/name", "redis://"),
        ("redis://:secret@host/-1", "redis://"),
        ("redis://:secret@host/1#2", "redis://"),
        ("redis://user@host", "has a user but no password"),
        ("redis://:secret@host?ssl_ca_certs=a", "only with rediss://"),
        ("rediss://:secret@host?ssl_cert_reqs=none", "cannot have ssl_cert_reqs"),
        ("rediss://:secret@host?socket_timeout=1&db=3", "cannot have db, socket_timeout"),
    ],
)
def test_invalid_urls_are_refused_without_showing_passwords(url: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(url)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://host:6379/0", "redis://[::1]:7000/3", "rediss://me:secret@host:1/0"])
def test_an_address_is_shown_without_the_password(url: str) -> None:
    assert str(parse(url)) == url.replace("me:secret@", "")


def test_info_is_read() -> None:
    text = "# Server\r\nredis_version:7.0.15\r\nexecutable:/a:b\r\n\r\n# Replication\r\nrole:master\r\n"
    assert parse_info(text) == {"redis_version": "7.0.15", "executable": "/a:b", "role": "master"}


@pytest.mark.parametrize("version", ["6.2.0", "6.10.1", "7.0.15", "255.255.255"])
@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru", "volatile-ttl"])
def test_a_durable_server_has_no_faults(version: str, policy: str) -> None:
    assert find_faults({**INFO, "redis_version": version, "maxmemory_policy": policy}, DURABLE) == []


@pytest.mark.parametrize(
    ("info", "config", "says"),
    [
        ({"redis_version": "6.0.16"}, {}, "it is Redis 6.0.16: install 6.2 or newer"),
        ({"redis_version": "5.9"}, {}, "install 6.2 or newer"),
        ({"redis_mode": "cluster"}, {}, "use a standalone server"),
        ({"role": "slave", "master_host": "h", "master_port": "1"}, {}, "use the address of its master at h:1"),
        ({"maxmemory_policy": "allkeys-lru"}, {}, "set `maxmemory-policy noeviction`"),
        ({}, {"appendonly": "no"}, "(appendonly is no): set `appendonly yes` in redis.conf"),
        ({}, {"appendfsync": "everysec"}, "(appendfsync is everysec): set `appendfsync always` in"),
        ({}, {"no-appendfsync-on-rewrite": "yes"}, "set `no-appendfsync-on-rewrite no` in"),
    ],
)
def test_an_unfit_server_is_reported_with_a_remedy(info: dict[str, str], config: dict[str, str], says: str) -> None:
    (fault,) = find_faults({**INFO, **info}, {**DURABLE, **config})
    assert says in fault


def test_all_faults_are_reported_at_once() -> None:
    faults = find_faults({}, {})
    assert len(faults) == 3
    assert "appendonly is unknown, appendfsync is unknown, no-appendfsync-on-rewrite is unknown" in faults[2]
