"""The worker of this process, how it starts, the members of its group, and the hooks of extensions in each worker."""

from telegrad._core.membership import join
from telegrad._core.membership.dynamic import UNUSABLE, DynamicGroup, ttl_of
from telegrad._core.membership.join import shows_life
from telegrad._core.membership.leaving import Leaving
from telegrad._core.membership.members import Identity, Member, View, WorkerInfo, listed
from telegrad._core.membership.membership import Membership
from telegrad._core.membership.registry import PUBLISHED, Change, Claim, LifeOver, MemberGone, Registry
from telegrad._core.rpc.cluster import check_free, enter_group
from telegrad._core.stores import stores
from telegrad._core.stores.raw_stores import reach_tcp, serve_on, serve_tcp
from telegrad._core.stores.stores import RendezvousStore
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker, WorkerExtension, register

__all__ = [
    "PUBLISHED", "UNUSABLE", "Change", "Claim", "DynamicGroup", "Identity", "Leaving", "LifeOver", "Member",
    "MemberGone", "Membership", "Registry", "RendezvousStore", "View", "Worker", "WorkerExtension", "WorkerInfo",
    "check_free", "current", "enter_group", "join", "listed", "reach_tcp", "register", "serve_on", "serve_tcp",
    "shows_life", "stores", "ttl_of",
]  # fmt: skip
