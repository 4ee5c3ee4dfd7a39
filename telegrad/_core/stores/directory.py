"""The directory of a group: a small store with leases, revisions and compare-and-set.

Every decision that must have one answer (the members of the group, the owner of a name, a rank or a published value,
the current generation, the end of the group) is one compare-and-set of one key.

Revisions. The directory counts its writes: each write, each deletion and each end of a lease gets a higher revision.
Revisions never repeat and never decrease, even after a restart of the engine. The revision of the write that created a
claim is its fencing token: a later owner of the same key always has a higher one. A receiver that remembers the highest
token it has seen can refuse an owner that was replaced.

Leases. When a lease ends, all keys that were written with it are deleted; an engine may do that at one revision or at
several. A key that is written without a lease, or with another one, leaves its earlier lease. A lease ends when it is
revoked, or when it was not renewed for `ttl` seconds *by the engine's clock*. Its holder must stop acting as an owner
earlier, by its own clock: `ttl` seconds after it *sent* the last renewal that succeeded (`Lease.ends`), less
CLOCK_DRIFT of the ttl. The engine starts to count when the renewal arrives, so the holder stops first, provided that
the speeds of the two clocks differ by no more than CLOCK_DRIFT. An engine may make the ttl longer than requested, never
shorter.

Errors. `DirectoryLost` means that the outcome is unknown: a compare-and-set may have happened. The caller reads the key
again and compares the value, which names its writer. An engine never sends a compare-and-set a second time if the first
one may have arrived, because the second would fail with a changed revision.

Keys are text of 1 to KEY_BYTES bytes in UTF-8 without null characters; values are at most VALUE_BYTES bytes.
`check_key` and `check_value` refuse others in every engine, as `check_ttl` does for leases.
"""

from math import isfinite
from typing import NamedTuple, Protocol

from telegrad.errors import DirectoryLost as DirectoryLost
from telegrad.errors import DirectoryRefused as DirectoryRefused
from telegrad.errors import DirectoryReset as DirectoryReset
from telegrad.errors import InvalidArgument, RendezvousError
from telegrad.errors import LeaseLost as LeaseLost

ABSENT = 0  # the revision of a key that does not exist
KEY_BYTES = 1 << 10
VALUE_BYTES = 1 << 20
CLOCK_DRIFT = 0.001  # by which the speeds of two clocks may differ: Linux slews each by 0.0005 at most
SHORTEST_TTL, LONGEST_TTL = 0.05, 86_400.0  # seconds


class Compacted(RendezvousError):
    """The directory no longer has the changes since that revision: list again, and watch from there."""


class Entry(NamedTuple):
    """A key with its value."""

    key: str
    value: bytes
    revision: int  # of the write that made this value
    created: int  # of the write that created the key: the fencing token of a claim, equal until the key is deleted
    lease: int = 0  # id of its lease; 0 for none


class Event(NamedTuple):
    """A change of one key."""

    revision: int
    key: str
    entry: Entry | None  # None: the key was deleted, or its lease has ended


Events = list[Event]  # an alias, because `list` is a method of the class that returns it


class Listing(NamedTuple):
    """The entries under a prefix at one revision. Watch from `revision` to miss nothing."""

    revision: int
    entries: tuple[Entry, ...]  # by key


class Lease(NamedTuple):
    """The right of one worker to its keys, until `ends` by the holder's monotonic clock."""

    id: int
    ttl: float
    ends: float


class Swap(NamedTuple):
    """The outcome of a compare-and-set."""

    done: bool
    entry: Entry | None  # the entry after the operation: the written or the differing one; None without an entry


class Directory(Protocol):
    """One client's connection to the directory of one group.

    All methods may be called from any thread, concurrently. No method blocks longer than its limit, which is `timeout`
    if it takes one, and otherwise the patience of the connection. All raise DirectoryLost, also after `close`;
    AuthenticationFailed if the engine does not hold the group's key, before its first answer; and LimitReached if the
    engine is full.
    """

    def grant(self, ttl: float) -> Lease:
        """Begin a lease, whose ttl may be longer than requested; raise InvalidArgument if `ttl` is not between
        SHORTEST_TTL and LONGEST_TTL."""

    def renew(self, lease: Lease) -> Lease:
        """Return the lease with a new end. Raises LeaseLost if it has ended."""

    def revoke(self, lease: Lease) -> None:
        """End a lease, and delete its keys. Does nothing if it has ended already."""

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        """Write `value` if the key's revision is `expected`; None deletes the key.

        Raises:
            LeaseLost: the lease has ended; nothing was written. If the key's revision differs as well, an engine may
                return that instead.
            InvalidArgument: the key or the value is too long, or the key is not valid text.
        """

    def list(self, prefix: str) -> Listing:
        """Return all keys that begin with `prefix`, as of one revision; "" for all. Linearizable."""

    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        """Wait until a key under `prefix` changes after revision `since`, at most `timeout` seconds.

        Return the revision to watch from next, and all changes in order; none at the timeout. The changes of one
        revision are never separated. A broken connection is replaced within `timeout` and the patience; after that, the
        method raises DirectoryLost.

        Raises:
            Compacted: the engine has forgotten changes after `since`.
        """

    def close(self) -> None:
        """Close the connection. Leases of this client live until they end; a waiting watch raises DirectoryLost."""


def check_key(key: str) -> bytes:
    """Return the key in UTF-8; raise InvalidArgument if it is empty, too long, no valid text, or has a null."""
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"the key {key!r} of the directory has characters that UTF-8 cannot encode") from None
    if not 0 < len(encoded) <= KEY_BYTES or "\0" in key:
        raise InvalidArgument(
            f"a key of the directory must have 1 to {KEY_BYTES} bytes and no null character, not {len(encoded)} "
            f"bytes: {key[:40]!r}. Use shorter names"
        )
    return encoded


def check_value(key: str, value: bytes) -> None:
    """Raise InvalidArgument if a value is too long."""
    if len(value) > VALUE_BYTES:
        raise InvalidArgument(
            f"the value of {key!r} has {len(value)} bytes: the directory takes at most {VALUE_BYTES}. Publish the "
            "value itself by other means, and store its address in the directory"
        )


def check_ttl(ttl: float) -> None:
    """Raise InvalidArgument if a lease cannot have this ttl."""
    if not (isfinite(ttl) and SHORTEST_TTL <= ttl <= LONGEST_TTL):
        raise InvalidArgument(f"the ttl of a lease must be {SHORTEST_TTL:g} to {LONGEST_TTL:g} seconds, not {ttl!r}")
