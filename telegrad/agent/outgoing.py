"""This worker's calls to one other worker, and the connection that carries them: the rim of `calls`.

Answers are read by the thread that waits for them, where it can have the right to read; else by the reactor's leader.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from time import monotonic, perf_counter
from typing import Any

from telegrad import instruments
from telegrad.agent.attachments import Layers
from telegrad.agent.calls import Calls, Instruction, State
from telegrad.agent.futures import Future, wait_for
from telegrad.agent.handing import hand_over, read_once
from telegrad.agent.pending import Pending, advised
from telegrad.agent.reactor import Reactor
from telegrad.agent.scheduler import Work
from telegrad.agent.spinning import SOON, Spin
from telegrad.contracts import guarded, new_lock
from telegrad.devices.routes import Places
from telegrad.devices.streams import set_apart
from telegrad.errors import CallCancelled, CallTimeout, PeerError, PeerLost, PeerUnreachable
from telegrad.group.members import Identity
from telegrad.interrupts import Resumed, gives_back, waiting_loop
from telegrad.threads import LONGEST_WAIT, run_beside
from telegrad.transport.endings import part
from telegrad.transport.link import Link
from telegrad.transport.loopback import LoopEnd
from telegrad.wire.failures import fresh
from telegrad.wire.messages import ANSWERS, CANCEL, HAS_REFERENCES, Message, unexpected

ROOM_LOOK = 0.1  # seconds between looks for room, where nobody tells
COMPANY_WAIT = 1e-3  # a call that was left to travel with others leaves about then, where no answer comes before

AnyLink = Link | LoopEnd
_UNWATCHED = contextlib.nullcontext()


class OutgoingCalls:
    """The calling side of one connection."""

    def __init__(
        self,
        identity: Identity,
        program: str,
        places: Places,
        reactor: Reactor,
        limits: tuple[int, int],
        connect: Callable[[OutgoingCalls, int], AnyLink],
        complete: Callable[[Pending], None],
        on_lost: Callable[[Identity, PeerError], None],
        layers: Layers,
        is_near: bool,
    ) -> None:
        """`limits`: calls in flight, their bytes. `complete` is called once a call. `is_near`: memory can be lent."""
        self.identity = identity
        self.name = identity.name
        self.program = program
        self.places = places
        self._reactor = reactor
        self._connect = connect
        self.complete = complete
        self._on_lost = on_lost
        self._layers = layers
        self.is_near = is_near
        self._lock = new_lock()  # guards all below, and who completes a call that several threads may
        calls: Calls[Pending, Message] = Calls(*limits, lambda message: bool(message.flags & HAS_REFERENCES))
        self._calls = guarded(calls, self._lock, ("begun", "crowded", "in_flight"))
        self._link: AnyLink | None = None  # while the calls are connected; peeked at by who waits, who looks again
        self._closed: PeerError | None = None  # never taken back; peeked at by who waits for room
        self._how = ""  # as it was closed; stored before `_closed`
        self._room = threading.Condition(self._lock)  # there are fewer calls in flight
        self._queue = 0  # of threads that wait for that
        self._prompt = False  # whether the last answer came soon: a guess, and any thread's

    # Calls

    def call(self, pending: Pending, message: Message, weight: int, alone: bool = True) -> tuple[bool, bool]:
        """Send a call; `pending` will be done. After one with a quick outcome, or not `alone`, `expect` must follow.

        Whether it was left for `Reactor.send_unsent`, being one of many, for which nobody waits in place; and whether
        `next_deadline` may have come nearer.
        """
        outcome = pending.outcome
        pending.weight = weight
        with self._lock:
            if self._closed is not None:
                raise fresh(self._closed)
            instruction = self._calls.begin(pending, message)
            message.id = pending.id
            nearer = later = False
            if outcome is not None:
                nearer = pending.timeout > 0 and self._calls.time(pending)
                later = self._calls.leaves_with_others(pending)
            link = self._link
        if instruction is not Instruction.SEND or not self._sent(link, pending, message, later):
            self._follow(instruction, pending, message, later)
        if pending.unwanted:  # since it was begun
            self._tell(pending)
        if alone and outcome is not None and not outcome.quick:
            self.expect()
        return later, nearer

    def notify(self, message: Message, patient: bool) -> None:
        """Send a control message; where it cannot be delivered, `on_lost` is told. A patient one waits for company."""
        with self._lock:
            instruction = self._calls.send(None, message)
            link = self._link
        if instruction is not Instruction.SEND or not self._sent(link, None, message, patient):
            self._follow(instruction, None, message, patient)

    def _follow(self, instruction: Instruction, pending: Pending | None, message: Message, later: bool) -> None:
        """Have a message leave that could not leave at once, or that a connection has missed as it ended."""
        link: AnyLink | None = None
        while True:
            if instruction is Instruction.SET_APART:
                message.blobs = set_apart(list(message.blobs))
            elif instruction is Instruction.CONNECT:
                self._begin_link()
                return
            elif instruction is not Instruction.SEND or (
                link is not None and self._sent(link, pending, message, later)
            ):
                return
            with self._lock:
                instruction = self._calls.send(pending, message, is_apart=instruction is Instruction.SET_APART)
                link = self._link

    def _sent(self, link: AnyLink | None, pending: Pending | None, message: Message, later: bool) -> bool:
        """Write a message; False where the connection had ended before, so that it can go over a new one."""
        assert link is not None
        try:
            link.send(message, later)
        except PeerError:
            with self._lock:
                if self._link is link:
                    self._link = None
                    self._calls.missed(self._calls.connection)
            return False
        except Exception as error:  # where it is more than a call that fails, the other side must hear of it
            with self._lock:
                call = self._take(pending.id) if pending is not None else None
                if call is not None:
                    call.connection = 0
            if call is None or message.flags & HAS_REFERENCES:
                link.fail(error)
            raise
        if later and isinstance(link, Link):
            self._reactor.sent_later(link)
        return True

    def unsent(self, pending: Pending) -> bool:
        """A call has raised instead of being sent; whether nobody tells its outcome of that."""
        with self._lock:
            return self._take(pending.id) is not None or not pending.connection

    def forget(self, pending: Pending) -> None:
        """The caller gave up, of which the callee is told; a late answer is ignored."""
        if (note := instruments.note) is not None:
            note(pending.given_up())
        self._withdraw(pending)
        if pending.parent is not None:
            pending.parent.ended(pending)

    def cancel(self, pending: Pending, why: str) -> bool:
        """End a call before its answer has come, and tell the callee; False where it was over before."""
        if not self._withdraw(pending):
            return False
        pending.error = CallCancelled(f"{pending.described} was cancelled{why and ': '}{why}")
        self._done(pending, self.complete)
        return True

    def _withdraw(self, pending: Pending) -> bool:
        with self._lock:
            if self._take(pending.id) is None:
                return False
        self._tell(pending)
        return True

    def _tell(self, pending: Pending) -> None:
        """Tell the callee that a call is not wanted any more."""
        word = Message(CANCEL, pending.id)
        with self._lock:
            instruction, link = self._calls.tell(pending, word), self._link
        if instruction is Instruction.SEND and link is not None:
            with contextlib.suppress(PeerError):  # which tells it, too
                link.send(word)

    def expire(self, now: float) -> float:
        """End the asynchronous calls whose time is over; when to look again."""
        with self._lock:
            expired = self._calls.expired(now)
            if expired:
                self._room.notify_all()
            upcoming = self._calls.next_deadline()
        if expired:
            self._reactor.submit(Work(self._fail_late, expired))  # since the callee is asked
        return upcoming

    def _fail_late(self, expired: list[Pending]) -> None:
        for pending in expired:
            pending.error = self.timed_out(pending)
            self._tell(pending)
            self._done(pending)

    def timed_out(self, pending: Pending) -> CallTimeout:
        """Why such a call failed, with what the callee is at, where it says so at once."""
        instruments.alarm(f"a call of {pending.described} ran out of time")
        return pending.late(self._layers.last_word(self.identity, pending.id))

    @property
    def link(self) -> AnyLink | None:
        return self._link

    @property
    def outstanding(self) -> int:
        return len(self._calls.in_flight)

    @property
    def begun(self) -> int:
        return self._calls.begun

    @property
    def expects(self) -> Callable[[], int]:
        """Tells how many calls were not answered yet; without a lock, and at the least cost."""
        return self._calls.in_flight.__len__

    def _take(self, id_: int) -> Pending | None:
        """With the lock held: a call is in flight no longer."""
        pending = self._calls.take(id_)
        if self._queue:
            self._room.notify()
        return pending

    # Waiting

    @property
    def crowded(self) -> bool:
        """Whether so much is in flight that nothing should be added, or answers come faster than they are passed on."""
        return self._calls.crowded or self._reactor.is_behind

    def wait_for_room(self) -> None:
        """Wait until less is in flight, and read answers meanwhile."""
        while self.crowded and self._closed is None:
            if not self._reactor.is_behind and isinstance(link := self._link, Link) and link.reading.take():
                read_once(link, ROOM_LOOK)
            else:
                with self._lock:
                    if self.crowded:
                        self._queue += 1
                        try:
                            self._room.wait(ROOM_LOOK)
                        finally:
                            self._queue -= 1

    def wait(self, pending: Pending) -> bool:
        """Wait until `pending` is done; False where its deadline passed before."""
        if self._reactor.on_worker():
            with self._reactor.waiting(), pending.in_turn.waited_for() if pending.in_turn else _UNWATCHED:
                return self._wait(pending)
        return self._wait(pending)

    def wait_for(self, future: Future[Any]) -> None:
        """Wait until another thread has completed `future`."""
        with self._reactor.waiting():
            wait_for(future)

    @waiting_loop
    def _wait(self, pending: Pending) -> bool:
        self._reactor.send_unsent()
        while not pending.done:
            if (remaining := pending.deadline - monotonic()) <= 0:
                return False
            if isinstance(link := self._link, Link) and link.reading.take():
                held = [link]
                try:
                    self._read(link, pending, held)
                except Resumed:
                    pass
                finally:
                    if held:  # else a handler of a signal has run
                        link.stop_reading()
            else:
                pending.wait_told(self._lock, min(remaining, LONGEST_WAIT))
        return True

    @gives_back(hand_over)
    @waiting_loop
    def _read(self, link: Link, pending: Pending, held: list[Link]) -> None:
        """Read until it is done, with the right to read, as long as `held` has the connection."""
        pending.awaited = True
        start = perf_counter()
        spin = Spin(start) if self._prompt else None
        try:
            while not (pending.done or link.reader.awaits_lanes) and link.closed is None:
                if link.read() or (spin is not None and spin.again()):
                    continue
                if (remaining := pending.deadline - monotonic()) <= 0:
                    return
                if pending.takes_waker():
                    continue
                link.wait_readable(min(remaining, LONGEST_WAIT), pending.waker)
        finally:
            pending.awaited = False
            self._prompt = perf_counter() - start < SOON

    def expect(self) -> None:
        """Where answers are expected and nobody reads the connection, the leader shall."""
        if isinstance(link := self._link, Link):
            link.reading.watch()

    def tick(self, now: float) -> float:
        """Now and then: end what is out of time, hear of the end of an idle connection, give back what was lent."""
        if (link := self._link) is not None:
            link.release()
            self.expect()
        return self.expire(now)

    def retire(self, numbers: list[int]) -> None:
        if (link := self._link) is not None:
            link.retire(numbers)

    # What the connection brings

    def on_messages(self, _: AnyLink, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.kind not in ANSWERS:
                raise unexpected(message.kind)
            attachments = None
            if message.flags & HAS_REFERENCES:  # also where the caller gave up
                attachments = self._layers.take_attachments(message, self.identity)
            with self._lock:
                pending = self._take(message.id)
            if pending is not None:  # else its caller gave up
                pending.answer = message
                pending.attachments = attachments
                pending.waiter_completes = pending.awaited
                self._done(pending)

    def _done(self, pending: Pending, complete: Callable[[Pending], None] | None = None) -> None:
        """A call is over; where its outcome may run code of others, that is told later, unless by `complete`."""
        if (note := instruments.note) is not None:
            note(pending.ended("" if pending.error is None else type(pending.error).__name__))
        pending.done = True
        if pending.parent is not None:
            pending.parent.ended(pending)
        if pending.outcome is not None and not pending.waiter_completes:
            if complete is not None:
                complete(pending)
            elif pending.outcome.quick:
                self.complete(pending)
            else:
                self._reactor.submit(Work(self.complete, pending))
        pending.wake()

    def complete_here(self, pending: Pending) -> None:
        """By who has waited for a call that is done, or no longer: its completion, where that was left to such."""
        if pending.waiter_completes:
            with self._lock:
                mine, pending.waiter_completes = pending.waiter_completes, False
            if mine:
                self.complete(pending)

    def _fail(self, failed: list[Pending], reason: BaseException) -> None:
        for pending in failed:
            pending.error = reason
            self._done(pending)

    # The connection

    def _begin_link(self) -> None:
        with self._lock:
            number = self._calls.connection
        try:
            run_beside("telegrad-connect", self._make_link, number)
        except (RuntimeError, MemoryError) as error:  # the process has no memory, or no thread left
            unable = PeerUnreachable(f"worker {self.name!r} was not called: {error}")
            with self._lock:
                failed = self._calls.refused(keeps_messages=True)
            self._fail(failed, unable)
            if failed:
                self._on_lost(self.identity, PeerLost(str(unable)))  # which is no death, but calls may carry something

    def _make_link(self, number: int) -> None:
        try:
            link = self._connect(self, number)
        except Exception as error:
            with self._lock:
                failed = self._calls.refused()
            self._fail(failed, advised(error))
            self._on_lost(self.identity, error if isinstance(error, PeerError) else PeerError(str(error)))
            return
        if not self._drain(link):
            return
        if self._closed is not None:
            part(link, self._closed, self._how)
        elif link.closed is not None:
            self.ended(number, link, link.closed)
        else:
            self.expect()

    def _drain(self, link: AnyLink) -> bool:
        """Send over a new connection what waits for it; whether that could be done."""
        while True:
            with self._lock:
                backlog = self._calls.drain()
                if self._calls.state is State.OPEN:
                    self._link = link
            if not backlog:
                return True
            for at, (call, message) in enumerate(backlog):
                try:
                    link.send(message)
                    if call is not None and call.unwanted:
                        link.send(Message(CANCEL, call.id))
                except Exception as error:  # gone already, or no memory: the rest of the backlog fails with it
                    link.fail(error)
                    with self._lock:
                        failed = self._calls.refused(backlog[at:])
                    self._fail(failed, link.closed or PeerError("the connection ended"))
                    return False

    def ended(self, number: int, link: AnyLink, reason: PeerError) -> None:
        """The connection of that number has ended, and the calls that were sent over it."""
        with self._lock:
            if self._link is link:
                self._link = None
            failed = self._calls.ended(number)
            self._room.notify_all()
        for pending in failed:
            self._fail([pending], pending.cut_off(reason))
        self._on_lost(self.identity, reason)

    def close(self, reason: PeerError, how: str = "") -> None:
        """End the connection and every call on it; the other is told `how` this worker left."""
        with self._lock:
            self._how, self._closed = how, reason
            link, self._link = self._link, None
            failed = self._calls.close()
            self._room.notify_all()
        if link is not None:
            part(link, reason, how)
        self._fail(failed, reason)

    def __repr__(self) -> str:
        return f"<OutgoingCalls to {self.name!r}: {self._calls!r}>"
