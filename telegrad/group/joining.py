"""How a worker comes into its group, of whichever kind."""

from __future__ import annotations

import contextlib
from time import monotonic
from typing import NamedTuple

from telegrad.errors import StoreLost, StoreUnreachable
from telegrad.group.address import answers
from telegrad.group.dynamic import DynamicGroup, Moved, dynamic_group_lives, fixed_group_lives
from telegrad.group.generations import Coming, Formed, Ground, lives_at
from telegrad.group.members import Member, Members
from telegrad.group.rendezvous import Roster, StoreOver, Terms, join_static, mixed
from telegrad.group.renewing import Renewal
from telegrad.group.stores import LONGEST, Meeting, find_store, join_store, open_dynamic
from telegrad.keyring import Keyring

KNOCK = 2.0  # seconds for a worker whose name or rank is wanted to show that it lives
FOLLOW = 2.0  # seconds for the store that one which was given up names


class Joined(NamedTuple):
    """What came of it."""

    me: Member
    directory: Members | DynamicGroup
    keys: Keyring  # bound to this group
    generation: Formed | None = None  # of an elastic group
    renewal: Renewal | None = None  # of a store that outlives a group of fixed size


def join(meeting: Meeting, me: Member, timeout: float) -> Joined:
    """Take part in the group that meets in a store.

    Raises:
        RendezvousError: the group could not be formed, or a group of the other kind meets there.
    """
    coming: Coming | None = meeting.coming
    if coming is not None and coming.ground is not None:
        return _join_elastic(meeting, coming, coming.ground, me)
    if meeting.world_size is None:
        return _join_dynamic(meeting, me, timeout)
    if lives_at(meeting.store, is_alive):
        raise mixed(me)
    roster = _join_static(meeting, me, meeting.world_size, timeout)
    formed = Formed(roster.round, list(roster.members), 0) if coming is not None else None
    lasts = me.id == 0 and meeting.keys.may_change and not meeting.serves
    renewal = Renewal(meeting.store) if lasts else None
    return Joined(roster.members.find(me.id), roster.members, meeting.keys.within(roster.group), formed, renewal)


def _join_dynamic(meeting: Meeting, me: Member, timeout: float) -> Joined:
    """Come to where the group has its store now, which it may lose meanwhile."""
    until = monotonic() + min(timeout, LONGEST)
    while True:
        group = DynamicGroup(meeting.store, meeting.serves, meeting.places, meeting.place)
        try:
            if lives_at(meeting.store, is_alive) or fixed_group_lives(meeting.store, is_alive):
                raise mixed(me)
            me = group.join(me, is_alive)
            meeting.open_up()
            return Joined(me, group, meeting.keys.within(group.directory.board.group))
        except Moved as moved:
            meeting.open_up()  # it may be of this process, and tells others, too, where to go
            group.leave()
            meeting = _followed(meeting, moved, until - monotonic())
        except StoreLost:
            group.leave()
            left = until - monotonic()
            if not meeting.places or left <= 0:
                raise
            store, (host, port), serves = open_dynamic(meeting.places, meeting.rank, meeting.keys, left)
            meeting = meeting._replace(store=store, host=host, port=port, serves=serves)
        except BaseException:
            group.leave()
            raise


def _followed(meeting: Meeting, moved: Moved, left: float) -> Meeting:
    """The store that is held for the group's now; where it is not reached soon, what the places say then."""
    _, _, _, host, port = moved.store
    try:
        store = find_store(host, port, meeting.keys, max(0.0, min(left, FOLLOW)))
    except StoreUnreachable:
        if left <= 0 or not meeting.places:
            raise
        store, (host, port), serves = open_dynamic(meeting.places, meeting.rank, meeting.keys, left)
        return meeting._replace(store=store, host=host, port=port, serves=serves)
    return meeting._replace(store=store, host=host, port=port, serves=False)


def _join_static(meeting: Meeting, me: Member, size: int, timeout: float) -> Roster:
    """Meet the others in this store, or in the next at its place where this one was still that of another group."""
    until = monotonic() + timeout
    store = meeting.store
    while True:
        if dynamic_group_lives(store, is_alive):
            raise mixed(me)
        try:
            return join_static(store, me, size, timeout, is_alive, meeting.where, meeting.names)
        except StoreOver:
            host, port = meeting.place
            if host is None or port is None:
                raise
        timeout = until - monotonic()
        store = join_store(host, port, meeting.keys, timeout)


def _join_elastic(meeting: Meeting, coming: Coming, ground: Ground, me: Member) -> Joined:
    with contextlib.suppress(StoreLost):  # another will be found
        if fixed_group_lives(meeting.store, is_alive) or dynamic_group_lives(meeting.store, is_alive):
            raise mixed(me)
    generation = coming.join(ground, me, is_alive)
    group = Terms.from_json(generation.terms).group
    members = Members(generation.members)
    mine = next(member for member in members if member.incarnation == me.incarnation)
    return Joined(mine, members, meeting.keys.within(group), generation)


def is_alive(member: Member) -> bool:
    """Whether somebody listens where it did."""
    return answers(member.tcp, KNOCK)
