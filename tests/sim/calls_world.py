"""A `Peer` under a seeded scheduler: callers, a network, a callee, a clock, cancellations and the close, in any order.

The peer is the real one, with simulated links. Each act runs on a fiber, which may be suspended where a lock is taken
or released, and around each write. A seed decides which one goes on. These rules are checked:

    ONCE      each call ends once, and is sent at most once
    ORDER     the messages of one caller arrive in order
    LINK      a call that was sent fails with the link that carried it, and with no other
    LOST      an unsent message is reported as lost, unless it was a call that ended before
    QUEUED    a call that is cancelled in the queue is not sent, unless it carries references
    CANCEL    a callee hears of the end of each call that it got and has not answered, after the call
    TIME      a call is ended at its deadline, and not before
    APART     the tensors of a message that another thread sends are copies
    NOTHING   in the end nothing is in flight, queued or counted
"""

import operator
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from telegrad._core import events as instruments
from telegrad._core.agent import peer
from telegrad._core.agent.pending_call import PendingCall
from telegrad._core.membership.members import Member
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.wire.messages import BYE, CALL, CANCEL, HAS_REFERENCES, NOTICE, RESULT, Message
from telegrad.errors import CallTimeout, PeerError, PeerLost, PeerUnreachable, ShutDown
from tests.sim.fibers import Fibers, Lock

MOST_ACTS = 3000
APART = "a copy"
fibers = Fibers()


def set_apart(blobs: list[Any]) -> list[Any]:
    return [APART] * len(blobs)


class Call(PendingCall):
    """A call that knows its message, and whether it was queued when it was cancelled."""

    __slots__ = ("is_ignored", "message", "was_queued")

    is_ignored: bool  # the callee does not answer
    message: Message
    was_queued: bool

    def send_cancel(self) -> None:
        self.was_queued = self.was_queued or any(call is self for _, call in self.peer.connection._queue)
        super().send_cancel()


class Link:
    """A connection with both of its ends."""

    def __init__(self, world: "World") -> None:
        self.number = len(world.links)
        self.closed: PeerError | None = None
        self.is_broken = False
        self.served: dict[int, Call] = {}
        self.unanswered: list[Call] = []
        self.cancelled: set[int] = set()
        self._world = world

    def send(self, message: Message, later: bool = False) -> bool:
        self._world.step()
        if self.closed is not None or self.is_broken:
            raise fresh(self.closed or PeerLost(f"link {self.number} broke"))
        self._world.arrive(self, message)
        self._world.step()
        return True

    def close(self, reason: PeerError) -> None:
        if self.closed is None:
            self.closed = reason
            self._world.step()
            self._world.peer.link_closed(self, reason)  # type: ignore[arg-type]

    def fail(self, error: BaseException) -> None:
        self.close(PeerLost(f"link {self.number} failed: {error}"))


class World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.calls: list[Call] = []
        self.ends: Counter[int] = Counter()  # by id: how often a call has ended
        self.broken_rules: list[str] = []
        self.notices: dict[bytes, bool] = {}  # by head: whether it has arrived
        self.last: dict[int, int] = {}  # by caller: the number of the message that arrived last
        self.links: list[Link] = []
        self.losses = 0
        self.jobs: list[Callable[[], None]] = []  # acts that have not begun
        host = SimpleNamespace(
            reactor=SimpleNamespace(
                submit=lambda work: self.start(work.run, work.argument),
                is_behind=False,
                timer=SimpleNamespace(wake_by=lambda *_, **__: None),
            ),
            layers=SimpleNamespace(last_word=lambda *_: ""),
            settings=SimpleNamespace(most_calls=40, most_bytes=1000),
            complete=self.complete,
            over=None,
            connect_to=lambda _: self.connect(),
            peer_lost=lambda *_: self.lose(),
        )
        with patch.object(peer, "Lock", lambda: Lock(fibers, self.step)):
            self.peer = peer.Peer(Member("w1", 1, "", "", "", "", ("", 0)), None, False, host)  # type: ignore[arg-type]

    # The scheduler

    def run(self) -> None:
        with (
            patch.object(peer, "run_in_thread", self.run_beside),
            patch.object(peer, "set_apart", set_apart),
            patch.object(instruments, "note", self.note_end),
            patch.object(instruments, "alarm", lambda _: None),
        ):
            try:
                self._run()
            finally:
                fibers.kill_all()
        self.check_end()

    def _run(self) -> None:
        events = [self.answer, self.tick]
        events += [self.break_link] if self.chance.random() < 0.7 else []
        events += [self.cancel] if self.chance.random() < 0.5 else []
        closes_at = self.chance.randint(0, 200) if self.chance.random() < 0.3 else -1
        self.jobs += [partial(self.caller, number) for number in range(self.chance.randint(1, 4))]
        for count in range(MOST_ACTS):
            suspended = fibers.suspended
            acts = len(suspended) + len(self.jobs)
            if not acts and not self.peer.calls.in_flight:
                return
            if count == closes_at:
                self.start(self.close)
            elif self.chance.random() < 0.8 and acts:
                chosen = self.chance.randrange(acts)
                if chosen < len(suspended):
                    fibers.resume(suspended[chosen])
                else:
                    fibers.start(self.jobs.pop(chosen - len(suspended)))
            else:
                fibers.start(self.chance.choice(events))
        raise AssertionError(f"calls wait for ever: {self.peer!r}, {acts} acts have not ended")

    def start(self, act: Callable[..., None], *args: Any) -> None:
        self.jobs.append(partial(act, *args))

    def step(self) -> None:
        """Let another act go on here, perhaps."""
        if self.chance.random() < 0.5:
            fibers.suspend()

    # The callers

    def caller(self, caller: int) -> None:
        for number in range(self.chance.randint(1, 6)):
            flags = HAS_REFERENCES if self.chance.random() < 0.3 else 0
            kind = CALL if self.chance.random() < 0.8 else NOTICE
            blobs = [fibers.current] if self.chance.random() < 0.3 else []
            message = Message(kind, 0, flags, b"%d %d" % (caller, number), blobs=blobs)
            if kind == NOTICE:
                self.notices[message.head] = False
                self.peer.notify(message, False)
                continue
            outcome: Any = SimpleNamespace(quick=self.chance.random() < 0.5) if self.chance.random() < 0.7 else None
            call = Call(self.peer, operator.neg, 0, outcome)
            call.message, call.was_queued, call.is_ignored = message, False, False
            call.weight = self.chance.choice([0, 100])
            if outcome is not None and self.chance.random() < 0.3:
                call.timeout = self.chance.choice([1.0, 20.0])
                call.deadline = self.now + call.timeout
                call.is_ignored = self.chance.random() < 0.5
            self.calls.append(call)
            try:
                self.peer.call(call, message)
            except PeerError:
                assert self.peer.connection.closed is not None
                self.calls.remove(call)
                return
            if outcome is None and self.chance.random() < 0.2 and not call.done:
                self.peer.forget(call)
            self.step()

    def cancel(self) -> None:
        """Another thread cancels a call of any caller."""
        if self.peer.calls.in_flight and self.chance.random() < 0.2:
            self.peer.cancel(self.chance.choice([*self.peer.calls.in_flight.values()]), "")

    def close(self) -> None:
        self.losses += 1
        self.peer.close(ShutDown("closed"))

    # The network, and the callee

    def run_beside(self, _: str, run: Callable[[], None]) -> None:
        if self.chance.random() < 0.1:
            raise RuntimeError("no thread")
        self.start(run)

    def connect(self) -> Link:
        self.step()
        if self.chance.random() < 0.3:
            raise PeerUnreachable("no answer")
        self.links.append(Link(self))
        return self.links[-1]

    def lose(self) -> None:
        self.losses += 1

    def break_link(self) -> None:
        living = [link for link in self.links if not link.is_broken]
        if living and self.chance.random() < 0.1:
            broken = self.chance.choice(living)
            broken.is_broken = True
            fibers.suspend()
            broken.close(PeerLost(f"link {broken.number} broke"))

    def arrive(self, link: Link, message: Message) -> None:
        if message.kind == BYE:
            return
        if message.kind == CANCEL:
            if message.id in link.served:
                self.check(link.served[message.id].abandoned, "CANCEL: for a call that has not ended")
                link.cancelled.add(message.id)
            return
        own = all(blob is fibers.current or blob == APART for blob in message.blobs)
        self.check(own, "APART: tensors are not copied")
        caller, number = map(int, message.head.split())
        self.check(self.last.get(caller, -1) < number, "ORDER: a later message came first, or one came twice")
        self.last[caller] = number
        if message.kind == NOTICE:
            self.notices[message.head] = True
        else:
            (call,) = (each for each in self.calls if each.message.head == message.head)
            link.served[message.id] = call
            link.unanswered.append(call)

    def answer(self) -> None:
        waiting = [(link, call) for link in self.links for call in link.unanswered if not call.is_ignored]
        if waiting:
            link, call = self.chance.choice(waiting)
            link.unanswered.remove(call)
            if link.closed is None:
                self.peer.on_messages(link, [Message(RESULT, call.id)])  # type: ignore[arg-type]

    def tick(self) -> None:
        self.now += self.chance.choice([0.01, 0.5])
        self.peer.expire(self.now)

    # Checks

    def note_end(self, event: tuple[Any, ...]) -> None:
        self.ends[event[4]] += 1

    def complete(self, call: Any) -> None:
        self.check(call.outcome is not None, "ONCE: an outcome was told twice")
        call.outcome = None
        is_late = isinstance(call.error, CallTimeout)
        self.check(not is_late or call.deadline <= self.now, "TIME: a call was ended before its time")

    def check(self, holds: bool, rule: str) -> None:
        """Note a broken rule; the peer would take an exception for an error of a link."""
        self.broken_rules += [] if holds else [rule]

    def check_end(self) -> None:
        assert not self.broken_rules, self.broken_rules[0]
        for call in self.calls:
            carriers = [link for link in self.links if call.id in link.served]
            assert self.ends[call.id] == 1, f"ONCE: {call} ended {self.ends[call.id]} times"
            assert call.outcome is None, f"ONCE: the outcome of {call} was not told"
            assert len(carriers) <= 1, f"ONCE: {call} was sent over {len(carriers)} links"
            carries = bool(call.message.flags & HAS_REFERENCES)
            if not carriers and (carries or not call.abandoned):
                assert self.losses, f"LOST: {call} was not sent, and nobody hears of that"
            if call.was_queued and not carries:
                assert not carriers, f"QUEUED: {call} was sent, though it was cancelled before"
            for link in carriers:
                said = str(call.error)
                assert carries or not said.startswith("link") or said.startswith(f"link {link.number} "), (
                    f"LINK: {call}, {said}"
                )
                heard = call.id in link.cancelled or link.is_broken or link.closed is not None
                assert heard or not call.abandoned, f"CANCEL: the callee does not know of the end of {call}"
        queue = self.peer.connection._queue
        kept = {message.head for message, _ in queue}  # until a thread can be started
        missing = [head for head, has_arrived in self.notices.items() if not has_arrived and head not in kept]
        assert self.losses or not missing, "LOST: a control message was not sent"
        assert self.peer.calls.weight == 0, "NOTHING: the weight of a call was not given back"
        assert all(call is None for _, call in queue), "NOTHING: calls are left in the queue"
        assert self.peer.link is None or not queue, "NOTHING: messages are left in the queue"
