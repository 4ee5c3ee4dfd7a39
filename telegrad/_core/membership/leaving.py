"""Leaving a group: alone, or together with all other workers. Does the I/O for `shutdown_barrier.py`.

Also the end of a worker that only serves, the interface of an agent that its group uses, and a queue of messages to
send by it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Protocol, get_args

from telegrad._core.membership.members import Identity, Member, Members, listed
from telegrad._core.membership.registry import LOST
from telegrad._core.membership.shutdown_barrier import DONE, WAITING, Letter, Message, ShutdownBarrier
from telegrad._core.membership.suspects import is_broken
from telegrad._core.texts import Wait
from telegrad._core.wire.messages import OVER
from telegrad.errors import CallTimeout, LeftEarly, PeerError, PeerLost, PeerSilent, ShutDown

BROKEN = 2.0  # seconds for which handshakes with a worker may fail without any message of it
ASK_AHEAD = 0.2  # seconds to ask the leader before the awaited workers are printed, or a timeout names them
LEAVES = "worker {!r} leaves its group: this process has called rpc.shutdown()"
FIRST_LOOK, LAST_LOOK = 5e-4, 0.02  # seconds between checks if this worker is quiet, while that is needed

log = logging.getLogger("telegrad")


class MessageSender(Protocol):
    """A worker's control messages, and the state of its calls and connections."""

    lost: list[Callable[[Identity, PeerError], None]]  # called when a connection to a worker ended
    reached: list[Callable[[Identity], None]]  # called when a connection to or from a worker was made

    @property
    def closed(self) -> bool: ...

    @property
    def idle(self) -> bool:
        """Return True if no call of this worker is in flight, and none runs here."""

    @property
    def started(self) -> int:
        """The number of calls that this worker has begun."""

    @property
    def stands_for(self) -> float:
        """The seconds for which no thread has polled this worker's connections, though one should have."""

    def on(self, message: type, handler: Callable[[Identity, Any], None]) -> None:
        """Call `handler(sender, message)` for every control message of that class."""

    def notify(self, to: str | int, message: tuple[Any, ...]) -> None:
        """Send a control message; on failure, call the functions in `lost`."""

    def warn_lost(self, who: Identity, why: str) -> None:
        """Log that a worker was lost, unless that was logged before."""

    def note_return(self, who: Identity) -> None:
        """Log that a lost worker is back."""

    def forget_names(self, but: Collection[str]) -> None:
        """Forget the results of earlier name lookups, except for the lives that are still present."""

    def cut(self, who: Identity, reason: PeerError) -> None:
        """Close the connections with a worker that is out of the group, and refuse later ones."""


class MessageQueue:
    """Sends messages in the order in which they were decided, from any thread.

    If a slow thread sent one after the other worker had left, that would open a connection, and its failure would look
    like the death of that worker.
    """

    def __init__(self, post: MessageSender) -> None:
        self._post = post
        self._messages: deque[tuple[int, tuple[Any, ...]]] = deque()
        self._sending = threading.Lock()  # acquired without waiting

    def add(self, messages: Iterable[tuple[int, tuple[Any, ...]]]) -> None:
        """Queue messages under the lock of their decision. Call `send` after it is released."""
        self._messages.extend(messages)

    def send(self) -> None:
        """Send the queued messages, unless another thread does: that one looks again after it releases the lock."""
        while self._messages and self._sending.acquire(blocking=False):
            try:
                while self._messages:
                    to, message = self._messages.popleft()
                    try:
                        self._post.notify(to, message)
                    except PeerError:
                        log.debug("telegrad: %r has already left", to)
            finally:
                self._sending.release()


class Leaving:
    """How a worker leaves a dynamic group: alone, once it has no call in flight."""

    together = False  # True if all workers of the group leave at once

    def __init__(self, post: MessageSender, me: Member) -> None:
        self._post = post
        self._me = me
        self._has_asked = False  # which workers are missing, since they were last printed
        self._begun: int | None = None  # the calls of this worker so far, when only calls began to delay the end
        self._is_over = False  # set once
        self._changed = threading.Condition()  # wakes the threads in `wait`; guards changes of _changes
        self._changes = 0

    def wait(self, timeout: float, serving: bool) -> None:
        """Wait until this worker may leave, or has left; with `serving` silently. Raise CallTimeout after `timeout`
        seconds, if not 0. Several threads may wait."""
        deadline = monotonic() + timeout if timeout > 0 else inf
        if not self._is_over:
            self._begin()
        what = "serve" if serving else "shutdown"

        def text() -> str:
            return f"{self.awaited()}{self._begun_meanwhile()} (worker {self._me.name!r} continues to serve)"

        with Wait(what, text, self.missing, worker=self._me.name, level=logging.INFO) as wait:
            pause, seen = FIRST_LOOK, self._changes
            while not (self._is_over or self._over()):
                left = deadline - monotonic()
                if left <= 0:
                    left_it = f"worker {self._me.name!r} left the group anyway"
                    raise CallTimeout(
                        f"shutdown waited {timeout:g} s: {self.awaited()}{self._begun_meanwhile()}; {left_it}"
                    )
                # A server calls shutdown at once and serves from here until its end: it must not poll then.
                looks = self.all_leave()
                if looks and self._begun is None:
                    self._begun = self._post.started
                if not serving:
                    left = min(left, self._print(wait, left))
                with self._changed:
                    # `seen` was read before the look above, so a change since then ends this wait at once.
                    if self._changes == seen:
                        self._changed.wait(min(left, pause if looks else threading.TIMEOUT_MAX))
                    pause = min(1.5 * pause, LAST_LOOK) if self._changes == seen else FIRST_LOOK
                    seen = self._changes

    def _print(self, wait: Wait, left: float) -> float:
        """Print the awaited workers if it is time; return the seconds until the next call. `left` is until the end."""
        wait.look()
        ahead = min(wait.left, left) - ASK_AHEAD
        if ahead > 0:
            self._has_asked = False
            return ahead
        if not self._has_asked:
            self._has_asked = True
            self.ask()
        return wait.left

    def _begun_meanwhile(self) -> str:
        """Return how many calls this worker has begun while only calls delay the end, as text, or ""."""
        count = 0 if self._begun is None else self._post.started - self._begun
        return f"; worker {self._me.name!r} itself has begun calls meanwhile ({count})" if count else ""

    def _begin(self) -> None:
        """Record that this worker wants to leave."""

    def _over(self) -> bool:
        """Return True if this worker may leave."""
        return self._post.idle

    # Any thread may call the following.

    def all_leave(self) -> bool:
        """Return True if only calls in flight delay the end: no other worker has to call `shutdown`."""
        return True

    def awaited(self) -> str:
        return f"calls by worker {self._me.name!r}, or to it, are still in flight"

    def missing(self) -> list[str]:
        """Return the names of the workers that it waits for, as far as they are known."""
        return []

    def ask(self) -> None:
        """Ask other workers for the names that `missing` returns, and for messages that may be lost."""

    def over(self) -> None:
        """End all waits: this worker leaves, or the program that started it has ended."""
        self._is_over = True
        self._look_again()

    def _look_again(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def check(self, required: Sequence[Member]) -> None:
        """Raise PeerLost if one of them was lost."""


class LeavingTogether(Leaving):
    """How a worker leaves a group of fixed size: with all others, once nothing is in flight in it."""

    together = True

    def __init__(self, post: MessageSender, me: Member, members: Members) -> None:
        super().__init__(post, me)
        self._members = members
        self._lock = threading.Lock()  # guards _barrier
        self._messages = MessageQueue(post)
        self._barrier = ShutdownBarrier(me.id, {member.id for member in members})
        self._broken: dict[int, float] = {}  # by rank: when its handshakes began to fail; without the lock
        self._stories: dict[int, str] = {}  # of workers that left early or died; each added once, by setdefault
        for message in get_args(Message):
            post.on(message, self._on_message)
        post.lost.append(self._on_lost)

    def _begin(self) -> None:
        self._act(lambda: self._barrier.enter(self._post.started if self._post.idle else None))

    def _over(self) -> bool:
        self._answer()
        with self._lock:
            return self._barrier.state == DONE

    def all_leave(self) -> bool:
        with self._lock:
            return self._barrier.asked

    def _answer(self) -> None:
        """Answer the leader's question, if any, once this worker is quiet."""
        while self.all_leave() and self._post.idle:
            # Look again under the lock, under which questions are recorded, too: `idle` and `started` must be read
            # after the question that they answer has arrived.
            self._act(lambda: self._barrier.quiet(self._post.started) if self._post.idle else [])

    def went_on(self, ids: set[int]) -> None:
        """Remove workers that are in another generation of their group."""
        for id_ in ids:
            self._act(partial(self._barrier.lost, id_, False))
        self._look_again()

    def ask(self) -> None:
        self._act(self._barrier.ask_who)

    def over(self) -> None:
        self._act(self._barrier.over)
        super().over()

    def missing(self) -> list[str]:
        absent, busy = self._waited_for()
        return [name for name in absent or busy if name != self._me.name]

    def awaited(self) -> str:
        absent, busy = self._waited_for()
        if absent:
            return f"{_quoted(absent)} did not call shutdown"
        if busy:
            return f"calls are in flight on {_quoted(busy)}, or no answer arrives"
        return "other workers have not called shutdown, or calls are in flight"

    def _waited_for(self) -> tuple[list[str], list[str]]:
        """Return the names of the workers that have not called shutdown, and of those with calls in flight."""
        with self._lock:
            absent, busy = sorted(self._barrier.missing), sorted(self._barrier.busy)
        return [self._members.find(id_).name for id_ in absent], [self._members.find(id_).name for id_ in busy]

    def check(self, required: Sequence[Member]) -> None:
        with self._lock:
            lost = set(self._barrier.lost_ones)
        missed = [member for member in required if member.id in lost]
        if missed:
            how = "; ".join(self._stories.get(member.id, f"worker {member.name!r} was lost") for member in missed)
            raise PeerLost(f"the group has ended without a worker that shutdown requires: {how}")

    # Events

    def _act(self, event: Callable[[], list[Letter]]) -> None:
        """Pass an event to the barrier, and send its messages."""
        with self._lock:
            self._messages.add(event())
        self._messages.send()

    def _on_message(self, sender: Identity, message: Message) -> None:
        self._broken.pop(sender.id, None)
        self._act(lambda: self._barrier.receive(sender.id, message))
        # The thread that has read a question answers it if this worker is quiet. Only if it is not, the thread in
        # `wait` wakes and looks again until it is.
        self._answer()
        self._wake()

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        if isinstance(reason.__cause__, PeerSilent):
            reason = reason.__cause__
        if isinstance(reason, ShutDown) and reason._how == OVER:
            self.over()
        elif not isinstance(reason, PeerLost) or isinstance(reason, PeerSilent):
            inside = self._barrier.inside
            may_live = _may_live(reason, inside)  # then the membership probes the worker, and reports the result
            # A proxy may accept connections for a worker that has died: then none is refused, and each probe is
            # answered. But no message of that worker arrives, and each handshake fails.
            if not may_live or (inside and monotonic() > self._broken.setdefault(who.id, monotonic()) + BROKEN):
                self.lose(who, reason)
        else:
            # A broken connection is no death: the membership probes the worker, and reports a death by `lose`. But
            # messages may have been lost with the connection.
            self._act(lambda: self._barrier.remind(who.id))

    def lose(self, who: Identity, reason: PeerError) -> None:
        """Remove a worker that has died or left: the barrier does not wait for it."""
        has_left_early = isinstance(reason, LeftEarly)
        died = has_left_early or not isinstance(reason, ShutDown)
        with self._lock:
            waiting = self._barrier.state == WAITING
        if died and waiting:
            story = str(reason) if has_left_early else f"worker {who.name!r} was lost ({reason})"
            self._stories.setdefault(who.id, story)
            self._post.warn_lost(who, f"{story}. Its group continues, and will shut down, without it")
        self._act(lambda: self._barrier.lost(who.id, died))
        self._wake()

    def take_back(self, member: Member) -> None:
        """Wait again for a lost worker that answers again."""
        self._act(lambda: self._barrier.take_back(member.id))

    def remind(self, member: Member) -> None:
        """Resend what may have been lost with the connection of a worker that answers again."""
        self._act(lambda: self._barrier.remind(member.id))

    def _wake(self) -> None:
        """Wake the thread in `wait` if its condition may have changed."""
        with self._lock:
            seen = self._barrier.asked or self._barrier.state == DONE
        if seen:
            self._look_again()


def _may_live(reason: PeerError, inside: bool) -> bool:
    """Return True if an unreachable worker may be alive, because no connection was refused.

    `inside` shutdown, a worker is not awaited if its handshake timed out, or if another worker has its address.
    """
    cause = reason.__cause__
    return is_broken(reason) and (not inside or (isinstance(cause, OSError) and not isinstance(cause, TimeoutError)))


def _quoted(names: list[str]) -> str:
    return listed([repr(name) for name in names])


class ServeState:
    """Decides when a worker that only serves a dynamic group ends.

    It ends with the group, or when a required worker is lost. That includes itself, because no worker calls one that
    was declared lost. The lock of its membership guards all but `ended`.
    """

    def __init__(self, me: Member) -> None:
        self._me = me
        self.ended = threading.Event()  # this worker no longer serves
        self.missed = ""  # why it must not serve on: a member was lost; set once, before `ended`
        self._only_serves = False
        self._required: Sequence[Member] = ()

    @property
    def leaves(self) -> bool:
        """Return True if this worker only served, and no longer does."""
        return self._only_serves and self.ended.is_set()

    def begin(self, required: Sequence[Member], gone: Mapping[str, str]) -> None:
        """Only serve from now on; `gone` maps the incarnations of former members to how they went."""
        self._required, self._only_serves = required, True
        for member in required:
            self.miss(member, gone.get(member.incarnation, ""))

    def miss(self, member: Member, how: str) -> None:
        """Record that a member is gone, which may be required."""
        if how != LOST:
            return
        if member.incarnation == self._me.incarnation:
            self.fail(f"this worker, {self._me.name!r}, was declared lost; see its log")
        elif member.name in {each.name for each in self._required}:
            self.fail(f"worker {member.name!r} was lost, and {self._me.name!r} does not serve without it; see its log")

    def fail(self, why: str) -> None:
        self.missed = self.missed or why
        self.ended.set()
