"""How workers find each other through a store.

A group of fixed size: each worker agrees to the group's terms, claims its rank and its name, and the last to come opens
the first gate, COMPLETE. All read the table, and the last reader opens the second gate, READY. Behind that nobody needs
the store any more, so its server may go. What stands at a gate is OPENED or a fault, decided once and for all: so
whoever waits there learns of either by looking at one key.

A dynamic group keeps the store: names and ranks are claimed, looked up and freed there at any time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

from telegrad.agent.members import Member, Members, unknown
from telegrad.agent.stores import OVER, SERVED, Board
from telegrad.errors import AuthenticationFailed, GroupIncomplete, RendezvousError, TelegradError, WorkerTaken

LINGER = 2.0  # seconds that the store's server waits for the others to go first
MOST_RANKS = 1 << 16
OPENED = "opened"
COMPLETE, READY = "complete", "ready"
_FAULTS: dict[str, type[TelegradError]] = {
    fault.__name__: fault for fault in (WorkerTaken, AuthenticationFailed, GroupIncomplete, RendezvousError)
}


class Roster(NamedTuple):
    """The outcome of a rendezvous."""

    members: Members
    key: bytes


def join_static(store: Any, me: Member, world_size: int, key: bytes | None, timeout: float, generation: int) -> Roster:
    """Meet the other workers of a group of fixed size. What goes wrong for one is told to all.

    Raises:
        WorkerTaken: two workers claim one name or one rank.
        GroupIncomplete: some did not come in time.
        AuthenticationFailed: not all were given the same key.
        RendezvousError: a rank is out of range, the workers expect groups of different sizes, or the store was lost.
    """
    return _Static(store, me, world_size, timeout, generation).join(key)


class _Static:
    def __init__(self, store: Any, me: Member, world_size: int, timeout: float, generation: int) -> None:
        self._board = Board(store, f"telegrad/{generation}")
        self._root = Board(store)
        self._me = me
        self._size = world_size
        self._timeout = timeout
        self._until = monotonic() + timeout

    def join(self, key: bytes | None) -> Roster:
        self._board.count("here")
        gate = COMPLETE
        try:
            shared = self._claim(key)
            if self._board.count("arrived") == self._size:
                self._board.swap(COMPLETE, "", OPENED)
            self._pass(COMPLETE)
            members = self._read()
            gate = READY
            if self._board.count("read") == self._size:
                self._root.write(SERVED, OVER)  # before anyone leaves, who could be back at once
                self._board.swap(READY, "", OPENED)
            self._pass(READY)
        except BaseException as error:
            self._tell(gate, error)
            raise
        self._leave("gone", self._size)
        return Roster(members, shared)

    def _claim(self, key: bytes | None) -> bytes:
        me, size = self._me, self._size
        if not 0 <= me.id < size:
            raise RendezvousError(f"{me} is not within its group of {size}: ranks go from 0 to {size - 1}")
        shared = _agree(self._board, me, size, key)
        entry = me.to_json()
        for slot, what in ((f"rank/{me.id}", f"rank {me.id}"), (f"name/{me.name}", f"name {me.name!r}")):
            found = self._board.swap(slot, "", entry)
            if found != entry:
                raise _taken(what, Member.from_json(found), me)
        return shared

    def _read(self) -> Members:
        entries = self._board.read_all([f"rank/{rank}" for rank in range(self._size)])
        return Members(Member.from_json(entry) for entry in entries)

    def _pass(self, gate: str) -> None:
        found = self._board.wait(gate, self._until)
        if not found:  # too late: unless the gate is opened in this moment, all give up
            late = self._incomplete(gate)
            found = self._board.swap(gate, "", _fault(late))
            if found == _fault(late):
                raise late
        if found != OPENED:
            kind, text = json.loads(found)
            raise _FAULTS[kind](text)

    def _tell(self, gate: str, error: BaseException) -> None:
        """Let all know why this worker gives up, unless the gate has been passed already."""
        if not isinstance(error, TelegradError):
            error = RendezvousError(f"{self._me} gave up while the group formed: {type(error).__name__}")
        try:
            self._root.write(SERVED, OVER)
            self._board.swap(gate, "", _fault(error))
            self._leave("told", self._board.count("here", 0))
        except RendezvousError:
            pass  # the store was lost, as those who wait will see for themselves

    def _leave(self, door: str, count: int) -> None:
        """Go; the worker of rank 0, who may serve the store, goes last."""
        try:
            if self._board.count(door) >= count:
                self._board.write(f"{door}/all", OPENED)
            if self._me.id == 0:
                self._board.wait(f"{door}/all", monotonic() + LINGER)
        except RendezvousError:
            pass  # whoever served it did not wait any longer

    def _incomplete(self, gate: str) -> GroupIncomplete:
        missing = [str(rank) for rank in range(self._size) if not self._board.read(f"rank/{rank}")]
        who = f"rank {', '.join(missing)} did not come" if missing else "a worker came, but ended before all had met"
        return GroupIncomplete(
            f"the group of {self._size} workers is not {gate} after {self._timeout:g} s: {who}. "
            "Look at those workers' logs, or allow more time with rpc_timeout"
        )


def _fault(error: BaseException) -> str:
    kind = next(kind for kind, fault in _FAULTS.items() if isinstance(error, fault) or fault is RendezvousError)
    return json.dumps([kind, str(error)])


def _taken(what: str, first: Member, second: Member) -> WorkerTaken:
    return WorkerTaken(
        f"the {what} is not unique, two workers claim it: {first} and {second}. Give each its own, and use a fresh "
        "store (another port or file) if one of them belongs to an earlier run"
    )


def _agree(board: Board, me: Member, size: int, key: bytes | None) -> bytes:
    """The group's key: given to all, or made by the first to come.

    The first worker's terms hold. Of a given key they show only a salted fingerprint.

    Raises:
        AuthenticationFailed: not all were given the same key.
        RendezvousError: the workers expect groups of different sizes.
    """
    salt = secrets.token_hex(16)
    terms = [size, salt, _fingerprint(salt, key), "" if key else secrets.token_hex(32), str(me)]
    theirs, salt, fingerprint, made, first = json.loads(board.swap("terms", "", json.dumps(terms)))
    if theirs != size:
        raise RendezvousError(
            f"{me} expects a group of {size} workers, but {first} one of {theirs}: give all the same world_size"
        )
    if not hmac.compare_digest(fingerprint, _fingerprint(salt, key)):
        given = "different keys" if key and fingerprint else "a key to one of them only"
        raise AuthenticationFailed(
            f"{me} and {first} were given {given}: give all workers the same one "
            "(TELEGRAD_KEY, or key=... in the options), or none"
        )
    return key or str(made).encode()


def _fingerprint(salt: str, key: bytes | None) -> str:
    return hashlib.sha256(salt.encode() + key).hexdigest() if key else ""


class DynamicGroup:
    """A group that workers join and leave at any time; the store must live as long as it."""

    def __init__(self, store: Any, generation: int = 0) -> None:
        """`generation` counts the groups of this process, as of those of fixed size that meet in this store."""
        self._board = Board(store, "telegrad/dynamic")
        self._fixed = Board(store, f"telegrad/{generation}")
        self._me: Member | None = None
        self._place = ""  # where this worker's name is listed

    def join(
        self, me: Member, key: bytes | None, is_alive: Callable[[Member], bool] = lambda _: True
    ) -> tuple[Member, bytes]:
        """Claim a name and a rank, the lowest free one where `me.id` is -1; what came of it, and the group's key.

        A worker that crashed leaves its entries behind: they are taken over where `is_alive` denies that it lives.

        Raises:
            WorkerTaken: a member has that name or rank.
            AuthenticationFailed: this worker's key is not that of the group.
            RendezvousError: a group of fixed size meets in this store.
        """
        if self._fixed.read("terms"):
            raise RendezvousError(
                "RPC group mixes statically and dynamically initialized members which is not supported. A group of "
                f"fixed size meets in this store, which {me} cannot join. Give world_size to all workers, or to none"
            )
        shared = _agree(self._board, me, -1, key)
        me = self._claim_rank(me, is_alive)
        try:
            self._claim(f"name/{me.name}", f"name {me.name!r}", me, is_alive)
        except BaseException:
            self._free(f"rank/{me.id}", me)
            raise
        self._place = f"listed/{self._board.count('listed')}"
        self._board.write(self._place, me.name)
        self._me = me
        return me, shared

    def _claim_rank(self, me: Member, is_alive: Callable[[Member], bool]) -> Member:
        if me.id >= 0:
            self._claim(f"rank/{me.id}", f"rank {me.id}", me, is_alive)
            return me
        for rank in range(MOST_RANKS):
            mine = me._replace(id=rank)
            entry = mine.to_json()
            if self._board.swap(f"rank/{rank}", "", entry) == entry:
                return mine
        raise RendezvousError(f"all {MOST_RANKS} ranks of the group are taken")

    def _claim(self, slot: str, what: str, me: Member, is_alive: Callable[[Member], bool]) -> None:
        entry = me.to_json()
        found = self._board.swap(slot, "", entry)
        while found != entry:
            other = Member.from_json(found)
            if is_alive(other):
                raise _taken(what, other, me)
            self._free(f"name/{other.name}", other)
            self._free(f"rank/{other.id}", other)
            found = self._board.swap(slot, "", entry)

    def _free(self, slot: str, member: Member) -> None:
        """Only where the slot is still that member's: swapped, since another may have it by now."""
        self._board.swap(slot, member.to_json(), "")

    def find(self, to: str | int) -> Member:
        """The member of that name or rank, as of now.

        Raises:
            UnknownWorker: there is none.
            RendezvousError: the store was lost.
        """
        found = self._board.read(f"name/{to}" if isinstance(to, str) else f"rank/{to}")
        if not found:
            raise unknown(to, self.list_names())
        return Member.from_json(found)

    def list_names(self) -> list[str]:
        """Who is in the group now, sorted."""
        listed = {self._board.read(f"listed/{place}") for place in range(1, self._board.count("listed", 0) + 1)}
        return sorted(name for name in listed if name and self._board.read(f"name/{name}"))

    def leave(self) -> None:
        """Free the name and the rank."""
        if self._me is None:
            return
        try:
            self._free(f"name/{self._me.name}", self._me)
            self._free(f"rank/{self._me.id}", self._me)
            self._board.write(self._place, "")
        except RendezvousError:
            pass  # the store has gone with the worker that served it
        self._me = None
