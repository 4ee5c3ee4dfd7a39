"""A call on its way."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from math import inf
from time import monotonic, perf_counter
from typing import Any, Protocol

from telegrad import instruments
from telegrad.agent.attachments import Attachments
from telegrad.agent.cancelling import Served
from telegrad.agent.futures import Future, Outcome
from telegrad.agent.naming import noted_name, user_name
from telegrad.agent.scene import InTurn, Share
from telegrad.agent.underway import Underway
from telegrad.errors import CallTimeout, PeerError, PeerLost, PeerSilent, PeerStopped, PeerUnreachable
from telegrad.group.members import Identity
from telegrad.instruments import CALLED
from telegrad.transport.waker import Waker, waker_here
from telegrad.wire.messages import FAILURE, Message

RAISED, GAVE_UP = "raised", "gave up"  # what became of a call: its function raised; its caller was interrupted


class Carrier(Protocol):
    """The calls of this worker to another, of which one is."""

    identity: Identity
    name: str

    def wait(self, pending: Pending) -> bool: ...

    def wait_for(self, future: Future[Any]) -> None: ...

    def complete_here(self, pending: Pending) -> None: ...

    def cancel(self, pending: Pending, why: str) -> bool: ...


class Pending:
    """A call that was not answered yet.

    Many may be in flight, and the garbage collector visits each object of each: so it is one object, and its future,
    and a lock only where a thread waits for another to tell it.
    """

    __slots__ = (
        "answer",
        "asked",
        "attachments",
        "awaited",
        "begun",
        "connection",
        "deadline",
        "done",
        "error",
        "id",
        "in_turn",
        "keeps",
        "outcome",
        "parent",
        "peer",
        "timed",
        "timeout",
        "told",
        "underway",
        "unwanted",
        "waiter_completes",
        "waker",
        "weight",
    )

    def __init__(
        self, peer: Carrier, asked: Any, timeout: float, outcome: Outcome | None = None, keeps: Any = None
    ) -> None:
        """`asked` is what the user has called, for errors.

        `outcome` is told of an asynchronous call; who waits in place needs neither it nor `keeps`.
        """
        self.peer = peer
        self.asked = asked
        self.timeout = timeout
        self.begun = perf_counter()
        self.deadline = monotonic() + timeout if timeout else inf
        self.outcome = outcome
        self.keeps = keeps
        self.id = 0
        self.timed = False  # the clock ends it
        self.weight = 0  # bytes of its tensors
        self.in_turn: InTurn | None = None  # where a method of an actor makes it
        self.underway: Underway | None = None  # where it sends tensors from their own memory
        self.connection = 0  # the number of the one over which it was sent
        self.answer: Message | None = None
        self.attachments: Attachments | None = None  # which came with the answer
        self.error: BaseException | None = None
        self.done = False
        self.awaited = False  # the thread that reads the connection waits for this very call
        self.waiter_completes = False  # and so completing the future was left to it
        self.told: threading.Lock | None = None  # held until the call is done; made by who waits
        self.waker: Waker | None = None  # of the thread that waits for this call by itself, where it may be cancelled
        self.parent: Served | None = None  # for the sake of which call it was made
        self.unwanted = False  # it was over before its answer came

    def help(self) -> None:
        """Wait until the future is done, reading the answer by this thread where it can."""
        try:
            self.peer.wait(self)
        finally:
            self.peer.complete_here(self)
        outcome = self.outcome
        if isinstance(outcome, Future) and not outcome.done():
            self.peer.wait_for(outcome)

    @property
    def described(self) -> str:
        return f"{user_name(self.asked)} on worker {self.peer.name!r}"

    def limit(self, timeout: float) -> None:
        """Give it another time than it was made with, before it begins."""
        self.timeout = timeout
        self.deadline = monotonic() + timeout if timeout else inf

    def takes_waker(self) -> bool:
        """Before this thread sleeps: where others may cancel it, they can wake the thread from now on.

        True only the first time, when it is to look once more whether they have.
        """
        if self.waker is not None or (self.outcome is None and self.parent is None):
            return False
        self.waker = waker_here()
        return self.waker is not None

    def wait_told(self, lock: AbstractContextManager[Any], limit: float) -> None:
        """Wait until another thread has done it. `lock` guards that what tells is made once."""
        with lock:
            if self.told is None:
                self.told = threading.Lock()
                self.told.acquire()
            told = self.told
        if self.done:  # before there was one to be told
            return
        got: list[bool] = []
        try:
            got.extend(map(told.acquire, (True,), (limit,)))  # all of it in C: no interrupt can lose what it gave
        finally:
            if any(got):
                told.release()  # to the next that waits

    def wake(self) -> None:
        """It is done: who waits goes on."""
        if self.told is not None:
            self.told.release()
        if self.waker is not None:
            self.waker.wake()

    def time(self, caller: str) -> tuple[float, str]:
        """What it tells of its time, 0 for nothing, and whose limit that is; of its own if there is a `caller`."""
        if not self.timeout or not (caller or isinstance(self.timeout, Share)):
            return 0.0, ""
        own = f"the {self.timeout:g} s of the call of {user_name(self.asked)} by worker {caller!r}"
        return float(self.timeout), self._whose or own

    @property
    def _whose(self) -> str:
        """Limit its time is, where that is not its own."""
        return self.timeout.whose if isinstance(self.timeout, Share) else ""

    def cut_off(self, reason: PeerError) -> PeerError:
        """Why it failed, being under way as its connection ended."""
        age = perf_counter() - self.begun
        again = "; rpc_sync and rpc_async repeat it with idempotent=True" if isinstance(reason, PeerLost) else ""
        error = type(reason)(f"{reason}. This call, of {user_name(self.asked)}, was under way for {age:.1f} s{again}")
        error.__cause__ = reason.__cause__
        return error

    def late(self, last_word: str) -> CallTimeout:
        """Why it failed, being out of time, with what the callee says that it is at."""
        shared = f", what was left of {self._whose}" if self._whose else ""
        return CallTimeout(
            f"RPC ran for more than set timeout ({self.timeout:g} s{shared}): {self.described}. "
            f"It may still be running there{last_word}. "
            "Give a longer timeout (rpc_timeout in the options, or timeout=... per call)"
        )

    def ended(self, failure: str) -> instruments.Event:
        """That it has ended, for who looks on."""
        if not failure and self.answer is not None and self.answer.kind == FAILURE:
            failure = RAISED
        name = noted_name(self.asked)
        return (CALLED, self.begun, perf_counter(), self.peer.name, self.id, name, self.weight, failure)

    def given_up(self) -> instruments.Event:
        """That its caller waits no longer."""
        is_late = 0 < self.timeout <= perf_counter() - self.begun
        return self.ended(CallTimeout.__name__ if is_late else GAVE_UP)

    def cancel(self, why: str = "") -> bool:
        """End it now, and tell the callee; False where it is over."""
        return self.peer.cancel(self, why)

    def __repr__(self) -> str:
        state = "done" if self.done else f"in flight for {perf_counter() - self.begun:.1f} s"
        return f"<call {self.id} of {user_name(self.asked)} on {self.peer.name!r}: {state}>"


def advised(error: Exception) -> Exception:
    """Why calls failed that could not be sent, with what else a call can do where nobody answered."""
    if type(error) is not PeerUnreachable:
        return error
    kind = PeerStopped if isinstance(error.__cause__, PeerSilent) else PeerUnreachable
    told = kind(f"{error}. In a group to which workers return, rpc_sync and rpc_async wait with wait_for_worker=True")
    told.__cause__ = error.__cause__
    return told
