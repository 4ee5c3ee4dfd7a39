"""The behaviour of the embedded directory: maps requests to replies. Pure: no sockets, and the time is an argument."""

from __future__ import annotations

from telegrad._core.directory import requests
from telegrad._core.directory.directory import Compacted, Event, LeaseLost, check_key, check_ttl, check_value
from telegrad._core.directory.lease_table import Table
from telegrad._core.directory.requests import Request, write_changes, write_reply
from telegrad._core.directory.watches import Replies, Watches
from telegrad.errors import InvalidArgument, LimitReached


class Service:
    """The directory's behaviour over a table. One thread at a time.

    A connection is a number here. `answer` returns the reply to a request; `collect` returns the replies to requests
    that have waited.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._watches = Watches(table)

    def answer(self, connection: int, client: str, data: bytes, now: float) -> bytes | None:
        """Return the reply to a request, or None if the request waits.

        Raises:
            ProtocolViolation: the data is not a request.
        """
        number, request = requests.read_request(data)
        try:
            if request.operation == requests.WATCH:
                _, prefix, _, since, _, seconds = request
                return self._watches.add(connection, number, prefix, since, seconds, now)
            return self._do(number, client, request, now)
        except LeaseLost as error:
            outcome, text = requests.LEASE_LOST, str(error)
        except Compacted as error:
            outcome, text = requests.COMPACTED, str(error)
        except LimitReached as error:
            outcome, text = requests.FULL, str(error)
        except InvalidArgument as error:
            outcome, text = requests.REFUSED, str(error)
        return write_reply(number, outcome, 0, 0, text.encode())

    def leave(self, connection: int) -> None:
        """Forget a connection that has ended."""
        self._watches.leave(connection)

    def collect(self, now: float) -> Replies:
        """End expired leases; return the replies to watches, each with its connection."""
        self.table.expire(now)
        return self._watches.collect(now)

    def next_at(self) -> float | None:
        """Return when to call `collect` next if no request arrives before, or None for never."""
        times = [self.table.next_end(), self._watches.next_at()]
        return min((each for each in times if each is not None), default=None)

    def _do(self, number: int, client: str, request: Request, now: float) -> bytes:
        table = self.table
        operation, key, value, revision, lease, seconds = request
        if operation == requests.SWAP:
            check_key(key)
            check_value(key, value or b"")
            done, entry = table.swap(key, value, revision, lease, client)
            end = write_changes([Event(entry.revision, key, entry)] if entry else [])
            return write_reply(number, requests.DONE if done else requests.NOT_DONE, 0, entry is not None, end)
        if operation == requests.LIST:
            listing = table.list(key)
            end = write_changes(Event(entry.revision, entry.key, entry) for entry in listing.entries)
            return write_reply(number, requests.DONE, listing.revision, len(listing.entries), end)
        result = 0
        if operation == requests.GRANT:
            check_ttl(seconds)
            result = table.grant(seconds, now)
        elif operation == requests.RENEW:
            table.renew(lease, now)
        elif operation == requests.REVOKE:
            table.revoke(lease)
        else:
            raise InvalidArgument(f"this directory has no operation {operation}: install one version on all hosts")
        return write_reply(number, requests.DONE, result, 0, b"")
