"""Tests of etcd's addresses, answers, and lost data, without a server."""

import contextlib
import json
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from telegrad._core.stores.directory import DirectoryRefused, Entry, Event, Listing, Swap
from telegrad.directories import etcd, etcd_messages
from telegrad.directories.etcd_messages import (
    Continuity,
    EtcdMalformed,
    EtcdRefused,
    EtcdSettings,
    Header,
    ends_live_leases,
    parse_url,
)
from telegrad.errors import UsageError
from tests.directory.harness import altered


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("etcd://a:1", EtcdSettings((("a", 1),), "telegrad/")),
        ("etcd://a,b:7/", EtcdSettings((("a", 2379), ("b", 7)), "telegrad/")),
        ("etcd://[::1]:5,10.0.0.1:6/jobs/7/", EtcdSettings((("::1", 5), ("10.0.0.1", 6)), "jobs/7/")),
        ("etcd://a/x?ca=system", EtcdSettings((("a", 2379),), "x/", ca="system")),
        (
            "etcd://a/x?ca=/c&cert=/d&key=/e&user=u&password_file=/f%20g",
            EtcdSettings((("a", 2379),), "x/", "/c", "/d", "/e", "u", "/f g"),
        ),
    ],
)
def test_addresses_are_read(url: str, settings: EtcdSettings) -> None:
    assert parse_url(url) == settings


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://a:1", "has the form etcd://HOST:PORT"),
        ("etcd:///x", "has the form"),
        ("etcd://a#b", "has the form"),
        ("etcd://a?ca=1&ca=2", "has the form"),
        ("etcd://a:b", "'a:b' is not HOST:PORT"),
        ("etcd://a:0", "'a:0' is not HOST:PORT"),
        ("etcd://a:99999", "is not HOST:PORT"),
        ("etcd://a,,b", "'' is not HOST:PORT"),
        ("etcd://[::1:5", "form"),
        ("etcd://user:hidden@a", r"password_file=FILE"),
        ("etcd://a?password=hidden", "no option 'password'"),
        ("etcd://a?ca=", "is empty"),
        ("etcd://a?ca=x&cert=y", "ca, cert and key"),
        ("etcd://a?cert=x&key=y", "ca, cert and key"),
        ("etcd://a?user=x", "needs a name and a password file"),
    ],
)
def test_invalid_addresses_are_refused_without_showing_passwords(url: str, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        parse_url(url)
    assert "hidden" not in str(caught.value)


def test_unusable_files_are_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "bad").write_text("bad")
    (tmp_path / "bad").chmod(0o644)
    for query, text in (
        (f"ca={tmp_path}/none", "certificates for etcd cannot be used"),
        (f"ca={tmp_path}/bad", "certificates for etcd cannot be used"),
        (f"ca=system&cert={tmp_path}/bad&key={tmp_path}/bad", "certificates for etcd cannot be used.*chmod 600"),
        (f"user=u&password_file={tmp_path}/none", "password of etcd cannot be read"),
        (f"user=u&password_file={tmp_path}/bad", "chmod 600"),
    ):
        with pytest.raises(UsageError, match=text):
            etcd.connect(f"etcd://127.0.0.1?{query}")


def test_versions_of_etcd_that_end_live_leases() -> None:
    assert all(map(ends_live_leases, ["3.3.27", "3.4.0", "3.4.30", "3.5.0", "3.5.12", "3.5.0-rc.1"]))
    assert not any(map(ends_live_leases, ["3.4.31", "3.4.40", "3.5.13", "3.6.0", "3.10.1", "4.0.0", "", "main"]))


def test_revisions_that_go_back_are_noticed() -> None:
    seen = Continuity()
    assert not seen.check(Header(1, 7, 5, 2), 0, True)
    assert not seen.check(Header(1, 7, 3, 2), 5, False)  # a member that is behind may answer so
    assert not seen.check(Header(1, 7, 4, 2), 3, True)  # sent before the answer with 5 had come
    assert seen.revision == 5
    assert "from revision 5 to 4" in seen.check(Header(1, 7, 4, 2), 5, True)
    assert "from revision 5 to 4" in seen.check(Header(1, 7, 9, 2), 5, True)  # the error stays


def test_another_cluster_is_noticed() -> None:
    seen = Continuity()
    assert not seen.check(Header(10, 7, 5, 2), 0, True)
    assert not seen.check(Header(0, 0, 0, 0), 5, False)  # a message without a header
    assert "(a and b)" in seen.check(Header(11, 7, 6, 2), 5, True)


KEY_VALUE = {"key": "YQ==", "value": "dg==", "mod_revision": "7", "create_revision": "5", "lease": "2"}
HEADER = {"cluster_id": "1", "member_id": "2", "revision": "7", "raft_term": "3"}
ANSWERS: list[tuple[str, dict[str, Any], type | tuple[type, ...]]] = [
    ("header_of", {"header": HEADER}, Header),
    ("swap_of", {"succeeded": True, "responses": [{"response_range": {"kvs": [KEY_VALUE]}}]}, Swap),
    ("listing_of", {"header": HEADER, "kvs": [KEY_VALUE]}, Listing),
    ("events_of", {"events": [{"kv": KEY_VALUE}, {"type": "DELETE", "kv": KEY_VALUE}]}, list),
    ("ttl_of", {"TTL": "10"}, float),
    ("lease_of", {"ID": "7"}, int),
    ("token_of", {"token": "x"}, str),
    ("compacted_of", {"compact_revision": "7"}, int),
]
VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=5) | some.just("7" * 5000),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.sampled_from(sorted(KEY_VALUE)), inner),
    max_leaves=6,
)


@given(some.data())
def test_an_answer_of_any_shape_is_read_or_malformed(data: some.DataObject) -> None:
    name, answer, kind = data.draw(some.sampled_from(ANSWERS))
    read = getattr(etcd_messages, name)
    arguments = () if name in ("header_of", "ttl_of", "lease_of", "token_of", "compacted_of") else (b"",)
    assert isinstance(read(answer, *arguments), kind)
    status = data.draw(some.sampled_from([200, 200, 500]))
    with contextlib.suppress(EtcdMalformed, EtcdRefused, DirectoryRefused):
        content = etcd_messages.answer_of(status, json.dumps(altered(answer, data, VALUES)).encode())
        assert isinstance(read(content, *arguments), kind)


def test_an_error_of_any_shape_is_read() -> None:
    answer: dict[str, Any]
    for answer in ({"error": {"grpc_code": "x"}}, {"error": {"code": [], "message": 7}}, {"code": None, "error": []}):
        with pytest.raises(EtcdRefused):
            etcd_messages.answer_of(500, json.dumps(answer).encode())
    with pytest.raises(EtcdRefused):
        etcd_messages.answer_of(200, b"[" * 100_000)


def test_the_key_of_an_entry_that_cannot_be_read_is_named() -> None:
    with pytest.raises(EtcdMalformed, match="the key 'a'"):
        etcd_messages.listing_of({"kvs": [{**KEY_VALUE, "mod_revision": "x"}]}, b"")


def test_a_key_that_is_not_utf_8_is_listed() -> None:
    (entry,) = etcd_messages.listing_of({"kvs": [{**KEY_VALUE, "key": "/w=="}]}, b"").entries
    assert entry.key == "\\xff"


def test_requests() -> None:
    key, listing = "YS8=", {"key": "YS8=", "range_end": "YTA="}  # "a/" and "a0"
    assert etcd_messages.list_request(b"a/") == listing
    assert etcd_messages.confirm_request(b"a/") == {**listing, "count_only": True}
    assert etcd_messages.watch_request(b"a/", 7) == {"create_request": {**listing, "start_revision": "8"}}
    read = {"request_range": {"key": key}}
    compare = [{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": "7"}]
    put = {"request_put": {"key": key, "value": "Yg==", "lease": "3"}}
    assert etcd_messages.swap_request(b"a/", b"b", 7, 3) == {
        "compare": compare,
        "success": [put, read],
        "failure": [read],
    }
    delete = {"request_delete_range": {"key": key}}
    assert etcd_messages.swap_request(b"a/", None, 7, 0) == {"compare": compare, "success": [delete], "failure": [read]}


@pytest.mark.parametrize("status", [404, 400, 421])
def test_a_server_that_is_no_etcd_is_not_asked_again(status: int) -> None:
    with pytest.raises(DirectoryRefused, match="no JSON gateway" if status == 404 else "'not found'"):
        etcd_messages.answer_of(status, b"not found")
    with pytest.raises(EtcdRefused, match="502: 'bad gateway'"):
        etcd_messages.answer_of(502, b"bad gateway")


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_lease_of_no_time_is_malformed(seconds: str) -> None:
    with pytest.raises(EtcdMalformed):
        etcd_messages.ttl_of({"TTL": seconds})


def test_answers() -> None:
    entry = Entry("a", b"v", 7, 5, 2)
    found = {"response_range": {"kvs": [KEY_VALUE]}}
    assert etcd_messages.header_of({"header": HEADER}) == Header(1, 2, 7, 3)
    assert etcd_messages.swap_of({"succeeded": True, "responses": [{}, found]}, b"") == Swap(True, entry)
    assert etcd_messages.swap_of({"responses": [{}]}, b"") == Swap(False, None)
    changes = [{"kv": KEY_VALUE}, {"type": "DELETE", "kv": KEY_VALUE}]
    assert etcd_messages.events_of({"events": changes}, b"") == [Event(7, "a", entry), Event(7, "a", None)]
    bare = {"key": "YS9i", "mod_revision": 7, "create_revision": 5}  # etcd leaves out what is empty or 0
    assert etcd_messages.listing_of({"header": HEADER, "kvs": [bare]}, b"a/") == (7, (Entry("b", b"", 7, 5, 0),))
    assert etcd_messages.answer_of(200, b'{"result": {"ID": 1}}') == {"ID": 1}
    assert etcd_messages.answer_of(200, b'{"result": 1}') == {}


@pytest.mark.parametrize(
    ("status", "answer", "code", "text"),
    [
        (200, {"error": {"grpc_code": 9, "code": 4, "message": "no"}}, 9, "no"),
        (200, {"error": {"code": 4}}, 4, ""),
        (500, {"code": 4, "message": "no", "error": "other"}, 4, "no"),
        (500, {"error": "other"}, 2, "other"),
        (500, {}, 2, "status 500"),
    ],
)
def test_the_code_and_the_text_of_an_error(status: int, answer: dict[str, Any], code: int, text: str) -> None:
    with pytest.raises(EtcdRefused) as caught:
        etcd_messages.answer_of(status, json.dumps(answer).encode())
    assert (caught.value.code, str(caught.value)) == (code, text)
