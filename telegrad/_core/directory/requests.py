"""The messages between a client and the server of the embedded directory, as bytes.

All operations have the same layouts of requests and replies. The client chooses the number of a request, and the reply
repeats it. Replies may arrive in any order, because other requests are answered while a watch waits.

    request   number, operation, revision, lease, seconds, length of the key, whether there is a value; key; value
    reply     number, outcome, revision, number of changes; the changes, or a text if there are none
    change    length of the key, length of the value, revision, created, lease; key; value
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from telegrad._core.directory.directory import KEY_BYTES, VALUE_BYTES, Entry, Event, Events
from telegrad.errors import InvalidArgument, ProtocolViolation

GRANT, RENEW, REVOKE, SWAP, LIST, WATCH = range(1, 7)  # operations
DONE, NOT_DONE, LEASE_LOST, COMPACTED, FULL, REFUSED = range(1, 7)  # outcomes

_REQUEST = struct.Struct("<IBQQdHB")
_REPLY = struct.Struct("<IBQI")
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


def write_request(number: int, request: Request) -> bytes:
    """Return the request as bytes.

    Raises:
        InvalidArgument: a field has an invalid value.
    """
    operation, key, value, revision, lease, seconds = request
    try:
        name = key.encode()
        head = _REQUEST.pack(number, operation, revision, lease, seconds, len(name), value is not None)
    except (struct.error, UnicodeEncodeError) as error:
        raise InvalidArgument(
            f"the directory cannot be asked with the key or prefix {key[:40]!r}, revision {revision!r}, lease "
            f"{lease!r} and {seconds!r} seconds: {error}"
        ) from None
    return head + name + (value or b"")


def read_request(data: bytes) -> tuple[int, Request]:
    """Return the number and the request.

    Raises:
        ProtocolViolation: the data is not a request.
    """
    try:
        number, operation, revision, lease, seconds, size, has_value = _REQUEST.unpack_from(data)
        start = _REQUEST.size
        key = data[start : start + size].decode()
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("it sent what is no request to a directory") from None
    value = data[start + size :] if has_value else None
    return number, Request(operation, key, value, revision, lease, seconds)


def write_changes(changes: Iterable[Event]) -> bytes:
    """Return changes as bytes, for the end of a reply."""
    parts: list[bytes] = []
    for revision, key, entry in changes:
        name = key.encode()
        if entry is None:
            parts += (_CHANGE.pack(len(name), _DELETED, revision, 0, 0), name)
        else:
            parts += (
                _CHANGE.pack(len(name), len(entry.value), revision, entry.created, entry.lease),
                name,
                entry.value,
            )
    return b"".join(parts)


def write_reply(number: int, outcome: int, revision: int, count: int, end: bytes) -> bytes:
    """Return a reply as bytes. `end` is the output of `write_changes` for `count` changes, or a text if it is 0."""
    return _REPLY.pack(number, outcome, revision, count) + end


def read_reply(data: bytes) -> tuple[int, Reply]:
    """Return the number of the request, and the reply.

    Raises:
        ProtocolViolation: the data is not a reply.
    """
    changes: Events = []
    try:
        number, outcome, revision, count = _REPLY.unpack_from(data)
        start = _REPLY.size
        if not count:
            return number, Reply(outcome, revision, changes, data[start:].decode())
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
        raise ProtocolViolation("it sent what is no reply of a directory") from None
    if start != len(data):
        raise ProtocolViolation("it sent a reply of a directory that is cut off, or too long")
    return number, Reply(outcome, revision, changes)
