"""How the directory of a dynamic group comes to another store: the rim of succession.py.

All of it runs on the thread that watches the group (`membership.py`), but for `hear` and `report`. Who serves the new
store writes down what it knows, and lets newcomers in once all have listed themselves again, or after SETTLE seconds.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, Protocol

from telegrad.errors import PeerError, RendezvousError, StoreLost, UsageError
from telegrad.group.address import answers
from telegrad.group.asking import SilentStore
from telegrad.group.board import OPEN, SERVED, Board
from telegrad.group.directory import LEFT, Directory
from telegrad.group.dynamic import DynamicGroup
from telegrad.group.members import Identity, Member
from telegrad.group.places import Spot, is_free, is_here
from telegrad.group.post import Post
from telegrad.group.serving import serve_anew
from telegrad.group.stores import find_store, spot
from telegrad.group.succession import Act, Look, Orphaned, Seat, Serve, Succession, Tell, Use, Word

SETTLE = 0.5  # seconds
STEP = 0.05  # seconds between looks while the store is lost
REMIND = 1.0  # seconds between words to those who have not come over
ELSEWHERE = 3.0  # seconds between looks at other places
REACH = 1.0  # seconds for a store that should be there to answer
KNOCK = 0.25  # seconds for somebody to listen there

log = logging.getLogger("telegrad")


class View(Protocol):
    """Who is in the group, as this worker sees it."""

    def present(self) -> list[Member]: ...

    def lately_lost(self) -> Iterable[str]:
        """The incarnations of those who died, as far as others may not know it."""

    def doubt(self, member: Member) -> None:
        """See whether it lives."""

    def refresh(self) -> None:
        """See what is new in the store."""


class Takeover:
    """One member's part."""

    def __init__(self, post: Post, me: Member, group: DynamicGroup, view: View, wake: Callable[[], None]) -> None:
        self._post = post
        self._me = me
        self._group = group
        self._view = view
        self._wake = wake
        self._machine = Succession(me.incarnation, me.to_json(), group.store)
        self._heard: queue.SimpleQueue[tuple[str, Word | None]] = queue.SimpleQueue()
        self._strangers: dict[str, Member] = {}  # who has asked, and is not known here
        self._served: Any = None  # the store, where this member serves one that is not open yet
        self._awaited: dict[str, Member] = {}  # who has not come over to that
        self._settled_at = self._remind_at = self._elsewhere_at = 0.0
        self._told: set[str] = set()  # places of other groups
        post.on(Seat, self.hear)
        post.on(Orphaned, self.hear)

    def hear(self, sender: Identity, word: Word) -> None:
        """By any thread: a member has said something."""
        self._heard.put((sender.incarnation, word))
        self._wake()

    def report(self) -> None:
        """By any thread: the store did not answer."""
        self._heard.put(("", None))
        self._wake()

    def go_to(self, seat: Seat) -> None:
        """By any thread: the store was given up for another."""
        self._heard.put(("", seat))
        self._wake()

    def remind(self, member: Member) -> None:
        """By any thread: tell a member where the store is."""
        with contextlib.suppress(PeerError, RendezvousError, UsageError):  # it has gone, as will be seen
            self._post.notify(member.name, self._machine.store)

    @property
    def between(self) -> bool:
        """Whether there is no store."""
        return self._machine.orphaned

    def step(self) -> float | None:
        """See to what there is to see; seconds until the next time, None for when something happens."""
        while not self._heard.empty():
            sender, word = self._heard.get()
            if isinstance(word, Orphaned):
                self._meet(sender, Member.from_json(word.entry))
            self._do(self._machine.receive(sender, word) if word is not None else [Look()])
            if isinstance(word, Seat) and sender and self._machine.store.beats(word):
                self._answer_at(word)
        if self._machine.orphaned:
            self._do(self._machine.step(monotonic(), self._candidates()))
        elif self._served is None:
            self._go_home()
        if self._machine.serves:
            self._see_who_is_back()
        return STEP if self._machine.orphaned or self._served is not None else None

    def close(self) -> None:
        self._served = None

    def _meet(self, incarnation: str, member: Member) -> None:
        if all(other.incarnation != incarnation for other in self._view.present()):
            self._strangers[incarnation] = member
            self._group.known = [*self._group.known, member]

    def _candidates(self) -> list[str]:
        """Who is there, in the order in which they should serve: where newcomers look, before others."""
        homes = self._group.homes
        by_order = sorted(self._view.present(), key=lambda member: (member.host not in homes, member.id))
        found = [member.incarnation for member in by_order]
        return found if self._me.incarnation in found else [*found, self._me.incarnation]

    def _do(self, acts: list[Act]) -> None:
        for act in acts:
            if isinstance(act, Tell):
                self._tell(act.to, act.word)
            elif isinstance(act, Serve):
                self._serve(act.term)
            elif isinstance(act, Use):
                self._use(act.store)
            else:
                self._look()

    def _tell(self, to: str, word: Word) -> None:
        known = {member.incarnation: member for member in self._view.present()}
        member = known.get(to) or self._strangers.get(to)
        if member is not None:
            with contextlib.suppress(PeerError, RendezvousError, UsageError):  # it has gone, as will be seen
                self._post.notify(member.name, word)

    # The store

    def _look(self) -> None:
        """Whether it answers; else it may do so over another connection."""
        if self._machine.orphaned:
            return
        try:
            self._group.directory.changes()
        except StoreLost as error:
            self._lose(str(error), isinstance(error.__cause__, SilentStore))
        else:
            self._do(self._machine.answers())

    def _lose(self, why: str, silent: bool) -> None:
        self._group.lose()
        log.info("telegrad: worker %s has lost the group's store: %s", self._me, why)
        found = self._reach(self._machine.store)
        seat = self._seat_in(found)
        if found is not None and seat == self._machine.store:
            self._group.move(found, seat, False)
            self._do(self._machine.answers())
            return
        if found is not None:
            found.close()
        self._machine.lost(silent)
        if seat is not None:
            self._do(self._machine.receive("", seat))

    def _reach(self, seat: Seat) -> Directory | None:
        """The directory of this group at that place, if it can be reached."""
        if not seat.host or not seat.port or not answers((seat.host, seat.port), KNOCK):
            return None
        try:
            found = Directory(find_store(seat.host, seat.port, self._group.keys, REACH, lasting=True), aside=True)
        except RendezvousError:
            return None
        with contextlib.suppress(StoreLost):
            if found.board.terms() == self._group.terms:
                return found
        found.close()
        return None

    def _seat_in(self, directory: Directory | None) -> Seat | None:
        """What a store says of itself."""
        if directory is None:
            return None
        with contextlib.suppress(StoreLost):
            return directory.moved() or directory.served() or self._machine.store
        return None

    def _serve(self, term: int) -> None:
        """A new one, with all that is known here; where the last one answers, only at home."""
        host = self._me.tcp[0]
        _, home = self._group.home or next(iter(self._group.places), ("", 0))
        moves = not self._machine.orphaned
        if not moves:
            self._group.abandon()
        members = [member for member in self._view.present() if member.incarnation != self._me.incarnation]
        for wanted in (home, 0):
            try:
                store, port = serve_anew(host, wanted, self._group.keys)
            except RendezvousError as error:
                log.info("telegrad: worker %s cannot serve the group's store: %s", self._me, error)
                return
            if moves and port != home:  # somebody was faster
                return
            seat = Seat(term, self._me.id, self._me.incarnation, host, port)
            directory = Directory(store)
            homes, lost = self._group.homes, self._view.lately_lost()
            if directory.seed(self._group.terms, seat, [self._me, *members], homes, lost):
                break
        self._group.move(directory, seat, True)
        self._served = store
        self._awaited = {member.incarnation: member for member in (*members, *self._strangers.values())}
        self._settled_at = monotonic() + SETTLE
        self._remind_at = monotonic() + REMIND
        log.info("telegrad: worker %s serves the group's store now, at %s", self._me, spot(host, port))
        self._do(self._machine.served(seat, [member.incarnation for member in members]))

    def _use(self, seat: Seat) -> None:
        """Go over to the store of another."""
        found = self._reach(seat) if seat.incarnation != self._me.incarnation else None
        if found is None:
            self._group.lose()
            self._machine.lost()
            return
        try:
            other = self._list_again(found)
        except StoreLost:
            found.close()
            self._group.lose()
            self._machine.lost()
            return
        if other is not None:
            log.warning("telegrad: %s has the name or the rank of worker %s now: shut it down", other, self._me)
        if seat.incarnation == self._group.store.incarnation:  # its last one answers still
            self._view.refresh()
        self._group.move(found, seat, False)
        self._served = None
        log.info("telegrad: worker %s uses the group's store at %s now", self._me, spot(seat.host, seat.port))

    def _list_again(self, directory: Directory) -> Member | None:
        """Another with the name or the rank of this worker, if so. Who was taken for dead stays so."""
        if directory.how_gone(self._me.incarnation):
            return None
        return directory.list_again(self._me, self._view.lately_lost())

    def _go_home(self) -> None:
        """Bring the store back to where newcomers look, once that is free: of who was stopped, and has gone since."""
        home = self._group.home
        if home is not None and self._is_astray(home) and is_free(home[1]):
            self._view.refresh()  # what nobody sees later
            self._do(self._machine.move())

    def _is_astray(self, home: Spot) -> bool:
        """Whether newcomers do not find the store, and it is for this member to change that."""
        store, homes = self._machine.store, self._group.homes
        if self._machine.serves:
            return store.port != home[1]
        server = next((member for member in self._view.present() if member.incarnation == store.incarnation), None)
        return server is not None and server.host not in homes and self._candidates()[0] == self._me.incarnation

    # Where this member serves

    def _see_who_is_back(self) -> None:
        now = monotonic()
        if self._served is not None:
            self._note_back()
            if not self._awaited or now >= self._settled_at:
                Board(self._served).write(SERVED, OPEN)
                self._served = None
                for member in self._awaited.values():
                    self._view.doubt(member)
        if now >= self._remind_at:
            self._remind_at = now + REMIND
            self._note_back()
            for incarnation in self._awaited:
                self._tell(incarnation, self._machine.store)
        if now >= self._elsewhere_at:
            self._elsewhere_at = now + ELSEWHERE
            self._look_elsewhere()

    def _note_back(self) -> None:
        for member in self._awaited.values():
            if self._group.has_left(member):
                self._group.strike_out(member, LEFT)
        present = {member.incarnation for member in self._view.present()} | self._strangers.keys()
        self._awaited = {
            incarnation: member
            for incarnation, member in self._awaited.items()
            if incarnation in present and not self._group.directory.is_back(member)
        }

    def _look_elsewhere(self) -> None:
        """Who comes to another place shall find this store; whoever else meets there is told of this group."""
        mine = self._machine.store
        for host, port in self._group.places:
            if (port == mine.port and is_here(host)) or not answers((host, port), KNOCK):
                continue
            with contextlib.suppress(RendezvousError):
                self._call_over(
                    Directory(find_store(host, port, self._group.keys, REACH), aside=True), spot(host, port)
                )

    def _answer_at(self, seat: Seat) -> None:
        """Somebody speaks of a store that does not hold, who may not be known here: those who use it are told there."""
        if any(member.incarnation == seat.incarnation for member in self._view.present()):
            return  # who serves it was told
        with contextlib.suppress(RendezvousError):
            found = Directory(find_store(seat.host, seat.port, self._group.keys, REACH, lasting=True), aside=True)
            self._call_over(found, spot(seat.host, seat.port))

    def _call_over(self, other: Directory, place: str) -> None:
        with contextlib.closing(other):
            if other.board.terms() != self._group.terms:
                self._leave_word(other, place)
                return
            seat = other.moved() or other.served()
            if seat is not None and seat.beats(self._machine.store):
                self.go_to(seat)
            elif seat != self._machine.store:
                other.give_up(self._machine.store)

    def _leave_word(self, other: Directory, place: str) -> None:
        first = other.leave_word(self._me) if place not in self._told else ""
        if first:
            self._told.add(place)
            log.warning(
                "telegrad: another group meets at %s now, with %s; worker %s is not in it: its group is at %s",
                place,
                first,
                self._me,
                spot(self._machine.store.host, self._machine.store.port),
            )
