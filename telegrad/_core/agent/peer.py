"""The calls of this worker to one other worker.

A call fails if the link that carried it ends, since the call may have run. The ends of other links do not affect it.
Exactly one thread removes a call from the table: the one that finds its end. The end is an answer, the end of the link,
the deadline, a caller that gives up, or the close of this worker. A CANCEL follows the call unless the link has ended
or an answer has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from threading import Condition, Lock
from time import monotonic, perf_counter
from typing import Protocol

from telegrad._core import events
from telegrad._core.agent.pending_call import GAVE_UP, CallTable, PendingCall
from telegrad._core.calls.attachments import Layers
from telegrad._core.calls.settings import Settings
from telegrad._core.interrupts import Resumed, raised_by_handler, releases_before_handler
from telegrad._core.membership.members import Identity, Member
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.reactor.lazy_link import AnyLink, LazyLink
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.reactor.scheduler import Work
from telegrad._core.transport.connect import part
from telegrad._core.transport.link import Link
from telegrad._core.wire.messages import ANSWERS, HAS_REFERENCES, RESULT, Message, unknown
from telegrad._core.wire.packing import DeviceRoutes
from telegrad.errors import CallCancelled, CallTimeout, PeerError, ProtocolViolation

CAPACITY_LOOK = 0.1  # seconds between two checks for capacity, since some changes of it are not notified
BATCH = 16  # if more calls are in flight, the next ones are sent in batches of this size
BATCH_WAIT = 1e-3  # seconds, approximately, that a call waits for its batch at most


class PeerHost(Protocol):
    """State shared by the peers of one worker."""

    reactor: Reactor
    layers: Layers
    settings: Settings
    complete: Callable[[PendingCall], None]  # called once for each asynchronous call

    def connect_to(self, peer: Peer) -> AnyLink: ...

    def peer_lost(self, identity: Identity, reason: PeerError) -> None: ...


class Peer:
    """A worker that this one calls."""

    def __init__(self, member: Member, places: DeviceRoutes, is_near: bool, host: PeerHost) -> None:
        """`is_near`: memory can be lent to that worker."""
        self.member = member
        self.identity = member.identity
        self.name = member.name
        self.places = places
        self.is_near = is_near
        self.reactor = host.reactor
        self.lock = Lock()  # guards `calls`, `connection`, `_waiting`; decides which thread completes a call
        self.calls = CallTable(host.settings.most_calls, host.settings.most_bytes)
        self.connection = LazyLink(self, partial(host.connect_to, self), host.reactor, self.lock)
        self.host = host
        self._capacity = Condition(self.lock)  # notified when fewer calls are in flight
        self._waiting = 0  # threads that wait for capacity

    @property
    def link(self) -> AnyLink | None:
        return self.connection.link

    def call(self, call: PendingCall, message: Message) -> None:
        """Send a call; `connection.read_in_background` must follow if no thread waits for it.

        Raises:
            Exception: the call could not be sent. If another thread has ended it meanwhile, its outcome has the error.
        """
        with self.lock:
            if self.connection.closed is not None:
                raise fresh(self.connection.closed)
            is_next = self.calls.add(call)
            # Each BATCH-th message is written at once and takes the messages before it along. A thread that waits for
            # its own call sends it at once.
            later = call.outcome is not None and len(self.calls.in_flight) > BATCH and call.id % BATCH > 0
        message.id = call.id
        try:
            self.connection.send(message, call, later)
        except BaseException as error:
            with self.lock:
                was_in_flight = self._pop(call.id) is not None
            # The references in the call count as sent. If the connection went on, the callee would wait for them
            # forever.
            if call.link is not None and message.flags & HAS_REFERENCES:
                call.link.fail(error)
            if was_in_flight or not isinstance(error, Exception) or raised_by_handler(error):
                raise
        # The call was ended while it was being sent. Its CANCEL may have left before it, or not at all if there was no
        # link (see `PendingCall.send_cancel`). A second CANCEL is ignored.
        if call.abandoned:
            call.send_cancel()
        if is_next:
            self.reactor.timer.wake_by(call.deadline)
        if later:
            self.reactor.timer.wake_by(monotonic() + BATCH_WAIT, rough=True)

    def notify(self, message: Message, later: bool) -> None:
        """Send a control message; with `later`, together with the next message, or a moment later."""
        try:
            self.connection.send(message, None, later)
        except Exception as error:
            if (link := self.connection.link) is not None:
                link.fail(error)  # the other side would wait for it forever
            raise

    def forget(self, call: PendingCall) -> None:
        """End a call whose caller has given up; a late answer is ignored."""
        if self._abandon(call):
            if (note := events.note) is not None:
                is_late = 0 < call.timeout <= perf_counter() - call.begun
                note(call.event(CallTimeout.__name__ if is_late else GAVE_UP))
            if call.parent is not None:
                call.parent.ended(call)

    def cancel(self, call: PendingCall, why: str) -> bool:
        """End a call before its answer has come; return False if it has already ended."""
        if not self._abandon(call):
            return False
        call.error = CallCancelled(f"{call.described} was cancelled{why and ': '}{why}")
        self._end(call, self.host.complete)
        return True

    def _abandon(self, call: PendingCall) -> bool:
        with self.lock:
            if self._pop(call.id) is None:
                return False
        call.send_cancel()
        return True

    def expire(self, now: float) -> float:
        """End the expired asynchronous calls; return the time of the next check."""
        if now < self.calls.next_due:
            return self.calls.next_due
        with self.lock:
            expired = self.calls.pop_expired(now)
            self._capacity.notify_all()
        if expired:  # on another thread, since this asks the callee for its state
            self.reactor.submit(Work(self._fail_expired, expired))
        return self.calls.next_due

    def _fail_expired(self, expired: list[PendingCall]) -> None:
        for call in expired:
            call.error = self.timeout_error(call)
            call.send_cancel()
            self._end(call)

    def timeout_error(self, call: PendingCall) -> CallTimeout:
        """Return the timeout error of a call, with the state of the callee if that answers quickly."""
        events.alarm(f"a call of {call.described} ran out of time")
        return call.timeout_error(self.host.layers.last_word(self.identity, call.id))

    # Capacity

    @property
    def is_full(self) -> bool:
        """Return True if no call should be added: too much is in flight, or too many answers wait for processing."""
        return self.calls.is_full or self.reactor.is_behind

    def wait_for_capacity(self) -> None:
        """Wait until less is in flight; read answers meanwhile."""
        while self.is_full and self.connection.closed is None:
            link = self.connection.link
            if not self.reactor.is_behind and isinstance(link, Link) and link.reading.take():
                _read_once(link, CAPACITY_LOOK)
            else:
                with self.lock:
                    if self.is_full:
                        self._waiting += 1
                        try:
                            self._capacity.wait(CAPACITY_LOOK)
                        finally:
                            self._waiting -= 1

    def _pop(self, id_: int) -> PendingCall | None:
        """With the lock held: remove a call that has ended."""
        call = self.calls.pop(id_)
        if self._waiting:
            self._capacity.notify()
        return call

    # Ends of calls

    def on_messages(self, _: AnyLink, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.kind not in ANSWERS:
                raise ProtocolViolation(unknown(message.kind))
            attachments = None
            if message.flags & HAS_REFERENCES:  # even if the call has ended
                attachments = self.host.layers.take_attachments(message, self.identity)
            with self.lock:  # `_pop`, inlined, since this runs for each call
                call = self.calls.pop(message.id)
                if self._waiting:
                    self._capacity.notify()
            if call is not None:
                call.answer = message
                call.attachments = attachments
                # This thread reads the link. If it is also the thread that waits for this call, it completes the
                # outcome itself in `PendingCall.help`, after it has given the right to read back: callbacks of the
                # outcome are user code.
                call.reader_completes = call.awaited
                self._end(call)

    def _end(self, call: PendingCall, complete: Callable[[PendingCall], None] | None = None) -> None:
        """Mark a call as done; complete its outcome by `complete`, or on a reactor thread if user code may run."""
        if (note := events.note) is not None:
            note(call.event("" if call.error is None else type(call.error).__name__))
        # Everything that a waiting thread needs is stored before `done`. `done` is stored before `done_lock` and
        # `parent` are read: a thread that makes the lock, or holds the call as nested, does that first and then reads
        # `done`.
        call.done = True
        if call.parent is not None:
            call.parent.ended(call)
        if call.outcome is not None and not call.reader_completes:
            if complete is not None:
                complete(call)
            # An error is rebuilt by its class, which is user code.
            elif call.outcome.quick and (call.answer is None or call.answer.kind == RESULT):
                self.host.complete(call)
            else:
                self.reactor.submit(Work(self.host.complete, call))
        if call.done_lock is not None:  # wake the waiting thread
            call.done_lock.release()
        if call.waker is not None:
            call.waker.wake()

    def fail(self, calls: Iterable[PendingCall], error: Exception) -> None:
        with self.lock:
            failed = [call for call in calls if self._pop(call.id) is not None]
        for call in failed:
            call.error = error
            self._end(call)

    # The connection

    def lost(self, reason: PeerError) -> None:
        self.host.peer_lost(self.identity, reason)

    def link_closed(self, link: AnyLink, reason: PeerError) -> None:
        """Fail the calls that an ended link has carried."""
        with self.lock:
            self.connection.link_closed(link)
            failed = self.calls.pop_all(lambda call: call.link is link)
            for call in failed:
                # A thread that is about to send the call, and has just found the link closed, must not use another one
                # (`LazyLink.send`).
                call.abandoned = True
            self._capacity.notify_all()
        for call in failed:
            call.error = call.connection_lost_error(reason)
            self._end(call)
        self.lost(reason)

    def close(self, reason: PeerError, how: str = "") -> None:
        """End the connection and all calls; send the other worker `how` this one left."""
        with self.lock:
            link = self.connection.close(reason, how)
            failed = self.calls.pop_all()
            self._capacity.notify_all()
        if link is not None:
            part(link, reason, how)
        for call in failed:
            call.error = reason
            self._end(call)


@releases_before_handler
def _read_once(link: Link, timeout: float) -> None:
    """Read available data, or wait for some. The caller holds the right to read; this releases it."""
    held = [link]
    try:
        if not link.read():
            link.wait_readable(timeout)
    except Resumed:
        pass
    finally:
        if held:
            link.stop_reading()
