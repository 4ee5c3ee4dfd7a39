"""Joining a group of any kind."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple, TypeVar

from telegrad._core.directory.directory import (
    LONGEST_TTL,
    SHORTEST_TTL,
    Directory,
    DirectoryLost,
    DirectoryReset,
    LeaseLost,
)
from telegrad._core.joining.form_generations import DirectoryLease, JoinRequest
from telegrad._core.joining.quorum import Formed, lives_in
from telegrad._core.joining.rendezvous import COMPLETE, OPENED, ROUND, RankTable, StoreOver, join_static, terms_of
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member, Members
from telegrad._core.membership.registry import Registry
from telegrad._core.progress import Wait
from telegrad._core.security.keyring import Keyring
from telegrad._core.stores.address import knock
from telegrad._core.stores.find_directory import POINTER, Found, Pointer, connect, find_directory, write_pointer
from telegrad._core.stores.sealed_store import (
    KeyValueStore,
    SealedDirectory,
    SealedStore,
    SealRenewal,
    read_server_mark,
)
from telegrad._core.stores.stores import LONGEST, RendezvousStore, join_store, open_dynamic
from telegrad.errors import RendezvousError, StoreLost, TelegradError

T = TypeVar("T")
KNOCK = 2.0  # seconds for a worker whose name or rank is claimed to answer


class Joined(NamedTuple):
    me: Member
    directory: Members | DynamicGroup
    keys: Keyring  # bound to this group
    generation: Formed | None = None  # of an elastic group
    renewal: SealRenewal | None = None  # of a store that later workers read, if the key may be replaced


def join(meeting: RendezvousStore, me: Member, silence: float, timeout: float) -> Joined:
    """Join the group that meets in a store; in a dynamic one, with a lease of `silence` seconds.

    Raises:
        RendezvousError: the group could not be formed, or a group of the other kind meets there.
    """
    coming: JoinRequest | None = meeting.coming
    if coming is not None and coming.held is not None:
        return _join_elastic(meeting, coming, coming.held, me, timeout)
    if meeting.world_size is None:
        return _join_dynamic(meeting, me, silence, timeout)
    roster = _join_static(meeting, me, meeting.world_size, timeout)
    formed = Formed(roster.round, tuple(roster.members)) if coming is not None else None
    lasts = me.id == 0 and meeting.keys.may_change and not meeting.serves
    renewal = SealRenewal(meeting.store.renew) if lasts else None
    return Joined(roster.members.find(me.id), roster.members, meeting.keys.within(roster.group), formed, renewal)


def _join_dynamic(meeting: RendezvousStore, me: Member, silence: float, timeout: float) -> Joined:
    """Register in the directory of the group."""

    def enter(meeting: RendezvousStore, found: Found) -> Joined:
        if lives_in(found.directory, is_alive):
            raise mixed(me)
        group = DynamicGroup(found.directory, ttl_of(silence), found.launched)
        try:
            joined = group.join(me, shows_life)
            _point(meeting, found)
            store = _kept(meeting)
            renewal = _renewal(found.directory, store)
        except BaseException:
            group.leave()
            raise
        group.keeps(store, found.keeping)
        return Joined(joined, group, meeting.keys.within(group.identity), renewal=renewal)

    return _enter_directory(meeting, me, timeout, enter)


def _enter_directory(
    meeting: RendezvousStore, me: Member, timeout: float, enter: Callable[[RendezvousStore, Found], T]
) -> T:
    """Find the directory of the group, and return the result of `enter` with it and the store.

    Retries if the directory, or the store that points to it, is lost meanwhile.
    """
    until = monotonic() + min(timeout, LONGEST)
    with Wait(
        "init_rpc", lambda: f"the directory of the group at {meeting.where} was not found yet", place=meeting.where
    ) as wait:
        while True:
            try:
                if meeting.directory is not None:
                    found = Found(meeting.directory(), launched=meeting.launched)
                elif fixed_group_lives(meeting.store):
                    raise mixed(me)
                else:
                    found = find_directory(meeting.store, meeting.where, meeting.served, me.tcp[0], until, wait)
            except StoreLost:
                meeting = _reopened(meeting, until)
                continue
            except DirectoryLost:
                if monotonic() >= until:
                    raise
                wait.look()
                continue
            try:
                return enter(meeting, found)
            except BaseException as error:
                found.directory.close()
                if found.keeping is not None:
                    found.keeping.leave()  # others may have joined by now
                if isinstance(error, DirectoryLost | DirectoryReset | LeaseLost) and monotonic() < until:
                    wait.look()
                    continue
                raise


def _point(meeting: RendezvousStore, found: Found) -> None:
    """Write the pointer into a store that outlives the group: the last member before may have withdrawn it."""
    if found.pointer is not None and not read_server_mark(meeting.store):
        write_pointer(meeting.store, found.pointer)


def _kept(meeting: RendezvousStore) -> SealedStore | None:
    """Return the store if this worker serves it, or if no worker does: then it outlives the group."""
    stays = meeting.directory is None and not read_server_mark(meeting.store)
    return meeting.store if meeting.serves or stays else None


def _renewal(directory: Directory, store: SealedStore | None) -> SealRenewal | None:
    """Return the renewal of seals that later workers of the group need, if its key may be replaced."""
    if isinstance(directory, SealedDirectory):
        return SealRenewal(directory.renew_seals)
    return SealRenewal(store.renew) if store is not None and store.keys.may_change else None


def ttl_of(silence: float) -> float:
    """Return the ttl of a member's lease, for `silence` seconds after which a worker is lost; 0 means never."""
    return min(max(silence, SHORTEST_TTL), LONGEST_TTL) if silence else LONGEST_TTL


def _reopened(meeting: RendezvousStore, until: float) -> RendezvousStore:
    left = until - monotonic()
    host, port = meeting.place
    if host is None or port is None or left <= 0:
        raise StoreLost(f"the store at {meeting.where} was lost before this worker had joined")
    store, serves = open_dynamic((host, port), meeting.rank, meeting.keys, left)
    return meeting._replace(store=store, serves=serves)


def _join_static(meeting: RendezvousStore, me: Member, size: int, timeout: float) -> RankTable:
    """Meet the others in this store. If it still belonged to another group, use the next one at its place."""
    until = monotonic() + timeout
    store = meeting.store
    while True:
        if _directory_is_used(store):
            raise mixed(me)
        try:
            return join_static(store, me, size, timeout, is_alive, meeting.where, meeting.names)
        except StoreOver:
            host, port = meeting.place
            if host is None or port is None:
                raise
        timeout = until - monotonic()
        store = join_store(host, port, meeting.keys, timeout)


def _join_elastic(
    meeting: RendezvousStore, coming: JoinRequest, held: DirectoryLease, me: Member, timeout: float
) -> Joined:
    """Form the next generation in the directory; for the first one, find the directory."""

    def enter(meeting: RendezvousStore, found: Found) -> tuple[RendezvousStore, Found]:
        if _dynamic_group_lives(found.directory):
            raise mixed(me)
        held.hold(meeting, found)
        return meeting, found

    if held.found is None:
        _point(*_enter_directory(meeting, me, timeout, enter))
    else:
        held.serve_again()
    generation = coming.join(held, me, is_alive)
    members = Members(generation.members)
    mine = next(member for member in members if member.incarnation == me.incarnation)
    renewal = _renewal(held.directory, _kept(held.meet(0)))
    return Joined(mine, members, meeting.keys.within(generation.group), generation, renewal)


def _directory_is_used(store: SealedStore) -> bool:
    """Return True if this store points to the directory of a dynamic group with members, or of an elastic one."""
    text = KeyValueStore(store).read(POINTER)
    pointer = Pointer.from_json(text) if text else None
    if pointer is None or not knock(pointer.address, KNOCK):
        return False
    directory = connect(pointer, store.keys, KNOCK)
    try:
        return _dynamic_group_lives(directory) or lives_in(directory, is_alive)
    except TelegradError:  # it does not answer, or is now another program's
        return False
    finally:
        directory.close()


def _dynamic_group_lives(directory: Directory) -> bool:
    return any(is_alive(each.member) for each in Registry(directory).roster().members.values())


def mixed(me: Member) -> RendezvousError:
    return RendezvousError(
        f"RPC group mixes statically and dynamically initialized members which is not supported. {me} joined at a "
        "store that another kind of group uses. Give all workers world_size, or all of them min_workers or "
        "max_workers (an elastic group), or none of them any of these; or give each group a port or a file of its own"
    )


def fixed_group_lives(store: SealedStore) -> bool:
    """Return True if a group of fixed size forms in this store, or has formed and runs."""
    number = KeyValueStore(store).read(ROUND)
    board = KeyValueStore(store, f"telegrad/{number}")
    terms = terms_of(board) if number else None
    if terms is None or board.read(COMPLETE) not in ("", OPENED):
        return False
    entries = [board.read(f"rank/{rank}") for rank in range(terms.size)]
    return any(is_alive(Member.from_json(entry)) for entry in entries if entry)


def shows_life(member: Member) -> bool | None:
    """Return True if a program listens at the member's address, False if none does; None if its host is silent."""
    return knock(member.tcp, KNOCK)


def is_alive(member: Member) -> bool:
    """Return True if a program listens at the member's address."""
    return bool(knock(member.tcp, KNOCK))
