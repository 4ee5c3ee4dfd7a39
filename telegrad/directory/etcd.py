"""A directory on etcd v3: `etcd://HOST:PORT[,HOST:PORT...][/PREFIX]`.

Decision: the client is our own, on etcd's JSON gateway. The gateway is part of each etcd server since 3.4 and needs
nothing but HTTP, so a program that uses etcd installs nothing. A request takes 0.3 to 1 ms there, a renewal 0.7 to 1,
and an event comes 1.2 to 1.7 ms after its write was begun (etcd 3.4.23, one member on the same host). The alternatives:
`aetcd` 1.0 and `pyetcd` 0.0.7 bring grpcio, which is compiled and has threads of its own; the two cannot share a
process, and `aetcd` needs an event loop. `etcd3gw` uses the gateway too, but its watch hangs in silence when the server
dies. `http.client` cannot read on in a response that has timed out once, and does not limit a whole exchange
(`http_stream.py`). What the gateway cannot do: users by the name in a client's certificate, and a second message in a
watch, such as a request for progress; a read beside the watch is used in its place. What would change this: an etcd
without the gateway, or groups whose requests cost it more than its writes do.

Engine's rules, beside those in `protocol.py`:

- Revisions are those of etcd, which other users of the same cluster raise as well. All keys of one lease are deleted at
  one revision.
- Reads are linearizable. A read, a grant, a renewal or a revocation without an answer goes to the next endpoint; the
  lease of a grant that was lost ends by itself. A compare-and-set goes there only if it was certainly not begun.
- TTLs are whole seconds, rounded up; etcd makes 1 to 2, and more where its election timeout is long. `Lease.ttl` is
  what etcd granted. Each new leader counts all leases anew, so keys outlive their owner by up to a ttl and an election.
- A leader that was stopped for a while and goes on (SIGSTOP, a slow disk) renews leases that another leader has ended
  (etcd issue 15247). So a renewal counts only if a read behind it shows the same term: see `renew`.
  Such a leader of etcd before 3.4.31 or 3.5.13 also ends leases that their holders renew elsewhere: 2 of 20 stops of
  a leader, for up to 4 s each, took a claim from its owner 1.8 s before `Lease.ends`. No client can prevent that. The
  fencing token of the next owner is higher all the same. Clients with several endpoints warn of these versions.
- A watch whose stream is silent for SILENCE asks the same member for a linearizable read. A stopped member, or one that
  is cut off from the majority, does not answer, and the stream goes on at the next endpoint from the last revision.
- `Continuity` finds a cluster that has lost its data. etcd before 3.4.32 and 3.5.14 has bugs that lose events or go
  back in revisions after a compaction; use later ones.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from telegrad.directory import etcd_messages as messages
from telegrad.directory.etcd_client import Answer, Attempts, Client, Unanswered, Unsent
from telegrad.directory.etcd_messages import Json, Malformed, Refused, Settings
from telegrad.directory.http_stream import Connection
from telegrad.directory.protocol import (
    ABSENT,
    Compacted,
    DirectoryLost,
    DirectoryRefused,
    Events,
    Lease,
    LeaseLost,
    Listing,
    Swap,
    check_key,
    check_ttl,
    check_value,
)
from telegrad.errors import StoreUntrusted
from telegrad.hints import hint

P = ParamSpec("P")
T = TypeVar("T")

SILENCE = 2.0  # seconds without an event, after which a member is asked whether it still follows its cluster
OPENING = 0.5  # seconds that a new stream may take to open, also in a watch with a shorter timeout
POLL = 0.01  # seconds of the shortest watch
STREAMS = 16  # streams that are kept open between watches, one for each prefix


def connect(url: str, patience: float = 10.0) -> EtcdDirectory:
    """Return a directory on the etcd of a URL. Nothing is sent yet.

    Raises:
        UsageError: the URL, or a file that it names, is wrong.
    """
    return EtcdDirectory(messages.parse_url(url), patience)


class _Elsewhere(Exception):
    """The endpoint is a load balancer, and another member answered than that of the stream: open another stream."""


class _Stream:
    """An open watch, at a position."""

    def __init__(self, connection: Connection, endpoint: int, position: int) -> None:
        self.connection = connection
        self.endpoint = endpoint
        self.member = 0  # the id of the one that answers
        self.position = position  # all changes until this revision were returned
        self.is_proven = False  # it has brought an event, or the member has answered beside it
        self.heard = time.monotonic()
        self.asked = 0.0  # when the member was first asked whether it still follows, without an answer yet

    def next(self, deadline: float) -> Json:
        """Return the next message.

        Raises:
            TimeoutError: the deadline came.
            Unanswered: the stream is broken.
            Refused: etcd does not allow it.
        """
        try:
            line = self.connection.read_line(deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise Unanswered(str(error) or type(error).__name__) from None
        if not line:
            raise Unanswered("the watch was closed")
        try:
            return messages.answer_of(self.connection.status, line)
        except Refused as error:
            if error.is_passing() or error.needs_token():
                raise Unanswered(error.message) from None
            raise

    def confirmed(self) -> None:
        self.heard, self.asked, self.is_proven = time.monotonic(), 0.0, True


def _trusted(method: Callable[Concatenate[EtcdDirectory, P], T]) -> Callable[Concatenate[EtcdDirectory, P], T]:
    """Have a method raise StoreUntrusted for an answer that etcd cannot have made."""

    @functools.wraps(method)
    def trusted(self: EtcdDirectory, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except Malformed as error:
            raise StoreUntrusted(
                f"etcd at {self._client.name} gave an answer for the keys under {self.scope!r} that no etcd gives "
                f"({error}): see whether another server has its address, or a proxy in front alters what it answers"
            ) from None

    return trusted


class EtcdDirectory:
    """The `Directory` of a group on an etcd cluster."""

    def __init__(self, settings: Settings, patience: float) -> None:
        self.scope = settings.prefix  # what tells it from those of other groups
        self._prefix = settings.prefix.encode()
        self._client = Client(settings, patience)
        self._lock = threading.Lock()  # guards what is below
        self._streams: dict[bytes, _Stream] = {}  # kept for the next watch of their prefix, the last used at the end
        self._is_checked = len(settings.endpoints) == 1  # a single member has no former leader

    @_trusted
    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
        ends = time.monotonic() + self._client.patience
        answer = self._ask("/v3/lease/grant", {"TTL": str(math.ceil(ttl))}, ends)
        number, seconds = messages.lease_of(answer.content), messages.ttl_of(answer.content)
        self._check_version(ends)
        return Lease(number, seconds, answer.sent + seconds)

    @_trusted
    def renew(self, lease: Lease) -> Lease:
        """See `Directory.renew`.

        etcd renews at its leader without asking a majority, so a former leader that does not know of its end accepts a
        renewal as well. The answer has the term that its member had applied before it passed the renewal on, so the
        leader that renewed was of that term or of a later one. The read that follows is answered only by a member that
        has applied all which the present leader had committed, the first entry of its term included. So where both
        terms are equal, the leader that renewed was the present one. Each later leader begins to count the ttl anew.

        Members of etcd that are out of reach, or cannot reach their leader, must not use up the time of the lease.
        """
        limit = self._client.share(lease.ttl)
        ends = time.monotonic() + self._client.patience
        while time.monotonic() < ends:
            renewal = self._ask("/v3/lease/keepalive", {"ID": str(lease.id)}, ends, limit=limit)
            read = self._ask("/v3/kv/range", messages.confirm_request(self._prefix), ends, limit=limit)
            if renewal.header.term != read.header.term:
                continue
            seconds = messages.ttl_of(renewal.content)
            if not seconds:
                raise _lost(lease)
            return Lease(lease.id, seconds, renewal.sent + seconds)
        raise DirectoryLost(
            f"etcd at {self._client.name} changed its leader again and again for {self._client.patience:g} s, so it "
            "is unknown whether the lease was renewed: look at the load of its members and the network between them"
        )

    @_trusted
    def revoke(self, lease: Lease) -> None:
        try:
            self._ask("/v3/lease/revoke", {"ID": str(lease.id)})
        except LeaseLost:
            pass

    @_trusted
    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        name = self._prefix + check_key(key)
        check_value(key, value or b"")
        request = messages.swap_request(name, value, expected, lease.id if lease else 0)
        return messages.swap_of(self._ask("/v3/kv/txn", request, repeat=False).content, self._prefix)

    @_trusted
    def list(self, prefix: str) -> Listing:
        request = messages.list_request(self._prefix + prefix.encode())
        return messages.listing_of(self._ask("/v3/kv/range", request).content, self._prefix)

    @_trusted
    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        name = self._prefix + prefix.encode()
        began = time.monotonic()
        attempts: Attempts | None = None
        stream = self._take_stream(name, since)
        while True:
            endpoint = stream.endpoint if stream else self._client.current()
            try:
                if stream is None:
                    stream = self._open(name, since, endpoint, began + max(timeout, OPENING))
                events = self._wait(stream, began + max(timeout, POLL))
                break
            except (Unsent, Unanswered) as error:
                if attempts is None or (stream and stream.is_proven):
                    attempts = self._client.begin(began + max(timeout, OPENING))
                self._drop(stream)
                stream = None
                attempts.next(endpoint, str(error))
            except _Elsewhere:
                self._drop(stream)
                stream, attempts = None, None
            except Refused as error:
                self._drop(stream)
                raise _refused(error) from None
            except BaseException:
                self._drop(stream)
                raise
        position = stream.position
        self._keep_stream(name, stream)
        return position, events

    def close(self) -> None:
        if self._client.is_inherited():
            return
        self._client.close()
        with self._lock:
            streams = list(self._streams.values())
            self._streams.clear()
        for each in streams:
            self._drop(each)

    def _ask(
        self, path: str, body: Json, ends: float | None = None, repeat: bool = True, limit: float | None = None
    ) -> Answer:
        try:
            return self._client.ask(path, body, ends, repeat, limit)
        except Refused as error:
            raise _refused(error) from None

    def _check_version(self, ends: float) -> None:
        """Warn once where a leader that goes on after a stop can end the leases of others."""
        if self._is_checked:
            return
        self._is_checked = True
        try:
            version = str(self._client.ask("/v3/maintenance/status", {}, ends).content.get("version"))
        except (DirectoryLost, Refused):  # the user may not know it
            return
        if messages.ends_live_leases(version):
            hint(
                "etcd",
                f"etcd {version} at {self._client.name} can end the leases of workers that renew them, after one of "
                "its members was stopped for a while or had a slow disk: install 3.4.31, 3.5.13 or newer",
            )

    def _open(self, name: bytes, since: int, endpoint: int, ends: float) -> _Stream:
        """Open a stream from a revision on."""
        deadline = min(ends, time.monotonic() + self._client.limit)
        connection = self._client.send(endpoint, "/v3/watch", messages.watch_request(name, since), deadline)
        stream = _Stream(connection, endpoint, since)
        try:
            self._check(message := stream.next(deadline))  # the first one says that the watch was created
            stream.member = messages.header_of(message).member
        except TimeoutError:
            self._drop(stream)
            raise Unanswered("no answer in time") from None
        except BaseException:
            self._drop(stream)
            raise
        return stream

    def _wait(self, stream: _Stream, ends: float) -> Events:
        """Return the next events, or none at the end of the time."""
        while True:
            try:
                message = stream.next(min(ends, stream.heard + SILENCE))
            except TimeoutError:
                if time.monotonic() >= ends:
                    return []
                self._confirm(stream, ends)
                continue
            self._check(message)
            stream.heard = time.monotonic()
            if events := messages.events_of(message, self._prefix):
                # Not the header's revision: behind a watch that catches up, etcd has more than these events.
                stream.position = events[-1].revision
                stream.confirmed()
                return events
            if not message.get("created"):  # a notice of progress: nothing is left out until its revision
                stream.position = max(stream.position, messages.header_of(message).revision)

    def _check(self, message: Json) -> None:
        """Raise the error that a message of a stream tells of."""
        if compacted := messages.compacted_of(message):
            raise Compacted(f"etcd was compacted until revision {compacted}: list again, and watch from there")
        if message.get("canceled"):
            raise Unanswered(message.get("cancel_reason") or "the watch was cancelled")
        self._client.check(messages.header_of(message), 0, linearizable=False)

    def _confirm(self, stream: _Stream, ends: float) -> None:
        """Find out whether the member of a silent stream still follows its cluster.

        Raises:
            Unsent, Unanswered: it does not.
            _Elsewhere: another member answered.
        """
        stream.asked = stream.asked or time.monotonic()
        limit = stream.asked + self._client.limit
        try:
            answer = self._client.attempt(
                stream.endpoint, "/v3/kv/range", messages.confirm_request(self._prefix), min(ends, limit)
            )
        except (Unsent, Unanswered):
            # At the end of the watch's own time the member is not to blame yet; the next watch asks again.
            if ends <= time.monotonic() < limit:
                return
            raise
        self._client.check(answer.header, stream.position, linearizable=True)
        if answer.header.member != stream.member:
            raise _Elsewhere
        stream.confirmed()

    def _take_stream(self, name: bytes, since: int) -> _Stream | None:
        """Return the stream that was kept, if it stands there."""
        self._client.check_open()
        with self._lock:
            stream = self._streams.pop(name, None)
        if stream and stream.position != since:
            self._drop(stream)
            return None
        return stream

    def _keep_stream(self, name: bytes, stream: _Stream) -> None:
        """Keep a stream for the next watch, in the place of another one or of the one that was not used for longest."""
        with self._lock:
            displaced = self._streams.pop(name, None)
            self._streams[name] = stream
            if len(self._streams) > STREAMS:
                displaced = self._streams.pop(next(iter(self._streams)))
        self._drop(displaced)
        if self._client.is_closed():  # `close` may have looked before
            self.close()

    def _drop(self, stream: _Stream | None) -> None:
        if stream:
            self._client.drop(stream.connection)


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"lease {lease.id:x} has ended, and its keys are deleted: stop what depends on them, or begin anew"
    )


def _refused(error: Refused) -> Exception:
    if error.code == messages.NOT_FOUND and "lease" in error.message:
        return LeaseLost(f"the lease has ended, and its keys are deleted ({error.message}): begin another one")
    if error.code == messages.RESOURCE_EXHAUSTED:
        return DirectoryRefused(
            f"etcd does not write ({error.message}): where its space is used up, compact and defragment it, and "
            "end the alarm by `etcdctl alarm disarm`"
        )
    return DirectoryRefused(
        f"etcd refuses the request ({error.message}): where it asks for a user, give ?user=NAME&password_file=FILE in "
        "its address; the user needs to read and to write all keys under the prefix"
    )
