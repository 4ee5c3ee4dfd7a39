"""The members of a dynamic group in its directory.

    group                the identity of the group; the first worker writes it
    name/NAME            LIFE of the member that has this name
    rank/RANK            LIFE of the member that has this rank
    live/member/LIFE     what a member publishes about itself
    live/published/NAME  LIFE of the member that owns the value published under this name
    live/ended           how and why members that only serve must end; written anew for each such end

All members watch only the keys below `live/`: with each watched key, a start of n workers costs n * n events. LIFE is
the member's incarnation, which no other process ever has. The three keys of a member have its lease. They are deleted
together, and others can claim the name and the rank as soon as the lease has ended. The revision that created
`live/member/LIFE` is the member's epoch: of two workers with the same name, the later one has the higher epoch.

A member that leaves writes LEFT into `live/member/LIFE`, or LOST if its program ends without shutdown, before it
revokes its lease. A member that finds another one dead writes LOST there, with the reason, and revokes that lease. So
each watcher sees how a member has gone. A lease that ends without either was not renewed in time, which is a loss, too.
A member that sees the end of its own life must end, because another may have its name already.
"""

import contextlib
import itertools
import json
import random
import secrets
from collections.abc import Callable, Collection
from time import monotonic
from typing import NamedTuple

from telegrad._core.membership.members import Member
from telegrad._core.stores.directory import ABSENT, Compacted, Directory, Entry, Lease, LeaseLost
from telegrad.errors import RendezvousError, WorkerTaken

WATCHED = "live/"
MEMBERS, PUBLISHED, ENDED = f"{WATCHED}member/", f"{WATCHED}published/", f"{WATCHED}ended"
MOST_RANKS = 1 << 16
NEAR = 8  # numbers tried in sequence before some are skipped
LEFT, LOST = "left", "lost"
OVERTIME = 5.0  # seconds, in addition to one ttl, for the lease of an unreachable member to end
LOOK = 1.0  # seconds between two checks if it is reachable
EXPIRED = "it did not renew its lease in time"

IsAlive = Callable[[Member], bool | None]  # None: unknown


class LifeOver(RendezvousError):
    """Others may have seen this incarnation join and go, and refuse it: it cannot join any more."""


class Registered(NamedTuple):
    member: Member
    epoch: int


class Claim(NamedTuple):
    """The owner of a published value. Of two claims to one name, the later one has the higher token."""

    life: str  # of the owner; empty without an owner
    token: int  # the fencing token: the revision that created the key; without an owner, the one that deleted it


class MemberJoined(NamedTuple):
    registered: Registered


class MemberGone(NamedTuple):
    """A member has left (LEFT), or was lost (LOST)."""

    life: str
    how: str
    why: str


class Ended(NamedTuple):
    """The group has ended (LEFT), or was ended by a worker whose program failed (LOST)."""

    how: str
    why: str


class Claimed(NamedTuple):
    """A published value has another owner, or none."""

    name: str
    claim: Claim


Change = MemberJoined | MemberGone | Ended


class Roster(NamedTuple):
    """The members at one revision, and the owners of published values."""

    revision: int  # to watch from
    members: dict[str, Registered]  # by life
    claims: dict[str, Claim]  # by the names of the values


class Registry:
    """The view of a client on the group of a directory. Thread-safe."""

    def __init__(self, directory: Directory, clock: Callable[[], float] = monotonic) -> None:
        """`clock` is the clock of the lease ends that `directory` returns."""
        self._directory, self._clock = directory, clock

    # Joining and leaving

    def identify(self) -> tuple[str, bool]:
        """Return the identity of the group that meets here, and True if this call created it."""
        mine = secrets.token_hex(16)
        swap = self._directory.swap("group", mine.encode())
        assert swap.entry is not None
        return swap.entry.value.decode(), swap.done

    def reserve(self, me: Member, lease: Lease, is_alive: IsAlive, known: Collection[Member] = ()) -> Member:
        """Claim a name and a rank under a lease; return the member with them, ready for `publish`.

        A member without a rank (-1) gets the lowest free one from 1 on; rank 0 is for a worker that requests it. A
        member with a role and no name gets its role and the lowest number that makes a free name. If many workers join
        at once, the number may be slightly higher. Names and ranks of the `known` members are not tried.

        Raises:
            WorkerTaken: a member that is alive has the name or the rank.
            RendezvousError: all ranks are taken.
            LeaseLost: the lease ended meanwhile.
            DirectoryLost: the outcome is unknown; the end of the lease undoes the claims.
        """
        if me.id >= 0:
            self._claim(f"rank/{me.id}", f"rank {me.id}", me, lease, is_alive)
        else:
            ranks = {f"rank/{member.id}" for member in known}
            me = me._replace(id=self._claim_free("rank/", 1, ranks, me, lease))
        if me.name:
            self._claim(f"name/{me.name}", f"name {me.name!r}", me, lease, is_alive)
        else:
            names = {f"name/{member.name}" for member in known}
            me = me._replace(name=f"{me.role}{self._claim_free(f'name/{me.role}', 0, names, me, lease)}")
        return me

    def publish(self, me: Member, lease: Lease) -> Registered:
        """Publish a member, which completes its join. Raise LeaseLost if its lease has ended, and DirectoryLost if the
        outcome is unknown; another call finds it out."""
        swap = self._directory.swap(f"{MEMBERS}{me.incarnation}", me.to_json().encode(), ABSENT, lease)
        if swap.entry is None or swap.entry.lease != lease.id or _registered(swap.entry) is None:
            raise LeaseLost("another worker, or an earlier lease, has claimed the name or the rank")
        return Registered(me, swap.entry.created)

    def leave(self, me: Member, lease: Lease, lost: str = "", ends: bool = False) -> None:
        """Leave, and free the name and the rank.

        With the reason `lost`, it counts as lost. With `ends`, the group ends with it, unless it was out before.
        """
        how = LOST if lost else LEFT
        marked = self._mark(me.incarnation, how, lost)
        if marked is not None and ends:
            self.end(f"worker {me.name!r} was lost: {lost}" if lost else f"worker {me.name!r} has left", how)
        self._directory.revoke(lease)

    def declare_lost(self, life: str, why: str) -> bool:
        """Remove a member that has died; return False if it was out already."""
        entry = self._mark(life, LOST, why)
        if entry is None:
            return False
        self._directory.revoke(_holder(entry))
        return True

    def end(self, why: str, how: str = LEFT) -> None:
        """End the members that only serve, with an error if `how` is LOST. Later workers are not affected."""
        found, ended = self._read(ENDED), json.dumps([how, why]).encode()
        # It stays: workers that join later have a higher epoch, and one that has missed changes reads it.
        self._directory.swap(ENDED, ended, found.revision if found else ABSENT)

    def _mark(self, life: str, how: str, why: str) -> Entry | None:
        """Write how a member has gone; return its entry, or None if the member was out before."""
        key = f"{MEMBERS}{life}"
        while (found := self._read(key)) is not None and _registered(found) is not None:
            departure = json.dumps([how, why]).encode()
            # The mark gets the lease of the member: a key that is written without its lease leaves it, and would never
            # be deleted. LeaseLost means that another worker has removed the member meanwhile.
            with contextlib.suppress(LeaseLost):
                swap = self._directory.swap(key, departure, found.revision, _holder(found))
                if swap.done:
                    return swap.entry
        return None

    # Claims

    def _claim(self, key: str, what: str, me: Member, lease: Lease, is_alive: IsAlive) -> None:
        """Claim a key, even from a dead member. An unreachable one keeps it until its lease ends."""
        until = self._clock() + lease.ttl + OVERTIME
        while True:
            swap = self._directory.swap(key, me.incarnation.encode(), ABSENT, lease)
            if swap.done:
                return
            assert swap.entry is not None
            life = swap.entry.value.decode()
            registered = _registered(self._read(f"{MEMBERS}{life}"))
            if registered is None:
                self._end_join(swap.entry)
                continue
            other = registered.member
            lives = is_alive(other)
            # The directory does not delete the keys of a lease that is renewed. So an unreachable member that has its
            # lease for another whole ttl is alive.
            if lives or (lives is None and self._clock() > until):
                raise WorkerTaken(
                    f"the {what} is not unique, two workers claim it: {other} and {me}. Give each worker its own"
                )
            if lives is None:
                # Watch from the present revision: the directory may have forgotten the changes since the claim was
                # made, and would raise Compacted.
                since = self._directory.list(key).revision
                with contextlib.suppress(Compacted):
                    self._directory.watch(key, since, LOOK)
                # This loop may last longer than the lease of this worker, which no thread renews yet.
                self._directory.renew(lease)
            else:
                self.declare_lost(life, f"another worker claims its {what}, and it does not answer")

    def _end_join(self, claim: Entry) -> None:
        """End the lease of a worker that has claimed a key but is not a member: it died, or is gone.

        If it is about to join, one compare-and-set decides whether it is published or refused.
        """
        key = f"{MEMBERS}{claim.value.decode()}"
        departure = json.dumps([LOST, "another worker claims its name or rank"]).encode()
        with contextlib.suppress(LeaseLost):
            swap = self._directory.swap(key, departure, ABSENT, _holder(claim))
            if swap.entry is not None and _registered(swap.entry) is None:
                self._directory.revoke(_holder(claim))

    def _claim_free(self, prefix: str, first: int, taken: Collection[str], me: Member, lease: Lease) -> int:
        """Claim a prefix with the lowest free number, or with one close to it if many workers claim at once.

        `taken` are keys known to be taken; each refusal adds one.
        """
        numbers = (number for number in range(first, MOST_RANKS) if f"{prefix}{number}" not in taken)
        # Workers that join at the same moment would try the same numbers in sequence. The generator of the program is
        # not used: it must stay as the program has seeded it, and may have one seed on all workers.
        chance = random.Random(me.incarnation)
        for refused in itertools.count():
            skipped = chance.randrange(1 << min(max(refused - NEAR, 0), 12))
            number = next(itertools.islice(numbers, skipped, None), None)
            if number is None:
                break
            if self._directory.swap(f"{prefix}{number}", me.incarnation.encode(), ABSENT, lease).done:
                return number
        raise RendezvousError(f"no free number was found for {prefix!r} among {MOST_RANKS}")

    def claim(self, name: str, life: str, lease: Lease, is_alive: IsAlive = lambda _: None) -> Claim:
        """Claim a published value under a lease; return the claim of its owner, which may be another living member.

        Raises:
            LeaseLost: the lease has ended.
            DirectoryLost: the outcome is unknown; another call finds it out.
            InvalidArgument: the name is too long, or has a null character.
        """
        entry = self._directory.swap(f"{PUBLISHED}{name}", life.encode(), ABSENT, lease).entry
        assert entry is not None
        claim = _claim(entry)
        if claim.life == life:
            if entry.lease != lease.id:
                raise LeaseLost("the value is claimed by an earlier lease of this worker, which is about to end")
            return claim
        # No other worker may have watched the owner, so a dead owner is found here.
        owner = _registered(self._read(f"{MEMBERS}{claim.life}"))
        if owner is None or is_alive(owner.member) is not False:
            return claim
        self.declare_lost(claim.life, f"another worker publishes {name!r}, and its process is dead")
        return self.claim(name, life, lease, is_alive)

    def release(self, name: str, claim: Claim) -> None:
        """Delete the key of a published value, if this claim is still valid."""
        self._directory.swap(f"{PUBLISHED}{name}", None, claim.token)

    def owner(self, name: str) -> Claim | None:
        """Return the claim of the member that owns a published value."""
        entry = self._read(f"{PUBLISHED}{name}")
        return _claim(entry) if entry is not None else None

    # Reading

    def roster(self) -> Roster:
        """Return all members, and the owners of published values, possibly at a later revision."""
        # Read the members first: the watch begins at their revision. A claim that has changed since that revision is
        # reported again, which is harmless because its token is compared (`DynamicGroup._apply`). In the opposite
        # order, a change between the two lists would be missed.
        members = self._directory.list(MEMBERS)
        published = self._directory.list(PUBLISHED)
        told = ((entry.key.removeprefix(MEMBERS), _registered(entry)) for entry in members.entries)
        return Roster(
            members.revision,
            {life: registered for life, registered in told if registered is not None},
            {each.key.removeprefix(PUBLISHED): _claim(each) for each in published.entries},
        )

    def last_end(self) -> tuple[int, Ended] | None:
        """Return the last end of the group, and its revision."""
        entry = self._read(ENDED)
        return (entry.revision, Ended(*json.loads(entry.value.decode()))) if entry is not None else None

    def find(self, to: str | int) -> Registered | None:
        holder = self._read(f"name/{to}" if isinstance(to, str) else f"rank/{to}")
        return _registered(self._read(f"{MEMBERS}{holder.value.decode()}")) if holder is not None else None

    def watch(self, since: int, timeout: float) -> tuple[int, list[tuple[int, Change | Claimed]]]:
        """Wait for changes after a revision; return the revision to watch from next, and the changes with theirs. Raise
        Compacted if too much has changed (read the roster again), and DirectoryLost without an answer."""
        revision, events = self._directory.watch(WATCHED, since, timeout)
        read = ((at, self._change(key, entry, at)) for at, key, entry in events)
        return revision, [(at, change) for at, change in read if change is not None]

    @staticmethod
    def _change(key: str, entry: Entry | None, revision: int) -> Change | Claimed | None:
        if key == ENDED and entry is not None:
            return Ended(*json.loads(entry.value.decode()))
        if key.startswith(PUBLISHED):
            return Claimed(key[len(PUBLISHED) :], _claim(entry) if entry is not None else Claim("", revision))
        if not key.startswith(MEMBERS):
            return None
        life = key[len(MEMBERS) :]
        if entry is None:
            return MemberGone(life, LOST, EXPIRED)
        registered = _registered(entry)
        return MemberJoined(registered) if registered is not None else MemberGone(life, *json.loads(entry.value))

    def _read(self, key: str) -> Entry | None:
        return next((entry for entry in self._directory.list(key).entries if entry.key == key), None)


def _registered(entry: Entry | None) -> Registered | None:
    """Return the member that an entry describes, or None if it has gone."""
    if entry is None:
        return None
    parts = json.loads(entry.value)
    has_gone = parts[0] in (LEFT, LOST) and len(parts) == 2
    return None if has_gone else Registered(Member.of(parts), entry.created)


def _claim(entry: Entry) -> Claim:
    return Claim(entry.value.decode(), entry.created)


def _holder(entry: Entry) -> Lease:
    """Return the lease of a key, to delete or replace another member's key."""
    return Lease(entry.lease, 0.0, 0.0)
