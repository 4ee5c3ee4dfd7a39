"""This worker's calls to one other worker, and the connection that carries them.

A connection is made at the first call and again after it broke; calls that were on their way when it broke fail,
since they may have run. Answers are read by the thread that waits for them, where it can have the right to read;
else by the reactor's leader.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from time import monotonic, perf_counter
from typing import Any

from telegrad.agent.futures import Future, wait_for
from telegrad.agent.naming import user_name
from telegrad.agent.pending import Pending
from telegrad.agent.reactor import INSTANT, Reactor, Work
from telegrad.devices.routes import Places
from telegrad.devices.streams import set_apart
from telegrad.errors import CallTimeout, PeerError, PeerLost, PeerUnreachable
from telegrad.group.members import Identity
from telegrad.transport.link import Link
from telegrad.transport.loopback import LoopEnd
from telegrad.wire.failures import fresh
from telegrad.wire.messages import BYE, CARRIES, NOTICE, Frame

SPIN = 250e-6  # as in the reactor: look again for this long before sleeping
SPIN_WITHIN = 400e-6  # only where the last answer came within this time
MOST_CALLS = 1 << 15  # in flight to one worker; who would begin another waits, unless it serves a call
MOST_BYTES = 1 << 30  # of the tensors in them
COMPANY = 16  # with more calls in flight to one worker, the next wait until so many leave together, or a moment
ROOM_LOOK = 0.1  # seconds between looks for room, where nobody tells
LONGEST_WAIT = 3600.0  # of one sleep: the platforms' timers do not take infinity

AnyLink = Link | LoopEnd
_UNWATCHED = contextlib.nullcontext()
_yield = getattr(os, "sched_yield", lambda: None)


class Peer:
    """The calling side of one connection."""

    def __init__(
        self,
        identity: Identity,
        program: str,
        places: Places,
        reactor: Reactor,
        connect: Callable[[Peer], AnyLink],
        complete: Callable[[Pending], None],
        on_lost: Callable[[Peer, PeerError], None],
        take_cargo: Callable[[Frame], Frame],
    ) -> None:
        """`complete` is called once for each call that has an outcome, when it is done."""
        self.identity = identity
        self.name = identity.name
        self.program = program
        self.places = places
        self._reactor = reactor
        self._connect = connect
        self.complete = complete
        self._on_lost = on_lost
        self._take_cargo = take_cargo
        self._lock = threading.Lock()  # guards all below
        self._room = threading.Condition(self._lock)  # there are fewer calls in flight
        self._queue = 0  # of threads that wait for that
        self._ids = 0
        self._pending: dict[int, Pending] = {}
        self._weight = 0  # of those
        self._link: AnyLink | None = None
        self._connecting = False
        self._backlog: list[tuple[int, dict[str, Any]]] = []  # frames for a connection that is being made
        self._closed: PeerError | None = None
        self._arming = threading.Lock()  # guards _armed: whether the leader reads the connection
        self._armed = False
        self._prompt = False  # the last answer came soon

    # Calls

    def call(self, pending: Pending, parts: dict[str, Any]) -> bool:
        """Send a call; `pending` will be done. After one with a quick outcome `expect` must follow.

        Whether it was left for `Reactor.send_unsent`: one of many, for which nobody waits in place.
        """
        with self._lock:
            if self._closed is not None:
                raise fresh(self._closed)
            self._ids += 1
            pending.id = self._ids
            self._pending[pending.id] = pending
            if "blobs" in parts:
                pending.weight = sum(blob.nbytes for blob in parts["blobs"])
                self._weight += pending.weight
        outcome = pending.outcome
        later = outcome is not None and len(self._pending) > COMPANY and bool(pending.id % COMPANY)
        self._send(pending.id, parts, later)
        if outcome is not None and not outcome.quick and not self._armed:
            self._arm()
        return later

    def notify(self, body: bytes, parts: dict[str, Any], patient: bool) -> None:
        """Send a control message; where it cannot be delivered, `on_lost` is told. A patient one waits for company."""
        self._send(0, {"kind": NOTICE, "body": body, **parts}, patient)

    def _send(self, id_: int, parts: dict[str, Any], later: bool = False) -> None:
        while True:
            with self._lock:
                link = self._link
                if link is None:
                    if self._closed is not None:
                        return
                    self._backlog.append((id_, {**parts, "blobs": set_apart(parts.get("blobs", ()))}))
                    if self._connecting:
                        return
                    self._connecting = True
            if link is None:
                self._begin_link()
                return
            try:
                link.send(id=id_, later=later, **parts)
                if later and isinstance(link, Link):
                    self._reactor.sent_later(link)
            except PeerError:
                # It had ended before this frame was written, so that the frame can go over a new one.
                with self._lock:
                    if self._link is link:
                        self._link = None
                    if id_ and id_ not in self._pending:
                        return
            except Exception as error:
                self._unsent(link, id_, parts, error)
                raise
            else:
                return

    def _unsent(self, link: AnyLink, id_: int, parts: dict[str, Any], error: Exception) -> None:
        """A frame could not be sent; where it is more than a call that fails, the other side must hear of it."""
        with self._lock:
            call = self._take(id_)
        if call is None or parts.get("flags", 0) & CARRIES:
            link.fail(error)

    def forget(self, pending: Pending) -> None:
        """The caller gave up; a late answer is ignored."""
        with self._lock:
            self._take(pending.id)

    def expire(self, pending: Pending) -> None:
        """The time of an asynchronous call is over."""
        with self._lock:
            found = self._take(pending.id)
        if found is not None:
            pending.error = self.timed_out(pending)
            self._done(pending)

    def timed_out(self, pending: Pending) -> CallTimeout:
        return CallTimeout(
            f"RPC ran for more than set timeout ({pending.timeout:g} s): "
            f"{user_name(pending.asked)} on worker {self.name!r}. "
            "It may still be running there. Give a longer timeout (rpc_timeout in the options, or timeout=... per call)"
        )

    @property
    def link(self) -> AnyLink | None:
        return self._link

    @property
    def outstanding(self) -> int:
        return len(self._pending)

    def _take(self, id_: int) -> Pending | None:
        """With the lock held: a call is in flight no longer."""
        pending = self._pending.pop(id_, None)
        if pending is not None:
            self._weight -= pending.weight
            if self._queue:
                self._room.notify()
        return pending

    # Waiting

    @property
    def crowded(self) -> bool:
        """Whether so much is in flight that nothing should be added."""
        return len(self._pending) >= MOST_CALLS or self._weight >= MOST_BYTES or self._behind

    @property
    def _behind(self) -> bool:
        """Whether answers come faster than they are passed on."""
        return self._reactor.unstarted >= MOST_CALLS

    def wait_for_room(self) -> None:
        """Wait until less is in flight, and read answers meanwhile."""
        while self.crowded and self._closed is None:
            link = self._link
            if not self._behind and isinstance(link, Link) and link.reading.acquire(blocking=False):
                try:
                    if self._armed:
                        self._disarm(link)
                    if not link.read():
                        link.wait_readable(ROOM_LOOK)
                finally:
                    link.stop_reading()
            else:
                with self._lock:
                    if self.crowded:
                        self._queue += 1
                        self._room.wait(ROOM_LOOK)
                        self._queue -= 1

    def wait(self, pending: Pending) -> bool:
        """Wait until `pending` is done; False where its deadline passed before."""
        if self._reactor.on_worker():
            with self._reactor.waiting(), pending.in_turn.waited_for() if pending.in_turn else _UNWATCHED:
                return self._wait(pending)
        return self._wait(pending)

    def wait_for(self, future: Future[Any]) -> None:
        """Wait until another thread has completed `future`."""
        if self._reactor.on_worker():
            with self._reactor.waiting():
                wait_for(future)
        else:
            wait_for(future)

    def _wait(self, pending: Pending) -> bool:
        self._reactor.send_unsent()
        while not pending.done:
            remaining = pending.deadline - monotonic()
            if remaining <= 0:
                return False
            link = self._link
            if isinstance(link, Link) and link.reading.acquire(blocking=False):
                try:
                    self._read(link, pending)
                finally:
                    link.stop_reading()
                continue
            told = self._told(pending)
            if pending.done:  # before there was anybody to be told
                break
            if link is None and not self._connecting:
                remaining = 0.01  # between the end of a connection and the word of it
            if told.acquire(timeout=min(remaining, LONGEST_WAIT)):
                told.release()
        return True

    def _told(self, pending: Pending) -> threading.Lock:
        with self._lock:
            if pending.told is None:
                pending.told = threading.Lock()
                pending.told.acquire()
            return pending.told

    def _read(self, link: Link, pending: Pending) -> None:
        if self._armed:
            self._disarm(link)
        pending.awaited = True
        start = perf_counter()
        until = start + SPIN if self._prompt else 0.0
        try:
            while not (pending.done or link.held) and link.closed is None:
                if link.read():
                    continue
                if perf_counter() < until:
                    _yield()
                    continue
                remaining = pending.deadline - monotonic()
                if remaining <= 0:
                    return
                link.wait_readable(min(remaining, LONGEST_WAIT))
        finally:
            pending.awaited = False
            self._prompt = perf_counter() - start < SPIN_WITHIN

    def expect(self) -> None:
        """Where answers are expected and nobody reads the connection, the leader shall."""
        if self._pending and not self._armed:
            self._arm()

    def _arm(self) -> None:
        """Have the leader read the connection, unless somebody does already (and `given_back` follows)."""
        with self._arming:
            link = self._link
            if isinstance(link, Link) and not link.reading.locked():
                self._armed = True
                self._reactor.poller.watch(link, read=True)

    def _disarm(self, link: Link) -> None:
        with self._arming:
            self._armed = False
            self._reactor.poller.watch(link, read=False)

    def tick(self) -> None:
        """Now and then: hear of the end of an idle connection, and give back what was lent over it."""
        link = self._link
        if link is not None:
            link.release()
            if not self._armed:
                self._arm()

    def retire(self, numbers: list[int]) -> None:
        link = self._link
        if link is not None:
            link.retire(numbers)

    # What the connection brings

    def on_frames(self, link: AnyLink, frames: Iterable[Frame]) -> None:
        for frame in frames:
            if frame.flags & CARRIES:  # also where the caller gave up
                frame = self._take_cargo(frame)
            with self._lock:
                pending = self._take(frame.id)
            if pending is not None:  # else its caller gave up
                pending.frame = frame
                pending.left = pending.awaited
                self._done(pending)

    def _done(self, pending: Pending) -> None:
        pending.done = True
        if pending.outcome is not None and not pending.left:
            if pending.outcome.quick:
                self.complete(pending)
            else:
                self._reactor.submit(Work(self.complete, pending, INSTANT))
        if pending.told is not None:
            pending.told.release()

    def on_closed(self, link: AnyLink, reason: PeerError) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
            waiting = {id_ for id_, _ in self._backlog}
            failed = [p for id_ in list(self._pending) if id_ not in waiting and (p := self._take(id_)) is not None]
        with self._arming:
            self._armed = False
        self._fail(failed, reason)
        self._on_lost(self, reason)

    def _fail(self, failed: list[Pending], reason: BaseException) -> None:
        for pending in failed:
            pending.error = reason
            self._done(pending)

    # Making the connection

    def _begin_link(self) -> None:
        try:
            threading.Thread(target=self._make_link, name="telegrad-connect", daemon=True).start()
        except (RuntimeError, MemoryError) as error:  # the process has no memory, or no thread left
            unable = PeerUnreachable(f"worker {self.name!r} was not called: {error}")
            if self._give_up(unable, messages_too=False):  # they go with the next attempt
                self._on_lost(self, PeerLost(str(unable)))  # which is no death, but calls may carry something

    def _give_up(self, error: Exception, messages_too: bool) -> bool:
        """No connection could be made: calls that wait for one fail. Whether there were any."""
        with self._lock:
            self._connecting = False
            failed = [p for id_, _ in self._backlog if (p := self._take(id_)) is not None]
            self._backlog = [] if messages_too else [entry for entry in self._backlog if not entry[0]]
        self._fail(failed, error)
        return bool(failed)

    def _make_link(self) -> None:
        try:
            link = self._connect(self)
        except Exception as error:
            self._give_up(error, messages_too=True)
            self._on_lost(self, error if isinstance(error, PeerError) else PeerError(str(error)))
            return
        while True:
            with self._lock:
                backlog, self._backlog = self._backlog, []
                if not backlog:
                    self._connecting = False
                    self._link = link
                    closed = self._closed
                    break
            for at, (id_, parts) in enumerate(backlog):
                try:
                    link.send(id=id_, **parts)
                except Exception as error:  # gone already, or no memory: the rest of the backlog fails with it
                    link.fail(error)
                    with self._lock:
                        self._backlog = backlog[at:] + self._backlog
                        backlog, self._backlog = self._backlog, []
                        self._connecting = False
                        failed = [p for i, _ in backlog if (p := self._take(i)) is not None]
                    self._fail(failed, link.closed or PeerError("the connection ended"))
                    return
        if closed is not None:
            link.close(closed)
        elif link.closed is not None:
            self.on_closed(link, link.closed)
        else:
            self._arm()

    def close(self, reason: PeerError, how: str = "") -> None:
        """End the connection and every call on it; the other is told `how` this worker left."""
        with self._lock:
            self._closed = reason
            link = self._link
            failed = list(self._pending.values()) if link is None else []
            if link is None:
                self._pending.clear()
                self._backlog.clear()
            self._room.notify_all()
        if link is not None:
            with contextlib.suppress(PeerError):
                link.send(BYE, body=how.encode())
            link.close(reason)
        self._fail(failed, reason)
