"""A directory on etcd v3: `etcd://HOST:PORT[,HOST:PORT...][/PREFIX]`.

Decision: the client is our own, on etcd's JSON gateway. The gateway is part of each etcd server since 3.4 and needs
nothing but HTTP, so a program that uses etcd installs nothing. A request takes 0.3 to 1 ms there, a renewal 0.7 to 1,
and an event comes 1.2 to 1.7 ms after its write was begun (etcd 3.4.23, one member on the same host). The alternatives:
`aetcd` 1.0 and `pyetcd` 0.0.7 bring grpcio, which is compiled and has threads of its own; the two cannot share a
process, and `aetcd` needs an event loop. `etcd3gw` uses the gateway too, but its watch hangs in silence when the server
dies. What the gateway cannot do: users by the name in a client's certificate, and a second message in a watch, such as
a request for progress; so a watch that is silent is opened anew. What would change this: an etcd without the gateway,
or groups whose requests cost it more than its writes do.

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
- A watch is a stream that is open until it has brought events. One that is silent for SILENCE is opened anew, from the
  same revision: a stopped member, or one that is cut off from its leader, refuses or does not answer, and the next
  endpoint is asked. A watch of a prefix that does not change stays at its revision, and ends by Compacted some day.
- `Continuity` finds a cluster that has lost its data. etcd before 3.4.32 and 3.5.14 has bugs that lose events or go
  back in revisions after a compaction; use later ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Concatenate, ParamSpec, TypeVar

from telegrad.directories import etcd_messages as messages
from telegrad.directories.etcd_client import Answer, EtcdClient, EtcdSession
from telegrad.directories.etcd_messages import Json, Malformed, Refused, Settings
from telegrad.errors import StoreUntrusted
from telegrad.ext.directories import (
    ABSENT,
    Compacted,
    DirectoryLost,
    DirectoryRefused,
    Events,
    Lease,
    LeaseLost,
    Listing,
    Swap,
    Unanswered,
    check_key,
    check_ttl,
    check_value,
)
from telegrad.ext.texts import hint

P = ParamSpec("P")
T = TypeVar("T")

SILENCE = 3.0  # seconds without an event, after which a watch is opened anew: its member may be stopped, or cut off
OPENING = 0.5  # seconds that a stream may take to open, also in a watch with a shorter timeout
SHORTEST = 0.01  # seconds for the first event behind that
PAUSE = 0.05  # seconds between two renewals while the leader changes


def connect(url: str, patience: float = 10.0) -> EtcdDirectory:
    """Return a directory on the etcd of a URL. Nothing is sent yet.

    Raises:
        UsageError: the URL, or a file that it names, is wrong.
    """
    return EtcdDirectory(messages.parse_url(url), patience)


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
        self._client = EtcdClient(settings, patience)
        self._endpoints = len(settings.endpoints)
        self._is_checked = self._endpoints == 1  # a single member has no former leader

    @_trusted
    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
        until = monotonic() + self._client.sessions.patience
        answer = self._ask("/v3/lease/grant", {"TTL": str(math.ceil(ttl))}, until)
        number, seconds = messages.lease_of(answer.content), messages.ttl_of(answer.content)
        self._check_version(until)
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
        sessions = self._client.sessions
        limit = min(self._client.limit, lease.ttl / (2 * self._endpoints))
        until = monotonic() + sessions.patience
        while True:
            renewal = self._ask("/v3/lease/keepalive", {"ID": str(lease.id)}, until, limit=limit)
            read = self._ask("/v3/kv/range", messages.confirm_request(self._prefix), until, limit=limit)
            if renewal.header.term == read.header.term:
                break
            sessions.wait(PAUSE)
            if monotonic() >= until:
                raise sessions.lost(
                    "changed its leader again and again, so it is unknown whether the lease was renewed: look at the "
                    "load of its members and the network between them",
                    {},
                )
        seconds = messages.ttl_of(renewal.content)
        if not seconds:
            raise LeaseLost(
                f"lease {lease.id:x} has ended, and its keys are deleted: stop what depends on them, or begin anew"
            )
        return Lease(lease.id, seconds, renewal.sent + seconds)

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
        sessions, began = self._client.sessions, monotonic()
        ends = began + timeout
        silence = min(SILENCE, sessions.patience / 2)
        while True:
            now = monotonic()
            until = min(now + sessions.patience, max(ends, began + OPENING))
            follow = partial(self._follow, name, since, min(now + silence, ends))
            try:
                events = sessions.run(follow, until=until, limit=self._client.limit).value
            except Refused as error:
                raise _refused(error) from None
            if events:
                # Not the header's revision: behind a watch that catches up, etcd has more than these events.
                return events[-1].revision, events
            if monotonic() >= ends:
                return since, []

    def close(self) -> None:
        self._client.sessions.close()

    def _follow(self, name: bytes, since: int, ends: float, session: EtcdSession, opening: float) -> Events:
        """Open a stream until `opening`; return its next events, or none at the end of the time."""
        client = self._client
        lines = session.lines("/v3/watch", messages.watch_request(name, since), client.token(session, opening), opening)
        is_open = False
        try:
            for status, line in lines:
                if not line:
                    raise Unanswered("the watch was closed")
                message = client.read(status, line)
                if compacted := messages.compacted_of(message):
                    raise Compacted(f"etcd was compacted until revision {compacted}: list again, and watch from there")
                if message.get("canceled"):
                    raise Unanswered(message.get("cancel_reason") or "the watch was cancelled")
                header = messages.header_of(message)
                client.check(header, 0, linearizable=False)
                if events := messages.events_of(message, self._prefix):
                    return events
                if not is_open and header.revision < since:
                    # The member is behind, or the cluster has lost its data: a linearizable read tells which.
                    read = client.ask("/v3/kv/range", messages.confirm_request(self._prefix), opening)
                    client.check(read.header, since, linearizable=True)
                is_open = True
                session.deadline = max(ends, monotonic() + SHORTEST)
        except TimeoutError:
            if not is_open:
                raise
        return []

    def _ask(
        self, path: str, body: Json, until: float | None = None, repeat: bool = True, limit: float | None = None
    ) -> Answer:
        try:
            return self._client.ask(path, body, until, repeat, limit)
        except Refused as error:
            raise _refused(error) from None

    def _check_version(self, until: float) -> None:
        """Warn once where a leader that goes on after a stop can end the leases of others."""
        if self._is_checked:
            return
        self._is_checked = True
        try:
            version = str(self._client.ask("/v3/maintenance/status", {}, until).content.get("version"))
        except (DirectoryLost, Refused):  # the user may not know it
            return
        if messages.ends_live_leases(version):
            hint(
                "etcd",
                f"etcd {version} at {self._client.name} can end the leases of workers that renew them, after one of "
                "its members was stopped for a while or had a slow disk: install 3.4.31, 3.5.13 or newer",
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
