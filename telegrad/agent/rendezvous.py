"""How workers find each other through a store.

A group of fixed size: each worker claims its rank and its name, the last to come opens the gate, all read the table,
and the last reader opens the second gate. Behind that nobody needs the store any more, so its server may go.

A dynamic group keeps the store: names and ranks are claimed and looked up there at any time.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch.distributed as dist

from telegrad.agent.members import Member, Members, unknown
from telegrad.agent.stores import SHORTEST_PAUSE, wait
from telegrad.errors import AuthenticationFailed, GroupIncomplete, RendezvousError, WorkerTaken

LINGER = 2.0  # seconds that the store outlives a rendezvous that failed, so that all hear of it


class Roster(NamedTuple):
    """The outcome of a rendezvous."""

    members: Members
    key: bytes


def join_static(store: Any, me: Member, world_size: int, key: bytes | None, timeout: float, generation: int) -> Roster:
    """Meet the other workers of a group of fixed size.

    Raises:
        WorkerTaken: two workers claim one name or one rank; both are told.
        GroupIncomplete: some did not come in time.
        AuthenticationFailed: not all were given the same key.
    """
    return _Static(dist.PrefixStore(f"telegrad/{generation}", store), me, world_size, timeout).join(key)


class _Static:
    def __init__(self, store: Any, me: Member, world_size: int, timeout: float) -> None:
        self._store = store
        self._me = me
        self._size = world_size
        self._timeout = timeout
        self._until = monotonic() + timeout

    def join(self, key: bytes | None) -> Roster:
        self._store.add("here", 1)
        try:
            return self._join(key)
        except (WorkerTaken, AuthenticationFailed):
            self._store.add("told", 1)
            until = monotonic() + LINGER
            while self._me.id == 0 and self._store.add("told", 0) < self._store.add("here", 0) and monotonic() < until:
                sleep(SHORTEST_PAUSE)  # whoever serves the store goes last
            raise

    def _join(self, key: bytes | None) -> Roster:
        self._claim(
            "size",
            str(self._size),
            lambda other: (
                f"this worker's group has {self._size} workers, another's {other}: give all the same world_size"
            ),
        )
        shared = self._agree_on_key(key)
        entry = self._me.to_json()
        self._claim(f"rank/{self._me.id}", entry, lambda other: _taken(f"rank {self._me.id}", self._me, other))
        self._claim(f"name/{self._me.name}", entry, lambda other: _taken(f"name {self._me.name!r}", self._me, other))
        if self._store.add("arrived", 1) == self._size:
            self._store.set("complete", "")
        self._wait("complete")
        entries = self._store.multi_get([f"rank/{rank}" for rank in range(self._size)])
        members = Members(Member.from_json(entry) for entry in entries)
        if self._store.add("read", 1) == self._size:
            self._store.set("ready", "")
        self._wait("ready")
        if self._store.add("gone", 1) == self._size:
            self._store.set("empty", "")
        if self._me.id == 0:
            self._wait("empty")  # whoever serves the store goes last
        return Roster(members, shared)

    def _claim(self, key: str, value: str, taken: Callable[[str], str]) -> None:
        """Write `value` unless another worker has written something else; then tell all."""
        found = self._store.compare_set(key, "", value).decode()
        if found != value:
            why = taken(found)
            self._store.set("fault", why)
            raise WorkerTaken(why)

    def _agree_on_key(self, key: bytes | None) -> bytes:
        """All are given the same key, or none is and one is made here."""
        salt = self._store.compare_set("salt", "", secrets.token_hex(16)).decode()
        mine = hashlib.sha256(salt.encode() + key).hexdigest() if key is not None else "none"
        found = self._store.compare_set("key", "", mine).decode()
        if found != mine:
            why = (
                "the workers were given different keys: give all of them the same one "
                "(TELEGRAD_KEY, or key=... in the options), or none"
            )
            self._store.set("fault", why)
            raise AuthenticationFailed(why)
        if key is not None:
            return key
        return bytes(self._store.compare_set("made", "", secrets.token_hex(32)))

    def _wait(self, gate: str) -> None:
        while not wait(self._store, [gate], min(self._until, monotonic() + 0.25)):
            if self._store.check(["fault"]):
                why = self._store.get("fault").decode()
                raise (AuthenticationFailed if "different keys" in why else WorkerTaken)(why)
            if monotonic() >= self._until:
                raise self._incomplete()

    def _incomplete(self) -> GroupIncomplete:
        missing = [str(rank) for rank in range(self._size) if not self._store.check([f"rank/{rank}"])]
        who = f"rank {', '.join(missing)} did not come" if missing else "some did not finish reading"
        return GroupIncomplete(
            f"the group of {self._size} workers is not complete after {self._timeout:g} s: {who}. "
            "Look at those workers' logs, or allow more time with rpc_timeout"
        )


def _taken(what: str, me: Member, other: str) -> str:
    first = Member.from_json(other)
    return (
        f"two workers claim the {what}: {first} and {me}. Give each its own, and use a fresh store "
        "(another port or file) if one of them belongs to an earlier run"
    )


class DynamicGroup:
    """A group that workers join and leave at any time; the store must live as long as it."""

    def __init__(self, store: Any) -> None:
        self._store = dist.PrefixStore("telegrad/dynamic", store)
        self._me: Member | None = None

    def join(self, me: Member, key: bytes | None) -> tuple[Member, bytes]:
        """Claim a name and a rank, a free one where `me.id` is -1.

        Raises:
            WorkerTaken: a member has that name or rank.
        """
        mine = hashlib.sha256(b"telegrad" + key).hexdigest() if key is not None else "none"
        if self._store.compare_set("key", "", mine).decode() != mine:
            raise AuthenticationFailed(
                "this worker's key is not that of the group: give all workers the same one "
                "(TELEGRAD_KEY, or key=... in the options), or none"
            )
        shared = key if key is not None else bytes(self._store.compare_set("made", "", secrets.token_hex(32)))
        self._claim(f"name/{me.name}", f"name {me.name!r}", me)
        try:
            me = self._claim_rank(me)
        except WorkerTaken:
            self._store.delete_key(f"name/{me.name}")
            raise
        self._store.set(f"name/{me.name}", me.to_json())
        self._store.add("ranks", 1)
        self._me = me
        return me, shared

    def _claim_rank(self, me: Member) -> Member:
        if me.id >= 0:
            self._claim(f"rank/{me.id}", f"rank {me.id}", me)
            return me
        for rank in range(1 << 16):
            mine = me._replace(id=rank)
            if self._store.compare_set(f"rank/{rank}", "", mine.to_json()).decode() == mine.to_json():
                return mine
        raise RendezvousError("all ranks of the group are taken")

    def _claim(self, key: str, what: str, me: Member) -> None:
        found = self._store.compare_set(key, "", me.to_json()).decode()
        if found != me.to_json():
            raise WorkerTaken(_taken(what, me, found))

    def find(self, to: str | int) -> Member:
        """The member of that name or rank, as of now.

        Raises:
            UnknownWorker: there is none.
        """
        key = f"name/{to}" if isinstance(to, str) else f"rank/{to}"
        if not self._store.check([key]):
            raise unknown(to, [])
        return Member.from_json(self._store.get(key))

    def leave(self) -> None:
        """Free the name and the rank."""
        if self._me is not None:
            for key in (f"name/{self._me.name}", f"rank/{self._me.id}"):
                try:
                    self._store.delete_key(key)
                except RuntimeError:
                    pass  # the store has gone with the worker that served it
            self._me = None
