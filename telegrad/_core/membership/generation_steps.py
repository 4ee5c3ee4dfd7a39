"""Decides if a generation continues or ends, when all its workers are between two steps.

The living worker with the smallest rank leads. All workers report their state to it:

    HERE      between two steps: rendezvous_again() was called
    SERVING   without steps of its own: serve() was called
    LEAVING   at its end: shutdown() was called

A worker without a report is within a step, and the leader waits for it. After all reports, the leader answers:

    worker                        leader
      | -- StepReport(how, step) -> |
      | <------------- Stay(step) - |     nothing has changed: continue with the next step
      | <------------------- Move - |     to the next generation: a worker has died, leaves, or wants to join
      | <----------------- Finish - |     to all: the others leave, and serving workers have no more work

Serving workers wait without an answer as long as nothing changes. A worker that dies is removed; if it led, the others
report to the next leader. A generation that has lost a worker never continues.

A removed worker may be alive: it was stopped or unreachable. The others do not wait for it, not even in the directory,
and answer its StepReport with Move: it joins the next generation by itself. After the end of a connection, a follower
reports again, and the leader sends its own state. A follower answers that with its own StepReport, and a worker that
has removed the leader answers with Move.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

HERE, SERVING, LEAVING = "HERE", "SERVING", "LEAVING"
STAY, MOVE, FINISH = "STAY", "MOVE", "FINISH"


class StepReport(NamedTuple):
    """The state of the sender; `step` counts its steps in this generation."""

    how: str  # "" within a step, if the leader asks
    step: int
    broken: bool  # it knows of a worker that is gone


class Stay(NamedTuple):
    """All were before that step, and nothing has changed."""

    step: int


class Move(NamedTuple):
    """All go to the next generation, except workers that leave (they get this, too), were lost, or are not awaited."""

    without: tuple[int, ...]


class Finish(NamedTuple):
    """All living workers serve or leave."""


class Impatient(NamedTuple):
    """The sender, between two steps, no longer waits for workers within one."""


Message = StepReport | Stay | Move | Finish | Impatient
Letter = tuple[int, Message]  # the receiver and the message


class GenerationBarrier:
    """One worker's part of the protocol. Each event returns the messages to send."""

    def __init__(self, me: int, members: Iterable[int]) -> None:
        self._me = me
        self._members = frozenset(members)
        self.alive = set(self._members)  # as far as this worker knows
        self._stands: dict[int, str] = {}  # the known states of living workers
        self._unsure: set[int] = set()  # a connection with them has ended since their last report
        self._step = 0  # of this worker: how often it got Stay
        # Only the first leader of a generation sends Stay: after the loss of a worker, the generation cannot continue.
        self._led = 0  # how often this worker, as the leader, has sent Stay
        self._how = ""  # the state of this worker; "" within a step
        self.broken = False  # a worker is gone
        self._wanted = False  # a worker waits to join
        self.told = ""  # the decision for this worker and those it leads: STAY until its next report; others are final
        self.without: tuple[int, ...] = ()  # the workers that stay behind after MOVE

    @property
    def left_behind(self) -> set[int]:
        """The workers that moved on, if this worker leaves."""
        return self.alive - {self._me, *self.without} if self.told == MOVE and self.leaves else set()

    @property
    def leaves(self) -> bool:
        """Return True if shutdown() was called."""
        return self._how == LEAVING

    @property
    def leaving(self) -> list[int]:
        """The workers that have called shutdown(), as far as they are known here. Only the leader knows all."""
        return self._who(LEAVING)

    @property
    def leader(self) -> int:
        return min(self.alive)

    @property
    def missing(self) -> set[int]:
        """The workers within a step, as far as they are known here. Only the leader knows."""
        return self.alive - self._stands.keys() if self.leader == self._me else set()

    @property
    def waits(self) -> bool:
        """Return True if this worker is between two steps and has no decision yet."""
        return self._how == HERE and not self.told

    def stand(self, how: str) -> list[Letter]:
        """Set and report the state of this worker."""
        self._how = how
        if self.told == STAY:
            self.told = ""
        return self._say()

    def _say(self) -> list[Letter]:
        if not self._how or self.told in (MOVE, FINISH):
            return []
        if self.leader != self._me:
            return [(self.leader, self._standing())]
        self._stands[self._me] = self._how
        # A report may have been lost with a connection that ended. The leader's own report is the question: a follower
        # answers it with its own, unless it is within a step.
        asked = [(other, self._standing()) for other in sorted(self._unsure & self.missing)]
        return asked + self._conclude()

    def _standing(self) -> StepReport:
        return StepReport(self._how, self._step, self.broken)

    def receive(self, sender: int, message: Message) -> list[Letter]:
        if isinstance(message, StepReport):
            return self._on_standing(sender, message)
        if sender not in self.alive:
            return []
        if isinstance(message, Impatient):
            return self._move() if sender in self._who(HERE) and self.told not in (MOVE, FINISH) else []
        if self.told or not self._how:
            return []
        if isinstance(message, Stay):
            # A leader repeats a Stay that may be lost. The repetition must not end the wait before a later step.
            if message.step == self._step and self._how == HERE:
                self._stay()
        elif isinstance(message, Move):
            self.told, self.without = MOVE, message.without
            return self._tell(message) if self.leader == self._me else []  # it was removed by a worker that it leads
        elif self._how in (SERVING, LEAVING):
            self.told = FINISH
        return []

    def _on_standing(self, sender: int, message: StepReport) -> list[Letter]:
        if self.told == FINISH and message.how != HERE:
            return [(sender, Finish())]
        if self.told == MOVE or sender not in self.alive:
            return [(sender, Move(self.without))]
        if message.how == HERE and message.step < self._led:
            # The first answer was lost with its connection.
            return [(sender, Stay(message.step))]
        if sender == self.leader:
            return self._say()
        if self.told == FINISH or not message.how:
            return []
        # The sender may know earlier than this worker that this worker leads now.
        self._unsure.discard(sender)
        self._stands[sender] = message.how
        self.broken |= message.broken
        return self._conclude()

    def lost(self, other: int) -> list[Letter]:
        """Remove another worker that has died or left."""
        # A worker never removes itself, so there is always a leader.
        if other not in self.alive - {self._me}:
            return []
        led = self.leader
        self.alive.discard(other)
        self._stands.pop(other, None)
        self.broken = True
        if other == led:
            return self._say()
        return self._conclude()

    def remind(self, other: int) -> list[Letter]:
        """Resend what may have been lost with a connection that has ended."""
        self._unsure.add(other)  # also for the time when this worker leads
        if self.told == MOVE or other not in self.alive:
            return [(other, Move(self.without))]
        if self.leader == self._me:
            return [(other, self._standing())]
        return self._say() if other == self.leader and not self.told else []

    def want(self, wanted: bool) -> list[Letter]:
        """Record whether a worker waits to join."""
        self._wanted = wanted
        return self._conclude() if wanted else []

    def give_up(self) -> list[Letter]:
        """Stop waiting for workers within a step: the others move on without them."""
        if self.told or self._how != HERE:
            return []
        return self._move() if self.leader == self._me else [(self.leader, Impatient())]

    def move_alone(self) -> list[Letter]:
        """Stop waiting for the leader, too."""
        if not self.told:
            self.told = MOVE
        return []

    def _stay(self) -> None:
        self.told, self._how = STAY, ""
        self._step += 1

    def _conclude(self) -> list[Letter]:
        if self.leader != self._me or self.told in (MOVE, FINISH) or self.missing:
            return []
        here = self._who(HERE)
        leaving = self.leaving
        # Serving workers have no steps of their own, so no work is left.
        if leaving and not here:
            self.told = FINISH
            return [(other, Finish()) for other in sorted(self.alive - {self._me})]
        if self.broken or self._wanted or leaving:
            return self._move()
        if not here:
            return []
        step, self._led = self._led, self._led + 1
        for who in here:
            del self._stands[who]
        if self._me in here:
            self._stay()
        return [(other, Stay(step)) for other in here if other != self._me]

    def _who(self, how: str) -> list[int]:
        return sorted(who for who, where in self._stands.items() if where == how)

    def _move(self) -> list[Letter]:
        going = {*self._who(HERE), *self._who(SERVING)}
        self.told, self.without = MOVE, tuple(sorted(self._members - going))
        return self._tell(Move(self.without))

    def _tell(self, message: Move) -> list[Letter]:
        return [(other, message) for other in sorted(self._stands) if other != self._me]
