"""The requests of clients to the server of the embedded directory: as bytes, carried out, or waiting.

All operations have the same layouts of requests and replies. A connection carries one request at a time.

    request   operation, revision, lease, seconds, length of the key, whether there is a value; key; value
    reply     outcome, revision, number of changes; the changes, or a text if there are none
    change    length of the key, length of the value, revision, created, lease; key; value

After the handshake of a connection, each direction is a stream of encrypted records, with the messages in sequence. A
message is its length in four bytes, and its content. Records (`security/noise.py`) split that stream anywhere: a
message longer than a record is in several.

A watch is a request that waits for a change under its prefix. All watches of one prefix get the same bytes. To notify n
watchers of a change costs n messages, and about 0.3 ms of processor time for each watcher, so the cost of starting a
group would grow with the square of its size. Therefore changes are batched. The first change under a prefix is sent at
once. The next ones are sent EACH seconds later for every watcher that was notified, LONGEST_GATHERING at most. With one
client, a prefix has almost no delay, whatever others watch.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 see below
import hashlib
import heapq
import struct
from collections.abc import Collection, Hashable, Iterator
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

# Otherwise imported at the first connection, by many forked processes that connect at the same moment.
from cryptography.hazmat.backends.openssl import backend as _backend  # noqa: F401

from telegrad._core.security.noise import LONGEST, RECORD, TAG, Ciphers, RecordWriter
from telegrad._core.stores.directory import (
    KEY_BYTES,
    VALUE_BYTES,
    Compacted,
    Entry,
    Event,
    Events,
    LeaseLost,
    check_key,
    check_ttl,
    check_value,
)
from telegrad.errors import InvalidArgument, LimitReached, ProtocolViolation, TelegradError

if TYPE_CHECKING:
    from telegrad._core.stores.lease_table import LeaseTable

GRANT, RENEW, REVOKE, SWAP, LIST, WATCH = range(1, 7)  # operations
DONE, NOT_DONE, LEASE_LOST, COMPACTED, FULL, REFUSED = range(1, 7)  # outcomes
ERRORS: dict[int, type[TelegradError]] = {
    LEASE_LOST: LeaseLost,
    COMPACTED: Compacted,
    FULL: LimitReached,
    REFUSED: InvalidArgument,
}

_REQUEST = struct.Struct("<BQQdHB")
_REPLY = struct.Struct("<BQI")
_CHANGE = struct.Struct("<HIQQQ")
_DELETED = 0xFFFFFFFF  # instead of a value's length

LONGEST_WATCH = 3_600.0  # seconds
EACH = 1e-3  # seconds: a notification takes a third of that, on the processors of watchers that share a host
LONGEST_GATHERING = 0.5  # seconds
LONGEST_REQUEST = _REQUEST.size + KEY_BYTES + VALUE_BYTES

C = TypeVar("C", bound=Hashable)  # a connection

INCARNATION = "directory"  # of directories in handshakes; workers have others

_LENGTH = struct.Struct("<I")
_HEAD = _LENGTH.size


class Request(NamedTuple):
    """A request of a client; each operation uses some of the fields."""

    operation: int
    key: str = ""  # or a prefix
    value: bytes | None = None
    revision: int = 0
    lease: int = 0
    seconds: float = 0.0


class Reply(NamedTuple):
    outcome: int
    revision: int = 0  # or the id of a lease
    changes: Events = []  # noqa: RUF012 nobody changes it
    text: str = ""


def write_request(request: Request) -> bytes:
    """Return the request as bytes; raise InvalidArgument if a field has an invalid value."""
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


def name_of(path: str) -> str:
    """Return the common prefix of the names of all directories that are stored at `path` over time."""
    return f"directory-{hashlib.sha256(path.encode()).hexdigest()[:16]}-"


class Channel:
    """Both directions. One thread may call `encrypt` while another calls `decrypt`."""

    def __init__(self, ciphers: Ciphers, longest: int, leftover: bytes = b"") -> None:
        """`longest` is the longest message that is accepted; `leftover` was received after the handshake."""
        self._writer = RecordWriter(ciphers.sending)
        self._decrypt = ciphers.receiving.decrypt
        self._longest = longest
        self._records = bytearray(leftover)
        self._content = bytearray()

    def encrypt(self, message: bytes) -> bytes:
        """Return the records of a message."""
        content = _LENGTH.pack(len(message)) + message
        if len(content) <= RECORD:
            return self._writer.encrypt(content)
        pieces = memoryview(content)
        return b"".join(self._writer.encrypt(pieces[at : at + RECORD]) for at in range(0, len(content), RECORD))

    def decrypt(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the complete messages. Raise ProtocolViolation if a record or a message is too
        long, and DecryptionFailed if the bytes are not the next record of the other end."""
        self._records += data
        for record in _split(self._records, "record", TAG + 1, LONGEST + TAG):
            self._content += self._decrypt(record)
        return list(_split(self._content, "message", 0, self._longest))


def _split(data: bytearray, what: str, least: int, most: int) -> Iterator[bytes]:
    """Yield the complete pieces at the begin of `data`, each of which follows its length; then remove them."""
    start = 0
    while len(data) - start >= _HEAD:
        (size,) = _LENGTH.unpack_from(data, start)
        if not least <= size <= most:
            raise ProtocolViolation(f"a {what} of {size} bytes was announced; {least} to {most} are allowed")
        end = start + _HEAD + size
        if end > len(data):
            break
        yield bytes(data[start + _HEAD : end])
        start = end
    del data[:start]


# Requests that do not wait


def do(table: LeaseTable, client: str, request: Request, now: float) -> bytes:
    """Carry out a request that does not wait, and return its reply."""
    operation, key, value, revision, lease, seconds = request
    if operation == SWAP:
        check_key(key)
        check_value(key, value or b"")
        done, entry = table.swap(key, value, revision, lease, client)
        changes = [Event(entry.revision, key, entry)] if entry else []
        return write_reply(DONE if done else NOT_DONE, 0, changes)
    if operation == LIST:
        revision, entries = table.list(key)
        return write_reply(DONE, revision, [Event(each.revision, each.key, each) for each in entries])
    granted = 0
    if operation == GRANT:
        check_ttl(seconds)
        granted = table.grant(seconds, now)
    elif operation == RENEW:
        table.renew(lease, now)
    elif operation == REVOKE:
        table.revoke(lease)
    else:
        raise InvalidArgument(f"this directory has no operation {operation}: install the same version on all hosts")
    return write_reply(DONE, granted)


# Watches: requests that wait


class _Watch(NamedTuple):
    prefix: str
    since: int
    ends: float


class _Prefix(Generic[C]):
    """The watches of one prefix. No change lies between the `since` of a waiting watch and `notified`."""

    __slots__ = ("notified", "notify_at", "watchers")

    def __init__(self, notified: int) -> None:
        self.watchers: dict[C, _Watch] = {}
        self.notified = notified
        self.notify_at = 0.0  # the earliest time of the next notification; 0 before the first


class Watches(Generic[C]):
    """All watches of a table, one for each connection at most. One thread at a time."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._seen = table.revision  # changed prefixes are known up to this revision
        self._prefixes: dict[str, _Prefix[C]] = {}
        self._changed: dict[str, _Prefix[C]] = {}  # prefixes with changes after `notified`
        self._waiting: dict[C, _Watch] = {}
        self._timeouts: list[tuple[float, int, C]] = []  # a heap; may still contain answered watches

    def add(self, connection: C, prefix: str, since: int, seconds: float, now: float) -> bytes | None:
        """Begin a watch; return its reply if it is known; raise Compacted if changes after `since` are forgotten."""
        revision, changes = self._table.changes(prefix, since)
        watched = self._prefixes.get(prefix)
        notified = watched.notified if watched is not None else self._table.revision
        # A watcher that has missed an earlier notification gets its changes at once. Later changes are batched, and
        # sent to all watchers of the prefix together.
        if (changes and changes[0].revision <= notified) or not seconds > 0:
            return write_reply(DONE, revision, changes)
        if watched is None:
            watched = self._prefixes[prefix] = _Prefix(notified)
        watch = _Watch(prefix, since, now + min(seconds, LONGEST_WATCH))
        watched.watchers[connection] = self._waiting[connection] = watch
        # The id decides between equal times, because connections have no order.
        heapq.heappush(self._timeouts, (watch.ends, id(connection), connection))
        # An answered watch stays in the heap until its time is over, up to LONGEST_WATCH: remove such items when they
        # are most of the heap.
        if len(self._timeouts) > 2 * len(self._waiting) + 1000:
            self._timeouts = [(watch.ends, id(each), each) for each, watch in self._waiting.items()]
            heapq.heapify(self._timeouts)
        return None

    def leave(self, connection: C) -> None:
        """Forget the watch of a connection. A notified prefix is kept for a while: its `notify_at` still applies."""
        watch = self._waiting.pop(connection, None)
        if watch is None:
            return
        watched = self._prefixes[watch.prefix]
        del watched.watchers[connection]
        if not (watched.watchers or watched.notify_at or watch.prefix in self._changed):
            del self._prefixes[watch.prefix]

    def collect(self, now: float) -> list[tuple[C, bytes]]:
        """Return the replies to watches that have waited long enough."""
        if self._table.revision > self._seen:
            self._find_changed(now)
        found: list[tuple[C, bytes]] = []
        for prefix in [each for each, watched in self._changed.items() if watched.notify_at <= now]:
            found += self._notify(prefix, self._changed.pop(prefix), now)
        while self._timeouts and self._timeouts[0][0] <= now:
            ends, _, connection = heapq.heappop(self._timeouts)
            watch = self._waiting.get(connection)
            if watch is not None and watch.ends == ends:
                start = max(watch.since, self._prefixes[watch.prefix].notified)
                self.leave(connection)
                reply = self._reply(watch.prefix, start) or write_reply(DONE, self._table.revision)
                found.append((connection, reply))
        return found

    def next_at(self) -> float | None:
        """Return when to call `collect` next if no request arrives before, or None for never."""
        times = [each.notify_at for each in self._changed.values()]
        if self._timeouts:
            times.append(self._timeouts[0][0])
        return min(times, default=None)

    def _find_changed(self, now: float) -> None:
        """Find the prefixes with changes, and forget those without watches."""
        changed = self._table.changed(self._seen)
        is_all = self._table.compacted <= self._seen  # else some changes are forgotten
        self._seen = self._table.revision
        for prefix, watched in list(self._prefixes.items()):
            if prefix in self._changed:
                continue
            if not watched.watchers and watched.notify_at <= now:
                del self._prefixes[prefix]
            elif not is_all or any(key.startswith(prefix) for key in changed):
                self._changed[prefix] = watched
            else:
                watched.notified = self._seen

    def _notify(self, prefix: str, watched: _Prefix[C], now: float) -> list[tuple[C, bytes]]:
        found = []
        replies: dict[int, bytes | None] = {}
        for connection, watch in watched.watchers.items():
            start = max(watch.since, watched.notified)
            if start not in replies:
                replies[start] = self._reply(prefix, start)
            if (reply := replies[start]) is not None:
                found.append((connection, reply))
        watched.notified = self._seen
        watched.notify_at = now + min(EACH * len(found), LONGEST_GATHERING)
        for connection, _ in found:
            self.leave(connection)
        return found

    def _reply(self, prefix: str, since: int) -> bytes | None:
        """Return the changes as a reply, or None without any."""
        try:
            revision, changes = self._table.changes(prefix, since)
        except Compacted as error:
            return write_reply(COMPACTED, text=str(error))
        return write_reply(DONE, revision, changes) if changes else None
