"""How a worker comes into its group, of whichever kind."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from telegrad.group.address import answers
from telegrad.group.dynamic import DynamicGroup, dynamic_group_lives, fixed_group_lives
from telegrad.group.members import Member, Members
from telegrad.group.rendezvous import Roster, StoreOver, join_static, mixed
from telegrad.group.stores import Meeting, join_store

KNOCK = 2.0  # seconds for a worker whose name or rank is wanted to show that it lives


class Joined(NamedTuple):
    """What came of it."""

    me: Member
    directory: Members | DynamicGroup
    key: bytes


def join(meeting: Meeting, me: Member, key: bytes | None, timeout: float) -> Joined:
    """Take part in the group that meets in a store.

    Raises:
        RendezvousError: the group could not be formed, or a group of the other kind meets there.
    """
    if meeting.world_size is not None:
        roster = _join_static(meeting, me, meeting.world_size, key, timeout)
        return Joined(roster.members.find(me.id), roster.members, roster.key)
    if fixed_group_lives(meeting.store, _is_alive):
        raise mixed(me)
    group = DynamicGroup(meeting.store, meeting.serves)
    me, shared = group.join(me, key, _is_alive)
    return Joined(me, group, shared)


def _join_static(meeting: Meeting, me: Member, size: int, key: bytes | None, timeout: float) -> Roster:
    """Meet the others in this store, or in the next at its place where this one was still that of another group."""
    until = monotonic() + timeout
    store = meeting.store
    while True:
        if dynamic_group_lives(store, _is_alive):
            raise mixed(me)
        try:
            return join_static(store, me, size, key, timeout, _is_alive, meeting.where, meeting.names)
        except StoreOver:
            host, port = meeting.place
            if host is None or port is None:
                raise
        timeout = until - monotonic()
        store = join_store(host, port, timeout)


def _is_alive(member: Member) -> bool:
    return answers(member.tcp, KNOCK)
