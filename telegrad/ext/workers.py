"""The worker of this process, the members of its group, and hooks that an extension adds to each worker."""

from telegrad._core.membership.dynamic import UNUSABLE, DynamicGroup
from telegrad._core.membership.leaving import Leaving
from telegrad._core.membership.members import Identity, Member, View, WorkerInfo, listed
from telegrad._core.membership.membership import Membership
from telegrad._core.membership.registry import PUBLISHED, Change, Claim, LifeOver, MemberGone, Registry
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker, WorkerExtension, register

__all__ = [
    "PUBLISHED", "UNUSABLE", "Change", "Claim", "DynamicGroup", "Identity", "Leaving", "LifeOver", "Member",
    "MemberGone", "Membership", "Registry", "View", "Worker", "WorkerExtension", "WorkerInfo", "current", "listed",
    "register",
]  # fmt: skip
