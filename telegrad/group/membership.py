"""Who is in the group, as one worker sees it, and who is told of it.

A worker hears of the end of another by its connections; where one broke, it knocks, since the other may live all the
same. In a dynamic group it also looks at the store every now and then, which keeps a count of changes; and whoever
finds that a member has died strikes it out there. Where the store is another (`takeover.py`), nobody comes or goes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection
from functools import partial
from math import inf
from time import monotonic
from typing import Any, NamedTuple

from telegrad.errors import (
    CallTimeout,
    LeftEarly,
    PeerError,
    PeerLost,
    PeerSilent,
    RendezvousError,
    ShutDown,
    StoreLost,
    StoreUntrusted,
    UnknownWorker,
)
from telegrad.group.directory import LEFT, LOST, Directory
from telegrad.group.doubts import Doubt, remember
from telegrad.group.dynamic import DynamicGroup
from telegrad.group.lacking import lack, missing
from telegrad.group.members import Identity, Member, Members, View, WorkerInfo, info
from telegrad.group.post import Post
from telegrad.group.requiring import Serving
from telegrad.group.succession import compared
from telegrad.group.takeover import Takeover
from telegrad.group.telling import Teller, found_lost
from telegrad.progress import Wait
from telegrad.threads import Background, Exclusive

LOOK = 0.25  # seconds between looks at the store
AGAIN = 1.0  # seconds until the next try, where a look has failed
MISSED = 2.0  # seconds for members to come over to another store, until others knock at them
PATIENCE = 2.0  # seconds for a knock to be answered

Act = Callable[[], None]  # what follows from a look, once no lock is held

log = logging.getLogger("telegrad")


class Greeting(NamedTuple):
    """Nothing; but the connection that brings it will tell of the receiver's end."""


class Membership:
    """The members that this worker knows of."""

    def __init__(
        self,
        post: Post,
        me: Member,
        directory: Members | DynamicGroup,
        entered: Callable[[], None],
    ) -> None:
        """`entered` is called first on the thread that calls users' callbacks."""
        self._post = post
        self._me = me
        self._group = directory if isinstance(directory, DynamicGroup) else None
        self.none_joins = "nobody joins a group of fixed size once it has formed"  # what is said there
        self._teller = Teller(entered)
        # Guards what follows, up to _closed; this and _view are also loaded without.
        self._changed = threading.Condition()
        present = directory if isinstance(directory, Members) else [*directory.known, me]
        self._present = {member.incarnation: member for member in present}
        self._view: View | None = None  # of these, made when it is asked for
        self._version = 0  # of the view
        self.gone: list[Callable[[Member], None]] = []  # called under the lock with who has gone: they just take note
        self._doubts: list[Doubt] = []
        self._gone: dict[str, str] = {}  # how those went that were members, by incarnation
        self._silent: set[str] = set()  # the incarnations of those who were stopped; they may be listed still
        self._lost_unseen: dict[str, PeerError] = {}  # by the incarnations of workers not seen in the store yet
        self._parted: set[str] = set()  # the incarnations of those who have said that they shut down
        self._closed = False
        self._looking = Exclusive("a look at the store")  # one at a time; guards what it has seen so far
        self._directory: Directory | None = None  # where it has looked
        self._seen_changes = self._seen_orphans = 0
        self._met: set[str] = set()  # who was listed there
        self._missed_at = inf  # when those who are not are knocked at
        self.serving = Serving(me)
        self._wake = threading.Event()
        self._watch = Background("telegrad-watch", self._main)
        self._takeover = Takeover(post, me, self._group, self, self._wake.set) if self._group is not None else None
        post.on(Greeting, lambda *_: None)
        post.lost.append(self._on_lost)

    def begin(self) -> None:
        """The worker has joined."""
        if self._group is not None:
            self._watch.want()

    def present(self) -> list[Member]:
        """All who are, by rank."""
        with self._changed:
            return sorted(self._present.values(), key=lambda member: member.id)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._teller.close()
        self._wake.set()
        self._watch.join(PATIENCE)  # torch aborts a process that ends while a thread is in one of its stores
        if self._takeover is not None:
            self._takeover.close()

    # What users ask

    def workers(self) -> list[WorkerInfo]:
        """Who is there now, by rank."""
        self.refresh()
        return list(self.view().workers)

    def view(self) -> View:
        """Who was there at the last look."""
        view = self._view
        if view is None:
            with self._changed:
                present = sorted(self._present.values(), key=lambda member: member.id)
                view = self._view = View(self._version, tuple(map(info, present)))
        return view

    @property
    def is_fixed(self) -> bool:
        return self._group is None

    def refresh(self) -> None:
        """See what is new in the store of a dynamic group."""
        if self._group is not None and not self._group.over:
            self._look(self._group)

    def wait_for(self, wanted: int | Collection[str], timeout: float, role: str = "") -> list[WorkerInfo]:
        """Wait until so many workers, of that role if one is given, or those of these names, are there.

        Raises:
            CallTimeout: they did not come in time.
            PeerLost: they cannot come any more.
        """
        until = monotonic() + timeout if timeout > 0 else float("inf")
        self.refresh()
        with Wait(
            "wait_for_workers",
            lambda: f"wait_for_workers: {self._lack(wanted, role)}",
            lambda: missing(self._names(), wanted),
            worker=self._me.name,
        ) as wait:
            while few := self._lack(wanted, role):
                if self._group is None or self._group.over:
                    raise PeerLost(f"wait_for_workers waits in vain: {few}; {self._why_none_joins()}")
                left = until - monotonic()
                if left <= 0:
                    raise CallTimeout(f"wait_for_workers: after {timeout:g} s {few}")
                wait.look()
                with self._changed:
                    self._changed.wait(min(left, LOOK))
        return self.workers()

    def wait_for_end(self, required: list[Member]) -> None:
        """Wait until a dynamic group ends, this worker shall serve no more, or one of those who are required dies."""
        with self._changed:
            self.serving.begin(required, self._gone)
        self._greet(required)
        self.serving.ended.wait()

    def _names(self, role: str = "") -> set[str]:
        with self._changed:
            return {member.name for member in self._present.values() if role in ("", member.role)}

    def _lack(self, wanted: int | Collection[str], role: str) -> str:
        return lack(self._names(role if isinstance(wanted, int) else ""), wanted, role)

    def _why_none_joins(self) -> str:
        return self._group.over if self._group is not None else self.none_joins

    def on_join(self, callback: Callable[[WorkerInfo], Any]) -> None:
        """Have `callback` called with each other worker: those that are there now, and those that come."""
        self._teller.begin()
        with self._changed:
            self._teller.of_joins.append(callback)
            for member in self._others():
                self._teller.tell(callback, info(member))

    def on_leave(self, callback: Callable[[WorkerInfo, str], Any]) -> None:
        """Have `callback` called with each worker that goes, and with "left" or "lost"."""
        self._hear_of_ends(self._teller.of_ends, callback)

    def on_lost(self, callback: Callable[[WorkerInfo, Exception], Any]) -> None:
        """Have `callback` called with each worker that is lost, and with the reason."""
        self._hear_of_ends(self._teller.of_losses, callback)

    def _hear_of_ends(self, told: list[Any], callback: Callable[..., Any]) -> None:
        self._teller.begin()
        with self._changed:
            told.append(callback)
        self.greet()

    def _others(self) -> list[Member]:
        return [member for member in self._present.values() if member.incarnation != self._me.incarnation]

    def greet(self) -> None:
        """Have this worker hear of the end of any other."""
        with self._changed:
            others = self._others()
        self._greet(others)

    def _greet(self, members: list[Member]) -> None:
        for member in members:
            with contextlib.suppress(PeerError, RendezvousError, UnknownWorker):  # it has gone, as will be seen
                self._post.notify(member.name, Greeting())

    # What happens

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        """A connection has ended, or none could be made."""
        if isinstance(reason.__cause__, PeerSilent):
            reason = reason.__cause__
        with self._changed:
            member = self._present.get(who.incarnation)
            if member is None and who.incarnation not in self._gone:
                remember(self._lost_unseen, who.incarnation, reason)
            if member is None or self._closed:
                return
            if parted := isinstance(reason, ShutDown):
                self._parted.add(who.incarnation)
            doubtful = not parted or (self._takeover is not None and self._takeover.between)
            if doubtful:
                self._doubts.append(Doubt(member, 0, monotonic(), reason))
                if isinstance(reason, PeerSilent):  # at once: who is silent may serve the store
                    self._silent.add(member.incarnation)
                    self._take_out(member, reason)
            elif self._group is None:
                self._take_out(member, reason if isinstance(reason, LeftEarly) else None)
        if doubtful:
            self._watch.want()
        self._wake.set()

    def _take_out(self, member: Member, lost: PeerError | None) -> None:
        """With the lock held: a member has gone; in order, where there is no reason for its loss."""
        if self._present.pop(member.incarnation, None) is not None:
            how = LOST if lost else LEFT
            self.serving.miss(member, how)
            self._parted.discard(member.incarnation)
            remember(self._gone, member.incarnation, how)
            self._new_version()
            for note in self.gone:
                note(member)
            self._teller.gone(member, lost)
            self._changed.notify_all()

    def _new_version(self) -> None:
        self._version += 1
        self._view = None

    def _take_in(self, member: Member) -> None:
        """With the lock held: a member has come; it may have been called, and lost, before it was seen in the store."""
        self._present[member.incarnation] = member
        if (reason := self._lost_unseen.pop(member.incarnation, None)) is not None:
            self._parted |= {member.incarnation} if isinstance(reason, ShutDown) else set()
            self._doubts.append(Doubt(member, 0, monotonic(), reason))
        self._new_version()
        if member.incarnation != self._me.incarnation:
            self._teller.come(member)
        self._changed.notify_all()

    # The thread that looks

    def _main(self) -> None:
        while not (self._closed or self._post.closed):
            try:
                pause = self._look_around()
            except StoreUntrusted as error:
                if self._group is not None:
                    self._group.distrust(error, "the members stay as they are known")
                pause = AGAIN
            except Exception:
                log.exception("telegrad: the watch of the group's members failed")
                pause = AGAIN
            self._wake.wait(pause)
            self._wake.clear()

    def _look_around(self) -> float | None:
        """See to what there is to see; seconds until the next time, None for when something happens."""
        for doubt in [each for each in self._doubts.copy() if each.due <= monotonic()]:
            left = [doubt._replace(due=monotonic() + 2 * AGAIN)]  # should this raise: the next look is for the rest
            try:
                left = self._settle(doubt)
            finally:
                with self._changed:
                    self._doubts.remove(doubt)
                    self._doubts += left
        pause = LOOK if self._doubts else None
        if self._group is None or self._takeover is None or self._group.over:
            return pause
        if not self.serving.leaves:  # it leaves by itself, and is no successor
            step = self._takeover.step()
            pause = LOOK if step is None else step
        self._look(self._group)
        return pause

    def _settle(self, doubt: Doubt) -> list[Doubt]:
        """See what has become of a worker; return what is still in doubt."""
        fate = doubt.after(doubt.knock(), monotonic())
        if isinstance(fate, Doubt):
            return [fate]
        if fate:
            who = doubt.who
            how = self._gone.get(who.incarnation, LEFT if who.incarnation in self._parted else LOST)
            if how == LOST:
                self._post.warn_lost(who.identity, f"worker {who.name!r} was lost: it does not answer any more")
            if self._group is not None and not self._group.over:
                if who.incarnation == self._group.store.incarnation:
                    self._group.directory.board.close(f"{who} served it")  # torch would say so at length
                self._group.note_gone(who, how)
            with self._changed:
                self._take_out(who, doubt.why if how == LOST else None)
        elif self._teller.hears_of_ends:  # it lives, and its next end shall be heard of, too
            self._greet([doubt.who])
        return []

    def doubt(self, member: Member) -> None:
        """See whether it lives."""
        with self._changed:
            if member.incarnation != self._me.incarnation:
                self._doubts.append(Doubt(member, 0, monotonic(), found_lost(member)))
        self._wake.set()

    def lately_lost(self) -> list[str]:
        """The incarnations of those who died, as far as others may not know it."""
        with self._changed:
            return [incarnation for incarnation, how in self._gone.items() if how == LOST]

    def _look(self, group: DynamicGroup) -> None:
        acts: list[Act] = []
        with self._looking:
            if group.over or self._closed:
                return  # another thread has just seen its end
            try:
                directory = self._directory_of(group)
                group.renew()
                changes = directory.changes()
                missed = monotonic() >= self._missed_at
                if missed or changes != self._seen_changes:
                    self._see(group, directory, acts, missed)
                    self._seen_changes = changes
                    self._end_with(group, acts)
            except StoreLost as error:
                self._lose_store(group, str(error))
            except StoreUntrusted as error:
                acts.append(partial(group.distrust, error, "the members stay as they are known"))
        for act in acts:
            act()

    def _directory_of(self, group: DynamicGroup) -> Directory:
        """Where to look; in another store than before, those who are not listed may be about to come."""
        directory = group.directory
        if directory is not self._directory:
            self._missed_at = monotonic() + MISSED if self._directory is not None else inf
            self._directory = directory
            self._met = set()
            self._seen_changes, self._seen_orphans = -1, 0
        return directory

    def _see(self, group: DynamicGroup, directory: Directory, acts: list[Act], missed: bool) -> None:
        with self._changed:
            present, gone = dict(self._present), dict(self._gone)  # before the store is read, so that none seems new
        members = {member.incarnation: member for member in directory.members()}
        self._post.forget_names(members)  # who was struck out may live, and another have come under its name
        group.homes = directory.homes()
        seen = compared(present, members, self._met, gone)
        ends = [(present[each], directory.how_gone(each) or LEFT) for each in seen.gone]
        told = {each: directory.how_gone(each) for each in seen.missing}
        ends += [(present[each], how) for each, how in told.items() if how]
        awaited = [present[each] for each, how in told.items() if not how]
        self._met = set(members)
        group.awaited = awaited
        group.known = [*members.values(), *awaited]
        acts += [partial(self._note_lost, member) for member, how in ends if how == LOST]
        acts += [partial(self._end_ghost, group, members[each], gone[each]) for each in seen.ghosts]
        if missed:
            self._missed_at = inf
            acts += [partial(self._call_over, member) for member in awaited]
        new = [members[each] for each in seen.new]
        with self._changed:
            for member, how in ends:
                self._take_out(member, found_lost(member) if how == LOST else None)
            for member in new:
                self._take_in(member)
        if self._teller.hears_of_ends:
            acts.append(partial(self._greet, new))
        moved = directory.moved()
        if moved is not None and self._takeover is not None:
            self._takeover.go_to(moved)
        for orphan in directory.orphans(self._seen_orphans):
            self._seen_orphans += 1
            acts.append(
                partial(
                    log.warning,
                    "telegrad: worker %s is still in an earlier group, which has its store elsewhere now, and cannot "
                    "be called from this one: have it shut down and join again",
                    orphan,
                )
            )

    def _end_ghost(self, group: DynamicGroup, member: Member, how: str) -> None:
        """One that is listed though it has gone: by who did not know it, unless it was taken for dead here."""
        if how == LOST and member.incarnation not in self._silent:
            self.doubt(member)
            return
        group.note_gone(member, how)

    def _call_over(self, member: Member) -> None:
        """One that has not come to this store: it has died, or does not know of it."""
        self.doubt(member)
        if self._takeover is not None:
            self._takeover.remind(member)

    def _note_lost(self, member: Member) -> None:
        if member.incarnation != self._me.incarnation:
            self._post.warn_lost(member.identity, str(found_lost(member)))
        else:
            log.warning("telegrad: worker %s was taken for dead by another: shut it down and join again", member)

    # The end of the group, and of its store

    def _end_with(self, group: DynamicGroup, acts: list[Act]) -> None:
        if group.ended():
            self.serving.ended.set()
            acts.append(partial(log.info, "telegrad: the group has ended for those who only serve: its first has left"))
        group.server_leaves()

    def _lose_store(self, group: DynamicGroup, why: str) -> None:
        if self.serving.leaves:
            group.end(f"the group has ended: {why}")
        elif self._takeover is not None and not self._takeover.between:
            self._takeover.report()

    def __repr__(self) -> str:
        return f"<Membership of {self._me.name!r}: {len(self._present)} present{', closed' * self._closed}>"
