"""The connection to one worker, made for the first message, and made again after a connection has ended.

    not connected   `link` is None; the next message starts a thread that connects
    connecting      `link` is None; messages wait in a queue, and the thread sends them once it has a connection
    connected       `link` is set, and the queue is empty; each thread writes its messages itself
    closed          permanently; messages are dropped

The thread that connects sets `link` in the same step in which it finds the queue empty. No message therefore overtakes
an earlier one of the same thread.

The connection of a worker to itself, `LoopEnd`, passes messages by value, like all others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, Protocol

from telegrad._core.devices.device_streams import copied, set_apart
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.threads import run_in_thread
from telegrad._core.transport.connect import part
from telegrad._core.transport.link import Link
from telegrad._core.wire.messages import CANCEL, HAS_REFERENCES, Message
from telegrad._core.wire.tensors import DeviceBlob
from telegrad.errors import PeerError, PeerLost, PeerSilent, PeerStopped, PeerUnreachable


class LoopEnd:
    """An end of a connection within a process; it creates the other end. Has the interface of `Link` that agents use.

    Nothing is read here: the sending thread delivers the message.
    """

    is_congested = False

    def __init__(
        self,
        peer: str,
        arrive: Callable[[LoopEnd, Iterable[Message]], None],
        arrive_back: Callable[[LoopEnd, Iterable[Message]], None],
        on_closed: Callable[[LoopEnd, PeerError], None],
        other: LoopEnd | None = None,
    ) -> None:
        """`arrive` processes, at the other end, messages sent at this one; `on_closed` is called when this closes."""
        self.peer = peer
        self.closed: PeerError | None = None
        self._arrive = arrive
        self._on_closed = on_closed
        self._other: LoopEnd = other or LoopEnd(peer, arrive_back, arrive, lambda *_: None, self)

    def send(self, message: Message, later: bool = False) -> bool:
        """Deliver a message now. `later` is ignored: there is no outbox."""
        if self.closed is not None:
            raise fresh(self.closed)
        blobs = [copied(blob) if isinstance(blob, DeviceBlob) else blob.clone() for blob in message.blobs]
        arrived = Message(message.kind, message.id, message.flags, message.head, message.meta, message.body, blobs)
        self._arrive(self._other, [arrived])
        return True

    def when_drained(self, act: Callable[[], None]) -> None:
        act()

    def close(self, reason: PeerError) -> None:
        for end in (self, self._other):
            if end.closed is None:
                end.closed = reason
                end._on_closed(end, reason)

    def fail(self, error: BaseException) -> None:
        """Close the connection because a message could not be sent (no memory, ...): no response will come."""
        self.close(PeerLost(f"a message of worker {self.peer!r} to itself failed ({error!r})"))


AnyLink = Link | LoopEnd


class QueuedCall(Protocol):
    """The part of a call that sending its message needs."""

    id: int
    link: AnyLink | None  # the connection that carries the call
    done: bool
    abandoned: bool  # it ended before its answer came


class LinkOwner(Protocol):
    """The sender of the messages."""

    name: str

    def fail(self, calls: Iterable[Any], error: Exception) -> None:
        """Fail the calls that are in flight."""

    def link_closed(self, link: AnyLink, reason: PeerError) -> None: ...

    def lost(self, reason: PeerError) -> None:
        """Handle a failed connection attempt: messages were dropped."""


class LazyLink:
    """Sends messages to one worker."""

    def __init__(self, owner: LinkOwner, connect: Callable[[], AnyLink], reactor: Reactor, lock: Any) -> None:
        """`lock` guards all fields; `link` and `closed` are also read without it."""
        self.link: AnyLink | None = None
        self.closed: PeerError | None = None  # never reset
        self.is_prompt = False  # the last answer came soon: a guess, set by any thread without the lock
        self._owner = owner
        self._make = connect
        self._reactor = reactor
        self._lock = lock
        self._how = ""  # how this worker left; set before `closed`
        self._is_connecting = False
        self._connector: threading.Thread | None = None  # while it connects
        self._queue: list[tuple[Message, QueuedCall | None]] = []

    def send(self, message: Message, call: QueuedCall | None = None, later: bool = False) -> None:
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
                        self.link_closed(link)
                    if _is_obsolete(message, call):
                        return
                    continue
                if later and isinstance(link, Link):
                    self._reactor.sent_later(link)
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

    def link_closed(self, link: AnyLink) -> None:
        """Handle the end of a connection, with the lock held."""
        if self.link is link:
            self.link = None

    def close(self, reason: PeerError, how: str) -> AnyLink | None:
        """Stop sending, with the lock held. Return the link: the caller must end it."""
        self._how, self.closed = how, reason
        link, self.link = self.link, None
        self._queue = []
        return link

    def finish_connecting(self, until: float) -> None:
        """After `close`, wait for a thread that is connecting: it announces the end. `until` is a monotonic time."""
        connector = self._connector
        if connector is not None and connector is not threading.current_thread():
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
        self._connector = threading.current_thread()
        try:
            if self.closed is None:
                self._connect_and_send()
        finally:
            self._connector = None

    def _connect_and_send(self) -> None:
        try:
            link = self._make()
        except Exception as error:
            self._abort((), _with_advice(error))
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

    def _next_batch(self, link: AnyLink) -> deque[tuple[Message, QueuedCall | None]]:
        with self._lock:
            batch = deque(waiting for waiting in self._queue if not _is_obsolete(*waiting))
            self._queue = []
            for _, call in batch:
                if call is not None:
                    call.link = link
            # In one step with the finding that the queue is empty (see the header). While `link` is None, other threads
            # append.
            if not batch and self.closed is None:
                self.link, self._is_connecting = link, False
        return batch

    def _abort(
        self, unsent: Iterable[tuple[Message, QueuedCall | None]], error: Exception, keeps_notices: bool = False
    ) -> bool:
        """Drop queued and unsent messages and fail their calls; return True if there were any calls."""
        with self._lock:
            waiting = [*unsent, *self._queue]
            self._is_connecting = False
            self._queue = [(message, call) for message, call in waiting if call is None] if keeps_notices else []
        calls = [call for _, call in waiting if call is not None]
        self._owner.fail(calls, error)
        return bool(calls)


def _is_obsolete(message: Message, call: QueuedCall | None) -> bool:
    """Return True if the message need not be sent: its call has ended, and it carries no references."""
    return call is not None and (call.abandoned or call.done) and not message.flags & HAS_REFERENCES


def _with_advice(error: Exception) -> Exception:
    """Return the error of calls that could not be sent; if no worker answered, with advice on another way to call."""
    if type(error) is not PeerUnreachable:
        return error
    kind = PeerStopped if isinstance(error.__cause__, PeerSilent) else PeerUnreachable
    advice = "Where workers are restarted, call rpc_sync or rpc_async with wait_for_worker=True"
    advised = kind(f"{error}. {advice}")
    advised.__cause__ = error.__cause__
    return advised
