"""Build requests to etcd's JSON gateway and parse its responses. No I/O, no clock.

The gateway writes 64-bit numbers as strings and bytes in base64, and omits fields that are zero.
"""

import base64
import contextlib
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from telegrad.errors import UsageError
from telegrad.ext.host import bracketed
from telegrad.ext.joining import DirectoryRefused, Entry, Event, Listing, Swap

FORM = "etcd://HOST:PORT[,HOST:PORT...][/PREFIX][?ca=FILE][&cert=FILE&key=FILE][&user=NAME&password_file=FILE]"
OPTIONS = {"ca", "cert", "key", "user", "password_file"}
DEFAULT_PORT = 2379
DEFAULT_PREFIX = "telegrad"

# gRPC status codes
NOT_FOUND, RESOURCE_EXHAUSTED, UNAUTHENTICATED = 5, 8, 16
# Cancelled, unknown, deadline, aborted, internal, unavailable: transient, such as during an election.
PASSING = {1, 2, 4, 10, 13, 14}

Json = dict[str, Any]


class EtcdSettings(NamedTuple):
    endpoints: tuple[tuple[str, int], ...]
    prefix: str  # of all keys of the group, ending with a slash
    ca: str = ""  # a certificate file, "system" for the host's certificates, or "" for no TLS
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""


class Header(NamedTuple):
    """The part of each response that describes the member that sent it."""

    cluster: int
    member: int  # its id: an endpoint may be a load balancer in front of several members
    revision: int
    term: int  # that of the last entry of the Raft log that the member has applied


class EtcdRefused(Exception):
    """etcd answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class EtcdMalformed(Exception):
    """A response, or an entry in one, does not have the form that etcd uses."""


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    """Decorate a function that parses responses: it raises EtcdMalformed for those of another form."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise EtcdMalformed(f"{type(error).__name__}: {error}") from None


def parse_url(url: str) -> EtcdSettings:
    """Parse a URL; raise UsageError if the URL does not have the required form."""
    try:
        parts = urlsplit(url)
    except ValueError:  # an unbalanced bracket
        raise UsageError(f"the address of etcd has the form {FORM}") from None
    given = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(given)
    if parts.scheme != "etcd" or not parts.netloc or parts.fragment or len(options) != len(given):
        raise UsageError(f"the address of etcd has the form {FORM}")
    if "@" in parts.netloc:  # URLs appear in logs and process lists; the error message does not repeat it either
        raise UsageError(f"the address of etcd must not contain a password. Write it to a file: {FORM}")
    if unknown := sorted(options.keys() - OPTIONS):
        raise UsageError(f"the address of etcd has no option {unknown[0]!r}: {FORM}")
    if any(not value for value in options.values()):
        raise UsageError(f"an option in the address of etcd is empty: {FORM}")
    if ("cert" in options) != ("key" in options) or ("cert" in options and "ca" not in options):
        raise UsageError("a certificate for etcd needs ca, cert and key: ?ca=FILE&cert=FILE&key=FILE")
    if ("user" in options) != ("password_file" in options):
        raise UsageError("a user of etcd needs a name and a password file: ?user=NAME&password_file=FILE")
    endpoints = tuple(_endpoint(text) for text in parts.netloc.split(","))
    return EtcdSettings(endpoints, (parts.path.strip("/") or DEFAULT_PREFIX) + "/", **options)


def _endpoint(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port == 0:
        raise UsageError(f"{text!r} is not HOST:PORT in the address of etcd, which has the form {FORM}")
    return host, port or DEFAULT_PORT


def swap_request(key: bytes, value: bytes | None, expected: int, lease: int) -> Json:
    """Return a compare-and-set as one transaction, whose last response is the key's state after it."""
    name = _packed(key)
    read = {"request_range": {"key": name}}
    change: list[Json] = [{"request_delete_range": {"key": name}}]
    if value is not None:
        change = [{"request_put": {"key": name, "value": _packed(value), "lease": str(lease)}}, read]
    # etcd compares the revision of a key that does not exist as 0, which is ABSENT. So one comparison serves for
    # creating, changing and deleting.
    compare = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(expected)}
    return {"compare": [compare], "success": change, "failure": [read]}


def confirm_request(prefix: bytes) -> Json:
    """Return a read without entries, which only a member that follows a leader with a majority can answer."""
    return {**list_request(prefix), "count_only": True}


def watch_request(prefix: bytes, since: int) -> Json:
    return {"create_request": {**list_request(prefix), "start_revision": str(since + 1)}}


def list_request(prefix: bytes) -> Json:
    end = prefix[:-1] + bytes([prefix[-1] + 1])  # the last byte is never 255: prefixes are UTF-8
    return {"key": _packed(prefix), "range_end": _packed(end)}


@_checked()
def header_of(answer: Json) -> Header:
    header = answer.get("header", {})
    return Header(*(int(header.get(name, 0)) for name in ("cluster_id", "member_id", "revision", "raft_term")))


@_checked()
def swap_of(answer: Json, prefix: bytes) -> Swap:
    # After a deletion the last response is not a read, and there is no entry.
    found = answer["responses"][-1].get("response_range", {}).get("kvs", ())
    return Swap(bool(answer.get("succeeded", False)), _entry(found[0], prefix) if found else None)


@_checked()
def listing_of(answer: Json, prefix: bytes) -> Listing:
    return Listing(header_of(answer).revision, tuple(_entry(each, prefix) for each in answer.get("kvs", ())))


@_checked()
def events_of(answer: Json, prefix: bytes) -> list[Event]:
    return [_event(each, prefix) for each in answer.get("events", ())]


@_checked()
def ttl_of(answer: Json) -> float:
    """Return the TTL of a lease in seconds; 0 if the lease has ended."""
    seconds = float(answer.get("TTL", 0))
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"a lease of {seconds} s")
    return seconds


@_checked()
def lease_of(answer: Json) -> int:
    return int(answer["ID"])


@_checked()
def token_of(answer: Json) -> str:
    return str(answer["token"])


@_checked()
def compacted_of(message: Json) -> int:
    """Return the revision up to which etcd was compacted, if that ended a watch; else 0."""
    return int(message.get("compact_revision", 0))


def _event(event: Json, prefix: bytes) -> Event:
    if event.get("type") == "DELETE":
        return Event(int(event["kv"]["mod_revision"]), _name(event["kv"], prefix), None)
    entry = _entry(event["kv"], prefix)
    return Event(entry.revision, entry.key, entry)


def _entry(found: Json, prefix: bytes) -> Entry:
    name = _name(found, prefix)
    try:
        return Entry(
            name,
            base64.b64decode(found.get("value", "")),
            int(found["mod_revision"]),
            int(found["create_revision"]),
            int(found.get("lease", 0)),
        )
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the key {name!r}: {error}") from None


def _name(found: Json, prefix: bytes) -> str:
    # Another program wrote a key that is not UTF-8. It has no seal, so readers skip it.
    return base64.b64decode(found["key"]).removeprefix(prefix).decode("utf-8", "backslashreplace")


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def answer_of(status: int, body: bytes) -> Json:
    """Parse a response, or a line of a stream; raise EtcdRefused for an error, DirectoryRefused for another server."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise _misplaced(status, body) from None
    if not isinstance(answer, dict):
        raise _misplaced(status, body)
    error = answer.get("error")
    if isinstance(error, dict):  # in a stream
        raise EtcdRefused(_code(error.get("grpc_code") or error.get("code")), str(error.get("message", "")))
    if status != 200:
        raise EtcdRefused(_code(answer.get("code")), str(answer.get("message") or error or f"status {status}"))
    result = answer.get("result", answer)
    return result if isinstance(result, dict) else {}


def _code(code: object) -> int:
    return code if isinstance(code, int) else 2


def ends_live_leases(version: str) -> bool:
    """Return True if former leaders of this version end leases of other leaders (etcd issue 15247)."""
    try:
        major, minor, patch = (int(part) for part in version.split("-")[0].split("."))
    except ValueError:
        return False
    return (major, minor, patch) < (3, 4, 31) or (3, 5, 0) <= (major, minor, patch) < (3, 5, 13)


def _misplaced(status: int, body: bytes) -> Exception:
    text = body[:200].decode("latin-1").strip()
    if status == 404:
        return DirectoryRefused(
            "the server has no JSON gateway under /v3: etcd 3.4 or newer has one, unless it was started with "
            "--enable-grpc-gateway=false, or 3.4 by a configuration file without `enable-grpc-gateway: true`"
        )
    if status in (400, 421):  # checks of host names and certificates that etcd does before the gateway
        return DirectoryRefused(f"the server does not accept requests to etcd's JSON gateway from here: {text!r}")
    return EtcdRefused(2, f"status {status}: {text!r}")  # such as from a proxy that has lost the member


class Continuity:
    """Detect that etcd has lost its data, was restored from a backup, or is not one cluster.

    Revisions are fencing tokens. A cluster that starts again, after `etcdctl snapshot restore` or with an empty data
    directory, issues the same revisions again, which breaks fencing. etcd's responses do not show this directly. But a
    linearizable response never has a lower revision than a response that arrived before its request was sent.
    """

    def __init__(self) -> None:
        self.cluster = 0
        self.revision = 0  # the highest revision of a linearizable response
        self.broken = ""

    def check(self, header: Header, floor: int, linearizable: bool) -> str:
        """Return the fault, permanently after the first; "" if none. `floor`: `revision` when the request was sent."""
        if not self.broken and header.cluster:
            if self.cluster not in (0, header.cluster):
                self.broken = (
                    f"the endpoints belong to different clusters of etcd ({self.cluster:x} and {header.cluster:x}), or "
                    "the cluster was created again: give the endpoints of one cluster, and start a new group"
                )
            elif linearizable and header.revision < floor:
                self.broken = (
                    f"etcd went back from revision {floor} to {header.revision}: its data was lost or restored from a "
                    "backup, so tokens could repeat. Start a new group under another prefix"
                )
            elif linearizable:
                self.revision = max(self.revision, header.revision)
            self.cluster = self.cluster or header.cluster
        return self.broken


def describe(endpoints: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{bracketed(host)}:{port}" for host, port in endpoints)
