"""A call on its way."""

from __future__ import annotations

import threading
from math import inf
from time import monotonic, perf_counter
from typing import Any, Protocol

from telegrad.agent.attachments import Attachments
from telegrad.agent.futures import Future, Outcome
from telegrad.agent.naming import user_name
from telegrad.agent.scene import InTurn
from telegrad.agent.underway import Underway
from telegrad.group.members import Identity
from telegrad.wire.messages import Message


class Carrier(Protocol):
    """The calls of this worker to another, of which one is."""

    identity: Identity
    name: str

    def wait(self, pending: Pending) -> bool: ...

    def wait_for(self, future: Future[Any]) -> None: ...

    def complete_here(self, pending: Pending) -> None: ...


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
        "peer",
        "timed",
        "timeout",
        "told",
        "underway",
        "waiter_completes",
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

    def help(self) -> None:
        """Wait until the future is done, reading the answer by this thread where it can."""
        try:
            self.peer.wait(self)
        finally:
            self.peer.complete_here(self)
        outcome = self.outcome
        if isinstance(outcome, Future) and not outcome.done():
            self.peer.wait_for(outcome)

    def __repr__(self) -> str:
        state = "done" if self.done else f"in flight for {perf_counter() - self.begun:.1f} s"
        return f"<call {self.id} of {user_name(self.asked)} on {self.peer.name!r}: {state}>"
