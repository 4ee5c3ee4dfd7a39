"""A call on its way."""

from __future__ import annotations

import threading
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from telegrad.agent.futures import Future, Outcome
from telegrad.agent.scene import InTurn
from telegrad.agent.underway import Underway
from telegrad.wire.messages import Frame

if TYPE_CHECKING:
    from telegrad.agent.peer import Peer


class Pending:
    """A call that was not answered yet.

    Many may be in flight, and the garbage collector visits each object of each: so it is one object, and its future,
    and a lock only where a thread waits for another to tell it.
    """

    __slots__ = (
        "asked",
        "awaited",
        "deadline",
        "done",
        "error",
        "frame",
        "id",
        "in_turn",
        "keeps",
        "left",
        "outcome",
        "peer",
        "timeout",
        "told",
        "underway",
        "weight",
    )

    def __init__(
        self, peer: Peer, asked: Any, timeout: float, outcome: Outcome | None = None, keeps: Any = None
    ) -> None:
        """`asked` is what the user has called, for errors.

        `outcome` is told of an asynchronous call; who waits in place needs neither it nor `keeps`.
        """
        self.peer = peer
        self.asked = asked
        self.timeout = timeout
        self.deadline = monotonic() + timeout if timeout else inf
        self.outcome = outcome
        self.keeps = keeps
        self.id = 0
        self.weight = 0  # bytes of its tensors
        self.in_turn: InTurn | None = None  # where a method of an actor makes it
        self.underway: Underway | None = None  # where it sends tensors from their own memory
        self.frame: Frame | None = None
        self.error: BaseException | None = None
        self.done = False
        self.awaited = False  # the thread that reads the connection waits for this very call
        self.left = False  # and so completing the future was left to it
        self.told: threading.Lock | None = None  # held until the call is done; made by who waits

    def help(self) -> None:
        """Wait until the future is done, reading the answer by this thread where it can."""
        try:
            self.peer.wait(self)
        finally:
            if self.left:
                self.left = False
                self.peer.complete(self)
        outcome = self.outcome
        if isinstance(outcome, Future) and not outcome.done():
            self.peer.wait_for(outcome)
