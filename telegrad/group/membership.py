"""Who is in the group, as one worker sees it, and who is told of it.

A worker hears of the end of another by its connections; where one broke, it knocks, since the other may live all the
same. In a dynamic group it also looks at the store every now and then, which keeps a count of changes; and whoever
finds that a member has died strikes it out there.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from telegrad.errors import CallTimeout, LeftEarly, PeerError, PeerLost, RendezvousError, ShutDown, StoreLost
from telegrad.group.address import knock
from telegrad.group.dynamic import DynamicGroup
from telegrad.group.members import Identity, Member, Members, WorkerInfo, info
from telegrad.group.post import Post
from telegrad.group.stores import Place, find_store
from telegrad.progress import Wait
from telegrad.threads import Background

LOOK = 0.25  # seconds between looks at the store
LOOK_FOR_ANOTHER = 1.0  # the same, at the place of a store that was lost
PATIENCE = 2.0  # seconds for a knock to be answered
KNOCKS = (0.0, 0.25, 1.0, 4.0)  # seconds before each; who is silent at the last is dead
LEFT, LOST = "left", "lost"

Act = Callable[[], None]  # what follows from a look, once no lock is held

log = logging.getLogger("telegrad")


class Greeting(NamedTuple):
    """Nothing; but the connection that brings it will tell of the receiver's end."""


class View(NamedTuple):
    """Who is there, by rank. Two of one worker with the same version are the same."""

    version: int
    workers: tuple[WorkerInfo, ...]


class _Doubt(NamedTuple):
    """A worker may have died; how often it was looked for, and when it is to be next."""

    who: Member
    knocks: int
    due: float


class Teller:
    """Calls the callbacks of users, one after the other, on a thread of its own."""

    def __init__(self, entered: Callable[[], None]) -> None:
        self._entered = entered
        self._queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread = Background("telegrad-members", self._main)

    def begin(self) -> None:
        """There is somebody to be told."""
        self._thread.want()

    def tell(self, callback: Callable[..., Any], *args: Any) -> None:
        self._queue.put((callback, args))

    def close(self) -> None:
        self._queue.put(None)

    def _main(self) -> None:
        self._entered()
        while (told := self._queue.get()) is not None:
            callback, args = told
            try:
                callback(*args)
            except Exception:
                log.exception("telegrad: a callback of on_join or on_leave failed for %s", args[0])


class Membership:
    """The members that this worker knows of."""

    def __init__(
        self,
        post: Post,
        me: Member,
        directory: Members | DynamicGroup,
        place: Place,
        entered: Callable[[], None],
    ) -> None:
        """`place` is where the store is served; `entered` is called first on the thread that calls users' callbacks."""
        self._post = post
        self._me = me
        self._group = directory if isinstance(directory, DynamicGroup) else None
        self._place = place
        self._teller = Teller(entered)
        # Guards what follows, up to _closed; this and _view are also loaded without.
        self._changed = threading.Condition()
        present = directory if isinstance(directory, Members) else [me]
        self._present = {member.incarnation: member for member in present}
        self._view: View | None = None  # of these, made when it is asked for
        self._version = 0  # of the view
        self._on_join: list[Callable[[WorkerInfo], Any]] = []
        self._on_leave: list[Callable[[WorkerInfo, str], Any]] = []
        self.gone: list[Callable[[Member], None]] = []  # called under the lock with who has gone: they just take note
        self._doubts: list[_Doubt] = []
        self._closed = False
        self._looking = threading.Lock()  # one look at the store at a time; guards what it has seen so far
        self._seen_changes = self._seen_orphans = 0
        self.lost: str = ""  # why the store of a dynamic group has gone, unless in order; stored once, before `ended`
        self.ended = threading.Event()  # it has gone, or `serve` shall end
        self._wake = threading.Event()
        self._watch = Background("telegrad-watch", self._main)
        post.on(Greeting, lambda *_: None)
        post.lost.append(self._on_lost)

    def begin(self) -> None:
        """The worker has joined."""
        if self._group is not None:
            self._look(self._group)
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
        """Whether nobody joins any more."""
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
            lambda: self._missing(wanted),
            worker=self._me.name,
        ) as wait:
            while lack := self._lack(wanted, role):
                if self._group is None or self._group.over:
                    raise PeerLost(f"wait_for_workers waits in vain: {lack}; {self._why_none_joins()}")
                left = until - monotonic()
                if left <= 0:
                    raise CallTimeout(f"wait_for_workers: after {timeout:g} s {lack}")
                wait.look()
                with self._changed:
                    self._changed.wait(min(left, LOOK))
        return self.workers()

    def wait_for_end(self) -> None:
        """Wait until a dynamic group ends, or this worker shall serve no more."""
        self.ended.wait()

    def _names(self, role: str = "") -> set[str]:
        with self._changed:
            return {member.name for member in self._present.values() if role in ("", member.role)}

    def _missing(self, wanted: int | Collection[str]) -> list[str]:
        """Who is not there, of those that are wanted by name."""
        names = self._names()
        return [] if isinstance(wanted, int) else [name for name in wanted if name not in names]

    def _lack(self, wanted: int | Collection[str], role: str = "") -> str:
        """What is not as wanted, or ""."""
        names = self._names(role)
        if isinstance(wanted, int):
            of_role = f" of role {role!r}" if role else ""
            there = f"there are {len(names)} workers{of_role}, not {wanted}: {', '.join(sorted(names)) or 'none'}"
            return "" if len(names) >= wanted else there
        missing = ", ".join(map(repr, self._missing(wanted)))
        return f"{missing} not there; there are {', '.join(sorted(names))}" if missing else ""

    def _why_none_joins(self) -> str:
        return self._group.over if self._group is not None else "nobody joins a group of fixed size once it has formed"

    def on_join(self, callback: Callable[[WorkerInfo], Any]) -> None:
        """Have `callback` called with each other worker: those that are there now, and those that come."""
        self._teller.begin()
        with self._changed:
            self._on_join.append(callback)
            for member in self._others():
                self._teller.tell(callback, info(member))

    def on_leave(self, callback: Callable[[WorkerInfo, str], Any]) -> None:
        """Have `callback` called with each worker that goes, and with "left" or "lost"."""
        self._teller.begin()
        with self._changed:
            self._on_leave.append(callback)
            others = self._others()
        self._greet(others)

    def _others(self) -> list[Member]:
        return [member for member in self._present.values() if member.incarnation != self._me.incarnation]

    def greet(self) -> None:
        """Have this worker hear of the end of any other."""
        with self._changed:
            others = self._others()
        self._greet(others)

    def _greet(self, members: list[Member]) -> None:
        for member in members:
            with contextlib.suppress(PeerError, RendezvousError):  # it has gone, as will be seen
                self._post.notify(member.name, Greeting())

    # What happens

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        """A connection has ended, or none could be made."""
        with self._changed:
            member = self._present.get(who.incarnation)
            if member is None or self._closed:
                return
            doubtful = not isinstance(reason, ShutDown)
            if doubtful:
                self._doubts.append(_Doubt(member, 0, monotonic()))
            elif self._group is None:
                self._take_out(member, LEFT if not isinstance(reason, LeftEarly) else LOST)
        if doubtful:
            self._watch.want()
        self._wake.set()

    def _take_out(self, member: Member, how: str) -> None:
        """With the lock held: a member has gone."""
        if self._present.pop(member.incarnation, None) is not None:
            self._new_version()
            for note in self.gone:
                note(member)
            for callback in self._on_leave:
                self._teller.tell(callback, info(member), how)
            self._changed.notify_all()

    def _new_version(self) -> None:
        self._version += 1
        self._view = None

    def _take_in(self, member: Member) -> None:
        """With the lock held: a member has come."""
        self._present[member.incarnation] = member
        self._new_version()
        if member.incarnation != self._me.incarnation:
            for callback in self._on_join:
                self._teller.tell(callback, info(member))
        self._changed.notify_all()

    # The thread that looks

    def _main(self) -> None:
        while not (self._closed or self._post.closed):
            try:
                pause = self._look_around()
            except Exception:
                log.exception("telegrad: the watch of the group's members failed")
                pause = LOOK_FOR_ANOTHER
            self._wake.wait(pause)
            self._wake.clear()

    def _look_around(self) -> float | None:
        """See to what there is to see; seconds until the next time, None for when something happens."""
        with self._changed:
            doubts, self._doubts = self._doubts, []
        for doubt in doubts:
            if doubt.due > monotonic() or not self._settle(doubt):
                with self._changed:
                    self._doubts.append(doubt if doubt.due > monotonic() else _later(doubt))
        with self._changed:
            pause = LOOK if self._doubts else None
        if self._group is None:
            return pause
        if not self._group.over:
            self._look(self._group)
            return LOOK
        return LOOK_FOR_ANOTHER if self._look_for_another(self._group) else pause

    def _settle(self, doubt: _Doubt) -> bool:
        """Whether it is known now what has become of a worker."""
        answer = knock(doubt.who.tcp, PATIENCE)
        last = doubt.knocks + 1 == len(KNOCKS)
        if answer is not False and not last:
            return False
        if answer is not True:
            self._post.warn_lost(doubt.who.identity, f"worker {doubt.who.name!r} was lost: it does not answer any more")
            if self._group is not None and not self._group.over:
                with contextlib.suppress(StoreLost):
                    self._group.strike_out(doubt.who)
            with self._changed:
                self._take_out(doubt.who, LOST)
        return True

    def _look(self, group: DynamicGroup) -> None:
        acts: list[Act] = []
        with self._looking:
            if group.over:
                return  # another thread has just seen its end
            try:
                changes = group.changes()
                if changes != self._seen_changes:
                    self._see(group, acts)
                    self._seen_changes = changes
                    self._end_with(group, acts)
            except StoreLost as error:
                self._lose_store(group, str(error), acts)
        for act in acts:
            act()

    def _see(self, group: DynamicGroup, acts: list[Act]) -> None:
        with self._changed:
            present = dict(self._present)  # before the store is read: who is struck out meanwhile must not seem new
        members = {member.incarnation: member for member in group.members()}
        group.known = list(members.values())
        gone = [member for member in present.values() if member.incarnation not in members]
        ends = [(member, LOST if group.was_lost(member) else LEFT) for member in gone]
        new = [member for member in group.known if member.incarnation not in present]
        for member, how in ends:
            if how == LOST:
                acts.append(partial(self._note_lost, member))
        with self._changed:
            for member, how in ends:
                self._take_out(member, how)
            for member in new:
                self._take_in(member)
            greets = bool(self._on_leave)
        if greets:
            acts.append(partial(self._greet, new))
        for orphan in group.orphans(self._seen_orphans):
            self._seen_orphans += 1
            acts.append(
                partial(
                    log.warning,
                    "telegrad: worker %s is still in an earlier group, whose store at this place was lost, and cannot "
                    "be called from this one: have it shut down and join again",
                    orphan,
                )
            )

    def _note_lost(self, member: Member) -> None:
        if member.incarnation != self._me.incarnation:
            self._post.warn_lost(member.identity, f"worker {member.name!r} was lost, as another worker has found")
        else:
            log.warning("telegrad: worker %s was taken for dead by another: shut it down and join again", member)

    # The end of the store

    def _end_with(self, group: DynamicGroup, acts: list[Act]) -> None:
        server = group.server()
        if server and server != str(self._me) and group.ended():
            self._store_gone(group, f"the group has ended: {server}, which served its store, has left")
            acts.append(partial(log.info, "telegrad: %s", group.over))

    def _lose_store(self, group: DynamicGroup, why: str, acts: list[Act]) -> None:
        if self._closed:
            return
        self.lost = why
        self._store_gone(group, why)
        others = ", ".join(sorted(member.name for member in group.known if member.name != self._me.name))
        acts.append(
            partial(
                log.warning,
                "telegrad: worker %s has lost the group's store: %s. Nobody can join or be looked up any more; calls "
                "among those who are known here (%s) go on. To be in a group again, shut down and join the one of a "
                "new rank 0",
                self._me,
                why,
                others or "nobody",
            )
        )

    def _store_gone(self, group: DynamicGroup, why: str) -> None:
        group.over = why
        self.ended.set()
        with self._changed:
            self._changed.notify_all()

    def _look_for_another(self, group: DynamicGroup) -> bool:
        """Whether another group may yet meet where the store was lost; where one does, each is told of the other."""
        host, port = self._place
        if not self.lost or host is None or port is None:
            return False
        try:
            other = group.leave_word(find_store(host, port, 0), self._me)
        except RendezvousError:
            return True
        if other:
            log.warning(
                "telegrad: another group meets at %s:%s now, with %s; worker %s is not in it: shut down and join again",
                host,
                port,
                other,
                self._me,
            )
        return not other

    def __repr__(self) -> str:
        watched = "a dynamic group" if self._group is not None else "a group of fixed size"
        state = ", closed" if self._closed else f", lost: {self.lost}" if self.lost else ""
        return f"<Membership of {self._me.name!r} in {watched}: {len(self._present)} present{state}>"


def _later(doubt: _Doubt) -> _Doubt:
    return _Doubt(doubt.who, doubt.knocks + 1, monotonic() + KNOCKS[doubt.knocks + 1])
