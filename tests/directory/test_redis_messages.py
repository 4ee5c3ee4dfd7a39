"""Tests of the script's replies, which other programs may have changed, and of URLs and settings of Redis servers."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from telegrad._core.stores.directory import Entry, Event
from telegrad.directories.redis_messages import (
    DURABLE,
    Address,
    Changes,
    RedisMalformed,
    RedisReply,
    find_faults,
    is_of_malformed_keys,
    parse,
    parse_info,
    read_reply,
)
from telegrad.errors import InvalidArgument
from tests.directory.harness import altered

ENTRY = Entry("a", b"of a value\n", 7, 5, 2)
RECORD = b"7 5 2 of a value\n"
REPLIES = [
    ("attach", [b"done", 7, b"ab"], RedisReply(b"done", 7, b"ab")),
    ("grant", [b"done", 7, 3], RedisReply(b"done", 7, 3)),
    ("renew", [b"done", 7], RedisReply(b"done", 7)),
    ("renew", [b"lease lost", 7], RedisReply(b"lease lost", 7)),
    ("revoke", [b"done", 7], RedisReply(b"done", 7)),
    ("write", [b"done", 7, RECORD], RedisReply(b"done", 7, ENTRY)),
    ("write", [b"differs", 7, None], RedisReply(b"differs", 7)),
    ("delete", [b"done", 7, None], RedisReply(b"done", 7)),
    ("list", [b"done", 7, [[b"a", RECORD]]], RedisReply(b"done", 7, (ENTRY,))),
    ("list", [b"done", 7, [[b"\xff", RECORD]]], RedisReply(b"done", 7, (ENTRY._replace(key="\\xff"),))),
    (
        "watch",
        [b"done", 8, 8, [[7, b"a", RECORD], [8, b"a"]], -1],
        RedisReply(b"done", 8, Changes(8, [Event(7, "a", ENTRY), Event(8, "a", None)], -1)),
    ),
    ("watch", [b"compacted", 8], RedisReply(b"compacted", 8)),
]


@pytest.mark.parametrize(("operation", "raw", "reply"), REPLIES)
def test_replies_are_read(operation: str, raw: list[Any], reply: RedisReply) -> None:
    assert read_reply(operation, b"a", raw) == reply


RECORDS = some.sampled_from([RECORD, b"junk", b"1 1 1", b"999 x y z w", b"\xff", b"", b"9" * 5000 + b" 1 1 "])
VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | RECORDS | some.binary(max_size=8) | some.builds(ValueError),
    lambda inner: some.lists(inner, max_size=4),
    max_leaves=8,
)


CONTENTS: dict[str, tuple[type, ...]] = {
    "attach": (bytes,),
    "grant": (int,),
    "renew": (type(None),),
    "revoke": (type(None),),
    "write": (Entry, type(None)),
    "delete": (Entry, type(None)),
    "list": (tuple,),
    "watch": (Changes,),
}


@given(some.data())
def test_a_reply_of_any_shape_is_read_or_malformed(data: some.DataObject) -> None:
    operation, raw, _ = data.draw(some.sampled_from(REPLIES))
    reply = data.draw(VALUES | some.just(altered(raw, data, VALUES)))
    with contextlib.suppress(RedisMalformed):
        found = read_reply(operation, b"a", reply)
        assert type(found.revision) is int
        assert type(found.content) in CONTENTS[operation] or found.status in (b"reset", b"lease lost", b"compacted")


@pytest.mark.parametrize("record", [b"junk", b"1 1 1", b"999 x y z w", b"-1 1 1 ", b"1_0 1 1 ", b"", None, 5])
def test_a_damaged_entry_is_named(record: Any) -> None:
    for operation, reply in (("list", [[b"b", record]]), ("write", record or b"")):
        with pytest.raises(RedisMalformed) as caught:
            read_reply(operation, b"b", [b"done", 7, reply])
        assert (caught.value.key, caught.value.field) == ("entries", "b")


def test_changes_after_the_revision_of_the_group_are_malformed() -> None:
    with pytest.raises(RedisMalformed, match=r"^history "):
        read_reply("watch", b"", [b"done", 7, 8, [[8, b"a"]], -1])


@pytest.mark.parametrize(
    ("operation", "content", "key"),
    [
        ("attach", [7], "state"),
        ("attach", [], "state"),
        ("grant", [], "state"),
        ("grant", [b"3"], "state"),
        ("grant", [-3], "state"),
        ("renew", [], None),
        ("list", [], "order"),
        ("list", [b"a"], "order"),
        ("list", [[[b"a"]]], "order"),
        ("list", [[[b"a", RECORD]], 5], "order"),
        ("list", [[[5, RECORD]]], "order"),
        ("watch", [7, []], "history"),
        ("watch", [7, 7, -1], "history"),
        ("watch", [7, [], b""], "history"),
        ("watch", [b"7", [], -1], "history"),
        ("watch", [7, [[7]], -1], "history"),
        ("watch", [7, [[7, 5]], -1], "history"),
        ("watch", [7, [[b"7", b"a"]], -1], "history"),
        ("watch", [7, [7], -1], "history"),
        ("watch", [7, [[7, b"a", RECORD, 5]], -1], "history"),
        ("watch", [7, [[7, b"a", b"junk"]], -1], "history"),
        ("write", [RECORD, 5], "entries"),
    ],
)
def test_the_key_of_a_wrong_reply_is_named(operation: str, content: list[Any], key: str | None) -> None:
    if key is None:
        assert read_reply(operation, b"a", [b"done", 7, *content]).content is None
        return
    with pytest.raises(RedisMalformed) as caught:
        read_reply(operation, b"a", [b"done", 7, *content])
    assert caught.value.key == key
    for reply in (None, [b"done"], [b"done", None], [b"done", -1], [b"other", 7]):
        with pytest.raises(RedisMalformed, match=r"^state "):
            read_reply(operation, b"a", reply)


def test_errors_that_only_malformed_keys_cause() -> None:
    assert is_of_malformed_keys("WRONGTYPE Operation against a key")
    assert not is_of_malformed_keys("OOM command not allowed")


# URLs and settings


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
        ("redis://:secret@host:0", "redis://"),
        ("redis://:secret@host/name", "redis://"),
        ("redis://:secret@host/-1", "redis://"),
        ("redis://:secret@host/1#2", "redis://"),
        ("redis://user@host", "has a user but no password"),
        ("redis://:secret@host?ssl_ca_certs=a", "only with rediss://"),
        ("rediss://:secret@host?ssl_cert_reqs=none", "cannot have ssl_cert_reqs"),
        ("rediss://:secret@host?ssl_ca_certs=", "an empty ssl_ca_certs"),
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
