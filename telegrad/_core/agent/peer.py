"""The calls of this worker to one other worker.

A call fails if the link that carried it ends, since the call may have run. The ends of other links do not affect it.
Exactly one thread removes a call from the table: the one that finds its end. The end is an answer, the end of the link,
the deadline, a caller that gives up, or the close of this worker. A CANCEL follows the call unless the link has ended
or an answer has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition, Lock, Thread, current_thread
from time import monotonic, perf_counter
from typing import Protocol

from telegrad._core import events
from telegrad._core.agent.incoming import Layers
from telegrad._core.agent.pending_call import GAVE_UP, CallTable, PendingCall
from telegrad._core.calls.settings import Settings
from telegrad._core.interrupts import Resumed, raised_by_handler, releases_before_handler
from telegrad._core.membership.members import Identity, Member
from telegrad._core.memory.device_streams import set_apart
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.reactor.scheduler import Work
from telegrad._core.threads import run_in_thread
from telegrad._core.transport.connect import advised, part
from telegrad._core.transport.link import AnyLink, Link
from telegrad._core.wire.messages import ANSWERS, CANCEL, HAS_REFERENCES, RESULT, Message, unknown
from telegrad._core.wire.tensors import DeviceRoutes
from telegrad.errors import CallCancelled, CallTimeout, PeerError, PeerLost, PeerUnreachable, ProtocolViolation

CAPACITY_LOOK = 0.1  # seconds between two checks for capacity, since some changes of it are not notified
BATCH = 16  # if more calls are in flight, the next ones are sent in batches of this size
BATCH_WAIT = 1e-3  # seconds, approximately, that a call waits for its batch at most


class PeerHost(Protocol):
    """State shared by the peers of one worker."""

    reactor: Reactor
    layers: Layers
    settings: Settings
    complete: Callable[[PendingCall], None]  # called once for each asynchronous call
    over: PeerError | None  # why all calls fail, once this worker ends

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
        self.connection = LazyLink(self)
        self.host = host
        self._capacity = Condition(self.lock)  # notified when fewer calls are in flight
        self._waiting = 0  # threads that wait for capacity

    @property
    def link(self) -> AnyLink | None:
        return self.connection.link

    def call(self, call: PendingCall, message: Message) -> None:
        """Send a call; `connection.read_in_background` must follow if no thread waits for it. Raise if it could not be
        sent, unless another thread has ended it meanwhile: its outcome has the error then."""
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
                call = self.calls.in_flight.pop(message.id, None)
                if call is not None:
                    self.calls.weight -= call.weight
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
            if self.connection.link is link:
                self.connection.link = None
            failed = self.calls.pop_all(lambda call: call.link is link)
            for call in failed:
                # A thread that is about to send the call, and has just found the link closed, must not use another one
                # (`LazyLink.send`).
                call.abandoned = True
            self._capacity.notify_all()
        for call in failed:
            call.error = self.host.over or call.connection_lost_error(reason)
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


class LazyLink:
    """Sends messages to one worker, over a connection that is made for the first one, and again after it has ended.

        not connected   `link` is None; the next message starts a thread that connects
        connecting      `link` is None; messages wait in a queue, and the thread sends them once it has a connection
        connected       `link` is set, and the queue is empty; each thread writes its messages itself
        closed          permanently; messages are dropped

    The thread that connects sets `link` in the same step in which it finds the queue empty. No message therefore
    overtakes an earlier one of the same thread.
    """

    def __init__(self, owner: Peer) -> None:
        """The lock of the peer guards all fields; `link` and `closed` are also read without it."""
        self.link: AnyLink | None = None
        self.closed: PeerError | None = None  # never reset
        self.is_prompt = False  # the last answer came soon: a guess, set by any thread without the lock
        self._owner = owner
        self._lock = owner.lock
        self._how = ""  # how this worker left; set before `closed`
        self._is_connecting = False
        self._connector: Thread | None = None  # while it connects
        self._queue: list[tuple[Message, PendingCall | None]] = []

    def send(self, message: Message, call: PendingCall | None = None, later: bool = False) -> None:
        """Send a message, with its call if it has one, or queue it until there is a connection.

        With `later`, leave the message in the outbox: the reactor sends it soon, together with others.
        """
        is_apart = not message.blobs
        while True:
            link = self.link
            if link is not None:
                if call is not None:
                    # Set before the write, so that the end of the link fails the call at any moment from here on: it
                    # may have run. If the link ends between this line and the write, two things happen in either order.
                    # `Peer.link_closed` fails the calls that carry this link and marks them as abandoned; the write
                    # raises, and this thread looks at the mark. Not marked so far, the call goes to the next link, and
                    # `_next_batch` looks again. A call that is marked after the last look is written, and `Peer.call`
                    # then sends a CANCEL for it.
                    call.link = link
                try:
                    link.send(message, later)
                except PeerError:  # the link had already ended: send the message over the next one
                    with self._lock:
                        if self.link is link:
                            self.link = None
                    if _is_obsolete(message, call):
                        return
                    continue
                if later and isinstance(link, Link):
                    self._owner.reactor.sent_later(link)
                return
            if not is_apart:  # another thread sends it, but tensors on an accelerator belong to this thread's stream
                message.blobs = set_apart(list(message.blobs))
                is_apart = True
            with self._lock:
                if self.closed is not None:
                    return
                # Under the lock in which `_next_batch` sets `link`: the connecting thread either takes this message
                # from the queue, or has set `link` already. A message that was queued after that would stay there.
                if self.link is not None:
                    continue
                self._queue.append((message, call))
                if self._is_connecting:
                    return
                self._is_connecting = True
            self._start()
            return

    def read_in_background(self) -> None:
        """Let the leader read the connection, unless a thread reads it already."""
        if isinstance(link := self.link, Link):
            link.reading.watch()

    def close(self, reason: PeerError, how: str) -> AnyLink | None:
        """Stop sending, with the lock held. Return the link: the caller must end it."""
        self._how, self.closed = how, reason
        link, self.link = self.link, None
        self._queue = []
        return link

    def finish_connecting(self, until: float) -> None:
        """After `close`, wait for a thread that is connecting: it announces the end. `until` is a monotonic time."""
        connector = self._connector
        if connector is not None and connector is not current_thread():
            connector.join(max(0.0, until - monotonic()))

    # Connecting

    def _start(self) -> None:
        try:
            run_in_thread("telegrad-connect", self._connect)
        except (RuntimeError, MemoryError) as error:  # the process has no memory or no free thread
            unable = PeerUnreachable(f"worker {self._owner.name!r} was not called: {error}")
            # Control messages stay in the queue and leave with the next attempt. The calls fail, and the owner treats
            # that as a loss: they may have carried references, of which the callee will not hear.
            if self._abort((), unable, keeps_notices=True):
                self._owner.lost(PeerLost(str(unable)))

    def _connect(self) -> None:
        self._connector = current_thread()
        try:
            if self.closed is None:
                self._connect_and_send()
        finally:
            self._connector = None

    def _connect_and_send(self) -> None:
        try:
            link = self._owner.host.connect_to(self._owner)
        except Exception as error:
            self._abort((), self._owner.host.over or advised(error))
            self._owner.lost(error if isinstance(error, PeerError) else PeerError(str(error)))
            return
        if not self._drain(link):
            return
        # `close` ran while this thread was connecting, and found no link to end.
        if self.closed is not None:
            part(link, self.closed, self._how)
        # The link ended before `link` was set. `Peer.link_closed` may have run before `_next_batch` gave its last calls
        # to this link, and did not fail them. So it runs once more.
        elif link.closed is not None:
            self._owner.link_closed(link, link.closed)
        else:
            self.read_in_background()

    def _drain(self, link: AnyLink) -> bool:
        """Send the queue over a new connection; return False if the connection ended meanwhile."""
        while batch := self._next_batch(link):
            try:
                while batch:
                    message, call = batch[0]
                    link.send(message)
                    # The caller gave up after `_next_batch` had set `call.link`. Its own CANCEL may have left before
                    # this call, and the callee ignores a CANCEL of a call that it does not know.
                    if call is not None and call.abandoned:
                        link.send(Message(CANCEL, call.id))
                    batch.popleft()
            except Exception as error:  # the connection has ended, or there is no memory
                link.fail(error)
                reason = link.closed or PeerError("the connection ended")
                self._abort(batch, reason)
                # Reported once more: messages may have been queued since the end of the link was reported.
                self._owner.lost(reason)
                return False
        return True

    def _next_batch(self, link: AnyLink) -> deque[tuple[Message, PendingCall | None]]:
        with self._lock:
            batch = deque(waiting for waiting in self._queue if not _is_obsolete(*waiting))
            self._queue = []
            for _, call in batch:
                if call is not None:
                    call.link = link
            # In one step with the finding that the queue is empty. While `link` is None, other threads append.
            if not batch and self.closed is None:
                self.link, self._is_connecting = link, False
        return batch

    def _abort(
        self, unsent: Iterable[tuple[Message, PendingCall | None]], error: Exception, keeps_notices: bool = False
    ) -> bool:
        """Drop queued and unsent messages and fail their calls; return True if there were any calls."""
        with self._lock:
            waiting = [*unsent, *self._queue]
            self._is_connecting = False
            self._queue = [(message, call) for message, call in waiting if call is None] if keeps_notices else []
        calls = [call for _, call in waiting if call is not None]
        self._owner.fail(calls, error)
        return bool(calls)


def _is_obsolete(message: Message, call: PendingCall | None) -> bool:
    """Return True if the message need not be sent: its call has ended, and it carries no references."""
    return call is not None and (call.abandoned or call.done) and not message.flags & HAS_REFERENCES
