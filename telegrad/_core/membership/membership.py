"""The members of the group, as one worker sees them, and callbacks for changes.

A worker detects the end of another one by its connections. When a connection breaks, it probes the other worker, which
may still be alive.

In a dynamic group, only the directory decides joins and departures (`dynamic.py`). If the kernel of a member's host
refuses connections to its port, the worker asks the directory to remove the member, and waits for the result: the
member may have left normally. Only if the directory does not answer, the worker removes the member from its own view. A
silent or unreachable member may be alive, and reachable for others: the directory decides, when the lease of that
member ends. Each worker keeps a connection to the next one by rank, so some worker notices at once when a process dies.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from telegrad._core import forks
from telegrad._core.membership.dynamic import HAS_LEFT, UNUSABLE, DynamicGroup
from telegrad._core.membership.leaving import LEAVES, MessageSender, ServeState
from telegrad._core.membership.members import (
    Identity,
    Member,
    Members,
    View,
    WorkerInfo,
    describe_missing,
    info,
    missing_names,
)
from telegrad._core.membership.registry import LEFT, LOST, Change, MemberGone, MemberJoined
from telegrad._core.membership.suspects import Probes, Suspect, is_broken, remember
from telegrad._core.texts import Wait
from telegrad._core.threads import Background, program_has_ended, results
from telegrad.errors import CallTimeout, LeftEarly, PeerError, PeerLost, PeerSilent, ShutDown, TelegradError

LOOK = 0.25  # seconds between two polls while waiting
AGAIN = 1.0  # seconds until the retry after a failed probe
PATIENCE = 2.0  # seconds for the probing thread to end
ALONE = 30.0  # seconds in which other workers should join one that serves

log = logging.getLogger("telegrad")


class CallbackThread:
    """Calls the users' callbacks, one at a time, on its own thread. Its owner guards its lists."""

    def __init__(self, entered: Callable[[], None]) -> None:
        self.of_joins: list[Callable[[WorkerInfo], Any]] = []
        # Called with a member that is gone, and the reason of its loss or None; each schedules a callback.
        self.of_ends: list[Callable[[Member, Exception | None], None]] = []
        self._entered = entered
        self._queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.thread = Background("telegrad-members", self._main)  # started with the first callback

    def tell(self, callback: Callable[..., Any], *args: Any) -> None:
        # The owner's lock is held, so callbacks run in the order of the changes. A put into a SimpleQueue never blocks.
        self._queue.put((callback, args))

    def close(self) -> None:
        self._queue.put(None)

    def _main(self) -> None:
        self._entered()
        while (told := self._queue.get()) is not None:
            callback, args = told
            try:
                callback(*args)
            except BaseException:  # sys.exit too, because it would end only this thread
                forks.exit_if_user_code_ended()
                log.exception("telegrad: a callback of on_join, on_leave or on_lost failed for %s", args[0])


class Greeting(NamedTuple):
    """An empty message: its sender lives, and will notice the end of the connection that carries it."""


class Membership:
    """The members that this worker knows."""

    def __init__(
        self, post: MessageSender, me: Member, directory: Members | DynamicGroup, entered: Callable[[], None]
    ) -> None:
        """`entered` is called first on the thread that calls users' callbacks."""
        self._post = post
        self._me = me
        self._group = directory if isinstance(directory, DynamicGroup) else None
        self.none_joins = "no worker joins a group of fixed size once it has formed"  # for messages about such groups
        self._teller = CallbackThread(entered)
        # Guards all below up to _closed, which is also read without it, like _view.
        self._changed = threading.Condition()
        present = directory if isinstance(directory, Members) else directory.members()
        self._present = {member.incarnation: member for member in present}
        self._view: View | None = None  # of the present members, created on demand
        self._version = 0  # of the view
        self.gone: list[Callable[[Member], None]] = []  # called under the lock with each gone member, to record it
        self.answered: list[Callable[[Member], None]] = []  # called with a suspected worker each time that it answers
        self.on_dead: Callable[[Identity, PeerError], None] = lambda *_: None  # called if no directory decides that
        self.returned: list[Callable[[Member], None]] = []  # called when such a worker answers again
        self._suspects: list[Suspect] = []
        self._suspected: set[str] = set()  # incarnations whose connection broke, until they answer or are taken out
        self._probes = Probes()  # used only by the probing thread
        # The last time, by incarnation, at which a connection to or from a present worker was made.
        self._reached: dict[str, float] = {}
        self._gone: dict[str, str] = {}  # how former members went, by incarnation
        self._silent: dict[str, Member] = {}  # those that were lost without an announcement, if no directory decides
        self._lost_unseen: dict[str, PeerError] = {}  # by the incarnations of workers not seen in the directory yet
        self._parted: set[str] = set()  # the incarnations of workers that announced their shutdown
        self._next = ""  # the incarnation of the next member by rank, to which this worker keeps a connection
        self._closed = False
        self.on_declared_lost: Callable[[], None] = lambda: None  # called when this worker is out of the group
        self.serving = ServeState(me)
        self._wake = threading.Event()
        self._watch = Background("telegrad-watch", self._main)
        post.on(Greeting, lambda sender, _: self._on_reached(sender))
        post.lost.append(self._on_lost)
        post.reached.append(self._on_reached)

    def begin(self) -> None:
        """Start watching; this worker has joined."""
        if self._group is not None:
            self._group.begin(self._apply, lambda: self._post.stands_for)
            self._watch_next()

    def present(self) -> list[Member]:
        with self._changed:
            return sorted(self._present.values(), key=lambda member: member.id)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.serving.ended.set()
        self._teller.close()
        self._wake.set()
        self._watch.join(PATIENCE)

    # For users

    def workers(self) -> list[WorkerInfo]:
        self.refresh()
        return list(self.view().workers)

    def view(self) -> View:
        """Return the workers known since the last refresh or change."""
        view = self._view
        if view is None:
            with self._changed:
                view = self._view = View(self._version, tuple(map(info, self.present())))
        return view

    @property
    def is_fixed(self) -> bool:
        return self._group is None

    def refresh(self) -> None:
        """Read the present members of a dynamic group. Without an answer of its directory, the known members stay."""
        if self._group is not None:
            with contextlib.suppress(*UNUSABLE):
                self._group.refresh()

    def wait_for(self, wanted: int | Collection[str], timeout: float, role: str = "") -> list[WorkerInfo]:
        """Wait until as many workers as wanted (of that role if given), or workers with the wanted names, are present;
        raise CallTimeout if they did not join in time, PeerLost if they cannot join any more, ShutDown if this worker
        leaves."""
        until = monotonic() + timeout if timeout > 0 else float("inf")
        self.refresh()
        with Wait(
            "wait_for_workers",
            lambda: f"wait_for_workers: {self._lack(wanted, role)}",
            lambda: missing_names(self._names(), wanted),
            worker=self._me.name,
        ) as wait:
            while few := self._lack(wanted, role):
                why = self._group.over if self._group is not None else self.none_joins
                if why not in ("", HAS_LEFT):
                    raise PeerLost(f"wait_for_workers cannot succeed: {few}; {why}")
                if self._closed:
                    raise ShutDown(LEAVES.format(self._me.name))
                left = until - monotonic()
                if left <= 0:
                    raise CallTimeout(f"wait_for_workers timed out after {timeout:g} s: {few}")
                wait.look()
                with self._changed:
                    self._changed.wait(min(left, LOOK))
        return list(self.view().workers)

    def wait_for_end(self, required: Sequence[Member]) -> None:
        """Wait until a dynamic group ends, this worker leaves or must stop serving, or a required worker dies."""
        with self._changed:
            self.serving.begin(required, self._gone)
        self._greet(required)
        if not self.serving.ended.wait(ALONE) and not self._others():
            log.warning(
                "telegrad: worker %r serves, and no other worker is in its group: it may have started after the "
                "others had ended. It serves until rank 0 joins and leaves; Ctrl-C ends it",
                self._me.name,
            )
        self.serving.ended.wait()

    def _names(self, role: str = "") -> set[str]:
        """Return the members of that role, if given. Others may replace those that are perhaps lost, or are leaving."""
        with self._changed:
            out = self._suspected | self._parted if self._group is not None else set()
            members = [member for life, member in self._present.items() if life not in out]
            return {member.name for member in members if role in ("", member.role)}

    def _lack(self, wanted: int | Collection[str], role: str) -> str:
        return describe_missing(self._names(role if isinstance(wanted, int) else ""), wanted, role)

    def on_join(self, callback: Callable[[WorkerInfo], Any]) -> None:
        """Call `callback` with each other worker: the present ones now, later ones when they join."""
        self._teller.thread.want()
        with self._changed:
            self._teller.of_joins.append(callback)
            for member in self._others():
                self._teller.tell(callback, info(member))

    def on_leave(self, callback: Callable[[WorkerInfo, str], Any]) -> None:
        """Call `callback` with each worker that goes, and with "left" or "lost"."""
        self._hear_of_ends(lambda member, lost: self._teller.tell(callback, info(member), LOST if lost else LEFT))

    def on_lost(self, callback: Callable[[WorkerInfo, Exception], Any]) -> None:
        """Call `callback` with each worker that is lost, and with the reason."""
        self._hear_of_ends(lambda member, lost: self._teller.tell(callback, info(member), lost) if lost else None)

    def _hear_of_ends(self, tell: Callable[[Member, Exception | None], None]) -> None:
        self._teller.thread.want()
        with self._changed:
            self._teller.of_ends.append(tell)
        self.greet()

    def _others(self) -> list[Member]:
        return [member for member in self.present() if member.incarnation != self._me.incarnation]

    def greet(self) -> None:
        """Open connections to all others, whose ends report the end of a worker."""
        self._greet(self._others())

    def _greet(self, members: Sequence[Member]) -> None:
        for member in members:
            with contextlib.suppress(TelegradError):  # gone, which will be noticed; or this worker cannot call it
                self._post.notify(member.name, Greeting())

    # Events

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        """Process the end of a connection, or a failure to connect."""
        # No connection could be made because the worker is silent: its silence is the reason.
        if isinstance(reason.__cause__, PeerSilent):
            reason = reason.__cause__
        with self._changed:
            member = self._present.get(who.incarnation)
            # A worker may call this one before the directory reports its join. Its loss is kept until then
            # (`_take_in`).
            if member is None and who.incarnation not in self._gone:
                remember(self._lost_unseen, who.incarnation, reason)
            if member is None or self._closed:
                return
            if parted := self._has_parted(reason):
                self._parted.add(who.incarnation)
            if self._group is not None and isinstance(reason, PeerSilent):
                return  # its lease decides
            # It is probed again anyway. Without this check the suspects may never end: each answer has messages sent
            # again (`answered`), these open a connection, and the next failure of that would be another suspect.
            if is_broken(reason) and any(suspect.who is member for suspect in self._suspects):
                return
            if not parted:
                self._suspect(member, reason)
            elif self._group is None:
                # In a dynamic group, the directory reports the departure.
                self._take_out(member, reason if isinstance(reason, LeftEarly) else None)
        if not (parted or program_has_ended()):  # no thread can begin then
            self._watch.want()
        self._wake.set()

    def _suspect(self, member: Member, reason: PeerError) -> None:
        self._suspects.append(Suspect(member, reason, monotonic(), monotonic()))
        self._suspected.add(member.incarnation)

    def _on_reached(self, who: Identity) -> None:
        """Note that a worker lives; take back a lost one that answers again, such as one that was stopped."""
        with self._changed:
            if (member := self._silent.pop(who.incarnation, None)) is not None:
                self._gone.pop(who.incarnation, None)
                self._take_in(member)
            self._suspected.discard(who.incarnation)
            if who.incarnation in self._present:
                self._reached[who.incarnation] = monotonic()
        if member is not None:
            self._post.note_return(who)
            list(results(self.returned, member))

    def _has_parted(self, reason: PeerError) -> bool:
        """Return True if that worker announced its departure. In a dynamic group, one that leaves early is lost."""
        return isinstance(reason, ShutDown) and (self._group is None or not isinstance(reason, LeftEarly))

    def _take_out(self, member: Member, lost: PeerError | None) -> None:
        """Remove a member; without a reason of its loss, it has left. Call it with the lock held."""
        if self._present.pop(member.incarnation, None) is not None:
            how = LOST if lost else LEFT
            self.serving.miss(member, how)
            self._parted.discard(member.incarnation)
            self._suspected.discard(member.incarnation)
            self._reached.pop(member.incarnation, None)
            remember(self._gone, member.incarnation, how)
            # It may be alive after all; then `_on_reached` takes it back. A worker that announced its departure does
            # not return.
            if self._group is None and lost is not None and not isinstance(lost, LeftEarly):
                self._silent[member.incarnation] = member
            self._new_version()
            list(results(self.gone, member))
            for tell in self._teller.of_ends:
                tell(member, lost)
            self._changed.notify_all()

    def _new_version(self) -> None:
        self._version += 1
        self._view = None

    def _take_in(self, member: Member) -> None:
        """Add a member, which may have been called and lost before it was seen here. Call it with the lock held."""
        self._present[member.incarnation] = member
        if (reason := self._lost_unseen.pop(member.incarnation, None)) is not None:
            self._parted |= {member.incarnation} if self._has_parted(reason) else set()
            if not isinstance(reason, PeerSilent):  # its lease decides
                self._suspect(member, reason)
        self._new_version()
        for callback in self._teller.of_joins if member.incarnation != self._me.incarnation else ():
            self._teller.tell(callback, info(member))
        self._changed.notify_all()

    # The probing thread

    def _main(self) -> None:
        while not (self._closed or self._post.closed):
            try:
                pause = self._check_suspects()
            except Exception:
                log.exception("telegrad: checking the group's members failed")
                pause = AGAIN
            self._wake.wait(pause)
            # `_on_lost` adds a suspect before it sets the event, so the next turn sees each suspect whose event is
            # cleared here.
            self._wake.clear()
        self._probes.close()

    def _check_suspects(self) -> float | None:
        """Probe the suspected workers; return the seconds until the next time, or None without suspects."""
        with self._changed:
            now = monotonic()
            due = [suspect for suspect in self._suspects if suspect.due <= now]
            self._suspects = [suspect for suspect in self._suspects if suspect.due > now]
        for suspect in due:
            self._probes.begin(suspect)
        for suspect, answer in self._probes.answers():
            # If `_settle` raises, neither this suspect nor the others may be dropped: this one is probed again a little
            # later.
            left = [suspect._replace(due=monotonic() + 2 * AGAIN)]
            try:
                left = self._settle(suspect, answer)
            finally:
                with self._changed:
                    self._suspects += left
            # It lives, but messages to it may have been lost with the broken connection: the barriers send them again.
            for told in self.answered if answer else ():
                told(suspect.who)
        if self._probes:
            return 0.0
        return min((max(0.0, min(suspect.due - monotonic(), LOOK)) for suspect in self._suspects), default=None)

    def _settle(self, suspect: Suspect, answer: bool | None) -> list[Suspect]:
        """Act on the answer to a probe; return the suspect if it is still one."""
        fate = suspect.after(answer, monotonic())
        if isinstance(fate, Suspect):
            return [fate]
        # A refused connection proves that the process is gone, but not how: the member may have left in order, and the
        # watch may not have reported that yet. The directory knows.
        if answer is False and self._group is not None:
            # A connection was made since: something between the two workers may have refused the probe.
            if self._reached.get(suspect.who.incarnation, suspect.begun) > suspect.begun:
                return [suspect.anew(monotonic())]
            why = f"worker {self._me.name!r} found that {suspect.evidence(answer)}"
            self._group.declare_lost(suspect.who, why, partial(self._find_dead, suspect, suspect.evidence(answer)))
        elif fate and self._group is None:
            self._find_dead(suspect, suspect.evidence(answer))
        elif self._teller.of_ends or suspect.who.incarnation == self._next:
            self._greet([suspect.who])  # it may be alive: connect, to notice its next end
        if not fate:
            with self._changed:
                self._suspected.discard(suspect.who.incarnation)
        return []

    def _find_dead(self, suspect: Suspect, evidence: str) -> None:
        """Remove a worker that is dead by that evidence, if no directory decides."""
        who = suspect.who
        with self._changed:
            if self._closed:
                return
            # It may have announced its departure, or been removed, while it was probed.
            how = self._gone.get(who.incarnation, LEFT if who.incarnation in self._parted else LOST)
            # A connection was made since, so the reason of the suspicion is over. `_on_reached` does not take back a
            # worker that is removed only after it was reached. The suspect is not dropped, because the worker may have
            # died before that connection was noted.
            if how == LOST and self._reached.get(who.incarnation, suspect.begun) > suspect.begun:
                self._suspects.append(suspect.anew(monotonic()))
                self._wake.set()  # this may be another thread than the probing one
                return
            self._take_out(who, suspect.why if how == LOST else None)
        if how == LOST:
            self._post.warn_lost(who.identity, f"worker {who.name!r} was lost: {evidence}")
            self.on_dead(who.identity, suspect.why)
            # It has answered since it was removed: `_on_reached`, on another thread, may have reported that first.
            if who.incarnation in self._present:
                self._post.note_return(who.identity)
                list(results(self.returned, who))

    def _watch_next(self) -> None:
        """Keep a connection to the next member of a dynamic group by rank."""
        with self._changed:
            others = self._others()
            after = [member for member in others if member.id > self._me.id]
            found = min(after or others, key=lambda member: member.id, default=None)
            is_new = found is not None and found.incarnation != self._next
            self._next = found.incarnation if found is not None else ""
        if found is not None and is_new:
            self._greet([found])

    # Changes in the directory of a dynamic group

    def _apply(self, change: Change) -> None:
        """Apply a change. Runs on the threads of `dynamic.py`, and on those that call `refresh`."""
        if isinstance(change, MemberJoined):
            member = change.registered.member
            with self._changed:
                # An incarnation joins only once, and this one is out.
                if member.incarnation in self._gone:
                    return
                self._take_in(member)
                is_suspected = bool(self._suspects)
            if is_suspected:  # it was lost before it was seen here
                self._watch.want()
                self._wake.set()
            if self._teller.of_ends:
                self._greet([member])
        elif isinstance(change, MemberGone):
            self._note_gone(change)
        else:
            log.info("telegrad: the group has ended for workers that only serve: %s", change.why)
            with self._changed:
                if change.how == LOST and not self.serving.ended.is_set():
                    self.serving.fail(f"the group of {self._me.name!r}, which only serves, has ended: {change.why}")
            self.serving.ended.set()
        assert self._group is not None
        self._watch_next()
        # A name or a rank may have another owner, and calls by it must find that one.
        self._post.forget_names([member.incarnation for member in self._group.members()])

    def _note_gone(self, change: MemberGone) -> None:
        with self._changed:
            member = self._present.get(change.life)
            if member is None or self._closed:
                return
            is_lost = change.how == LOST and change.life not in self._parted
            reason = PeerLost(f"worker {member.name!r} was lost: {change.why}") if is_lost else None
            self._take_out(member, reason)
        # Without the lock: the end of this worker waits for the probing thread, which takes that lock.
        if reason is not None and member.incarnation == self._me.incarnation:
            assert self._group is not None
            log.warning("telegrad: %s", self._group.over)
            self.on_declared_lost()
        elif reason is not None:
            self._post.warn_lost(member.identity, str(reason))
            self._post.cut(member.identity, reason)
