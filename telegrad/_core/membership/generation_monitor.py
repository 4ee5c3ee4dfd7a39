"""A worker's part in its generation and in the decision if that continues: the I/O of `GenerationBarrier`.

A thread reads the directory. At the leader, it checks for workers that wait to join. At any worker that waits for the
others, it checks for workers of this generation that wait for the next one: they have left it, because they got Move or
were declared lost, and the message has not arrived here.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from time import monotonic
from typing import get_args

from telegrad._core.membership.form_generations import DirectoryLease
from telegrad._core.membership.generations import (
    COME,
    FINISH,
    Arrival,
    Before,
    Formed,
    GenerationBarrier,
    IsAlive,
    Letter,
    Message,
)
from telegrad._core.membership.leaving import LEAVES, MessageQueue, MessageSender
from telegrad._core.membership.members import Identity, Member, listed
from telegrad._core.stores.directory import Directory
from telegrad._core.texts import Wait
from telegrad._core.threads import Background
from telegrad.errors import PeerError, PeerLost, RendezvousError, ShutDown

LOOK = 0.25  # seconds between the leader's checks
LOOK_OF_OTHERS = 1.0  # seconds between those of another worker, while it waits for the others
TICK = 1.0  # seconds between two looks at the clock, to notice that this worker was stopped
GRACE = 2.0  # seconds for the leader to answer Impatient
PATIENCE = 2.0  # seconds for a check to end, once it is not needed any more

log = logging.getLogger("telegrad")


class GenerationMonitor:
    """One worker's part in one generation."""

    def __init__(self, post: MessageSender, me: Member, generation: Formed) -> None:
        self.generation = generation
        self._post = post
        self._me = me
        self._changed = threading.Condition()  # guards _steps; notified when it has a decision
        self._messages = MessageQueue(post)
        self._steps = GenerationBarrier(me.id, [member.id for member in generation.members])
        # And the most workers; set before the thread begins.
        self._held: tuple[DirectoryLease, int, IsAlive] | None = None
        # Opens connections whose ends report lost workers; likewise. None once it was called.
        self._greet: Callable[[], None] | None = None
        self._failed = ""  # the logged error of the last check; used by the thread
        self.went_on: Callable[[set[int]], None] = lambda _: None  # called with workers that move on as this one leaves
        self._gone: queue.SimpleQueue[Member | None] = queue.SimpleQueue()  # None: check, or end
        self._closed = False  # set once
        self._thread = Background("telegrad-generation", self._main)
        for message in get_args(Message):
            post.on(message, self._on_message)
        post.lost.append(self._on_lost)

    def begin(self, held: DirectoryLease | None, most: int, is_alive: IsAlive, greet: Callable[[], None]) -> None:
        """Start the thread. `held` is where the next generation forms; None if a launcher decides that.

        `greet` opens connections to all others, whose ends the leader must detect.
        """
        self._greet = greet
        if held is not None:
            self._held = held, most, is_alive
        self._thread.want()

    def note(self, member: Member) -> None:
        """Record that a member is gone. Called under a lock, so the thread processes it later."""
        self._gone.put(member)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._gone.put(None)
        self._thread.join(PATIENCE)

    # Actions of this worker

    def stand(self, how: str) -> None:
        """Set and report the state of this worker."""
        self._act(lambda: self._steps.stand(how))

    def wait(self, timeout: float) -> str:
        """Wait for all reports, and return the decision. After `timeout` seconds (0: no limit), move without others.
        Raise ShutDown if another thread leaves the group."""
        seen = monotonic()
        deadline = seen + timeout if timeout else inf
        with Wait("rendezvous_again", self._awaited, self._answering, worker=self._me.name) as wait:
            while (told := self._told(pause := max(0.0, min(wait.left, deadline - seen, TICK)), self._left)) == "":
                # Leave out the time in which this worker did not run itself, such as after SIGSTOP.
                deadline += max(0.0, (now := monotonic()) - seen - pause)
                seen = now
                if seen >= deadline:
                    return self._wait_no_more(timeout)
                wait.look()
        return told

    def serve(self) -> str:
        """Wait for the decision; it is FINISH if another thread leaves the group."""
        with self._changed:
            self._changed.wait_for(lambda: self._steps.told or self._left())
            return FINISH if self._left() else self._steps.told

    def _told(self, timeout: float, left: Callable[[], bool] = lambda: False) -> str:
        with self._changed:
            self._changed.wait_for(lambda: self._steps.told or left(), timeout)
            if left():
                raise ShutDown(LEAVES.format(self._me.name))
            return self._steps.told

    def _left(self) -> bool:
        return self._closed or self._steps.leaves

    def _wait_no_more(self, timeout: float) -> str:
        missing = self._missing()
        who = listed([repr(name) for name in missing]) if missing else "a worker"
        log.warning("telegrad: %s did not call rendezvous_again within %g s; the group continues without", who, timeout)
        self._act(self._steps.give_up)
        # The leader may be the worker that does not answer. Then this worker moves on without its decision.
        if not self._told(GRACE, self._left):
            self._act(self._steps.move_alone)
        return self._told(0, self._left)

    @property
    def leads(self) -> bool:
        """Return True if the others report to this worker."""
        with self._changed:
            return self._steps.leader == self._me.id

    @property
    def leader(self) -> str:
        with self._changed:
            return self.generation.members[self._steps.leader].name

    def leaving(self) -> list[str]:
        """Return the workers that have called shutdown(), as far as they are known here. Only the leader knows all."""
        with self._changed:
            return [self.generation.members[rank].name for rank in self._steps.leaving]

    @property
    def finished(self) -> bool:
        """Return True if all leave together."""
        return self._told(0) == FINISH

    def before(self) -> Before:
        """Return what this worker knows of this generation when it moves to the next."""
        with self._changed:
            without = set(self._steps.without)
        left_out = tuple(each.incarnation for each in self.generation.members if each.id in without)
        return Before(self.generation.number, self.generation.group, left_out, self._me.incarnation)

    def _missing(self) -> list[str]:
        with self._changed:
            missing = sorted(self._steps.missing - {self._me.id})
        return [self.generation.members[rank].name for rank in missing]

    def _answering(self) -> list[str]:
        """Return the missing workers if this worker leads; otherwise the leader, which has not answered."""
        with self._changed:
            leader = self._steps.leader
        return self._missing() if leader == self._me.id else [self.generation.members[leader].name]

    def _awaited(self) -> str:
        missing = self._missing()
        who = listed([repr(name) for name in missing]) if missing else "others"
        return f"{who} did not call rendezvous_again() (worker {self._me.name!r} did)"

    # Events

    def _act(self, event: Callable[[], list[Letter]]) -> None:
        """Pass an event to the protocol, and send its messages."""
        with self._changed:
            self._messages.add(event())
            if self._steps.told or self._steps.leaves:
                self._changed.notify_all()
            gone_on = self._steps.left_behind
        if gone_on:
            self.went_on(gone_on)
        self._messages.send()

    def _on_message(self, sender: Identity, message: Message) -> None:
        self._act(lambda: self._steps.receive(sender.id, message))

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        if isinstance(reason, PeerLost):  # a broken connection is not a death, which `note` reports
            self._act(lambda: self._steps.remind(who.id))

    def remind(self, member: Member) -> None:
        """Resend what may have been lost with the connection of a worker that answers again."""
        self._act(lambda: self._steps.remind(member.id))

    # The checking thread

    def _main(self) -> None:
        while not (self._closed or self._post.closed):
            try:
                self._turn()
            except Exception:
                # This thread must survive any error: without it, no worker is removed, and none can join.
                log.exception("telegrad: checking the elastic group of worker %r failed", self._me.name)

    def _turn(self) -> None:
        if self.leads and self._greet is not None:
            greet, self._greet = self._greet, None
            greet()
        try:
            member = self._gone.get(timeout=None if self._held is None else LOOK if self.leads else LOOK_OF_OTHERS)
        except queue.Empty:
            self._look()
        else:
            if member is not None:
                self._act(partial(self._steps.lost, member.id))

    def _look(self) -> None:
        with self._changed:
            waits = self._steps.waits
        if self._held is None or self._closed or not (self.leads or waits):
            return
        held, most, is_alive = self._held
        held.serve_again()
        try:
            arrivals = arrivals_in(held.directory)
            wanted = self.leads and is_wanted(arrivals, self.generation, most, is_alive)
        except RendezvousError as error:  # the directory does not answer, or an attacker writes there
            if (said := str(error)) != self._failed and not (self._closed or held.found is None):
                self._failed = said
                log.warning("telegrad: worker %r cannot see which workers wait to join: %s", self._me.name, said)
            held.restart()
            return
        self._failed = ""
        # These workers have left this generation, although no message arrived: Move was lost with its connection, or
        # they were removed by the others. Without this check, they would wait in the directory for this worker, and
        # this worker for them.
        for rank in gone_on(arrivals, self.generation):
            self._act(partial(self._steps.lost, rank))
        if self.leads:
            self._act(lambda: self._steps.want(wanted))


def arrivals_in(directory: Directory) -> list[Arrival]:
    return [Arrival.from_json(entry.value) for entry in directory.list(COME).entries]


def gone_on(arrivals: Iterable[Arrival], mine: Formed) -> list[int]:
    """Return the ranks of the workers that have left the generation `mine`, because they wait for the next one."""
    lives = {arrival.before.me for arrival in arrivals}
    return [member.id for member in mine.members if member.incarnation in lives]


def is_wanted(arrivals: Iterable[Arrival], mine: Formed, most: int, is_alive: IsAlive) -> bool:
    """Return True if a living worker waits that could join the generation after `mine`."""
    return any(_may_come(arrival, mine, most) and is_alive(arrival.member) for arrival in arrivals)


def _may_come(arrival: Arrival, mine: Formed, most: int) -> bool:
    if arrival.member.incarnation in mine.lives:
        return False
    if arrival.before.me in mine.lives:
        return True  # it has stopped waiting for the others
    has_room = not most or len(mine.members) < most
    return has_room and arrival.member.name not in {member.name for member in mine.members}
