"""The messages between a client and the server of the embedded directory, as bytes.

All operations have the same layouts of requests and replies. A connection carries one request at a time.

    request   operation, revision, lease, seconds, length of the key, whether there is a value; key; value
    reply     outcome, revision, number of changes; the changes, or a text if there are none
    change    length of the key, length of the value, revision, created, lease; key; value
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import NamedTuple

from telegrad._core.directory.directory import KEY_BYTES, VALUE_BYTES, Entry, Event, Events
from telegrad.errors import InvalidArgument, ProtocolViolation

GRANT, RENEW, REVOKE, SWAP, LIST, WATCH = range(1, 7)  # operations
DONE, NOT_DONE, LEASE_LOST, COMPACTED, FULL, REFUSED = range(1, 7)  # outcomes

_REQUEST = struct.Struct("<BQQdHB")
_REPLY = struct.Struct("<BQI")
_CHANGE = struct.Struct("<HIQQQ")
_DELETED = 0xFFFFFFFF  # instead of a value's length

LONGEST_REQUEST = _REQUEST.size + KEY_BYTES + VALUE_BYTES


class Request(NamedTuple):
    """A request of a client; each operation uses some of the fields."""

    operation: int
    key: str = ""  # or a prefix
    value: bytes | None = None
    revision: int = 0
    lease: int = 0
    seconds: float = 0.0


class Reply(NamedTuple):
    """A reply of the server."""

    outcome: int
    revision: int = 0  # or the id of a lease
    changes: Events = []  # noqa: RUF012 nobody changes it
    text: str = ""


def write_request(request: Request) -> bytes:
    """Return the request as bytes.

    Raises:
        InvalidArgument: a field has an invalid value.
    """
    operation, key, value, revision, lease, seconds = request
    try:
        name = key.encode()
        head = _REQUEST.pack(operation, revision, lease, seconds, len(name), value is not None)
    except (struct.error, UnicodeEncodeError) as error:
        raise InvalidArgument(
            f"the directory does not accept the key or prefix {key[:40]!r}, revision {revision!r}, lease {lease!r} "
            f"and {seconds!r} seconds: {error}"
        ) from None
    return head + name + (value or b"")


def read_request(data: bytes) -> Request:
    """Return the request. Raises ProtocolViolation if the data is none."""
    try:
        operation, revision, lease, seconds, size, has_value = _REQUEST.unpack_from(data)
        start = _REQUEST.size
        key = data[start : start + size].decode()
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("it sent an invalid directory request") from None
    return Request(operation, key, data[start + size :] if has_value else None, revision, lease, seconds)


def write_reply(outcome: int, revision: int = 0, changes: Collection[Event] = (), text: str = "") -> bytes:
    """Return a reply as bytes, with changes or a text."""
    parts = [_REPLY.pack(outcome, revision, len(changes)), text.encode()]
    for changed, key, entry in changes:
        name = key.encode()
        if entry is None:
            parts += (_CHANGE.pack(len(name), _DELETED, changed, 0, 0), name)
        else:
            head = _CHANGE.pack(len(name), len(entry.value), changed, entry.created, entry.lease)
            parts += (head, name, entry.value)
    return b"".join(parts)


def read_reply(data: bytes) -> Reply:
    """Return the reply. Raises ProtocolViolation if the data is none."""
    changes: Events = []
    try:
        outcome, revision, count = _REPLY.unpack_from(data)
        start = _REPLY.size
        if not count:
            return Reply(outcome, revision, changes, data[start:].decode())
        for _ in range(count):
            size, length, changed, created, lease = _CHANGE.unpack_from(data, start)
            start += _CHANGE.size
            key = data[start : start + size].decode()
            start += size
            entry = None
            if length != _DELETED:
                entry = Entry(key, data[start : start + length], changed, created, lease)
                start += length
            changes.append(Event(changed, key, entry))
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("it sent an invalid directory reply") from None
    if start != len(data):
        raise ProtocolViolation("it sent a directory reply that is cut off, or too long")
    return Reply(outcome, revision, changes)
