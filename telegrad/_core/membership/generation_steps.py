"""Does a generation go on, or end? Decided where all its workers stand between two of their steps.

One living worker leads (the one with the smallest rank). All tell it where they stand:

    HERE      between two steps: rendezvous_again() was called
    SERVING   at no step of its own: serve() was called
    LEAVING   at its end: shutdown() was called

Who has told nothing is within a step, and waited for. Once nobody is, the leader tells those who wait:

    worker                      leader
      | -- Standing(how, step) -> |
      | <----------- Stay(step) - |     nothing has changed: on with the next step
      | <----------------- Move - |     to the next generation: somebody has died, leaves, or wants to come in
      | <--------------- Finish - |     to all: the others leave, and those who serve have nothing left to do

Those who serve wait without a word for as long as nothing changes. A worker that dies is taken out; if it led, the
others tell the next leader where they stand. A generation that has lost somebody never stays as it is.

A worker that was taken out may live: it was stopped, or out of reach. The others do not wait for it, in the directory
neither, and answer its Standing with Move: it comes to the next generation by itself. After the end of a connection a
follower says again where it stands, and the leader says where it stands itself: a follower answers that with its own
Standing, and a worker that has taken the leader out with Move.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

HERE, SERVING, LEAVING = "HERE", "SERVING", "LEAVING"
STAY, MOVE, FINISH = "STAY", "MOVE", "FINISH"


class Standing(NamedTuple):
    """Where the sender stands; `step` counts the ones that it has made in this generation."""

    how: str  # "" within a step, where the leader asks
    step: int
    broken: bool  # it knows of one who has gone


class Stay(NamedTuple):
    """All stood before that step, and nothing has changed."""

    step: int


class Move(NamedTuple):
    """All go to the next generation, but for workers that leave (they are told, too), were lost, or not waited for."""

    without: tuple[int, ...]


class Finish(NamedTuple):
    """All who live serve or leave."""


class Impatient(NamedTuple):
    """The sender, who stands between two steps, waits no longer for those who are within one."""


Message = Standing | Stay | Move | Finish | Impatient
Letter = tuple[int, Message]  # to whom, what


class Steps:
    """One worker's part. Feed it what happens; it returns the letters to be sent."""

    def __init__(self, me: int, members: Iterable[int]) -> None:
        self._me = me
        self._members = frozenset(members)
        self.alive = set(self._members)  # as far as this worker knows
        self._stands: dict[int, str] = {}  # of those who live: where, as far as this worker was told
        self._unsure: set[int] = set()  # a connection with them has ended since they told where they stand
        self._step = 0  # of this worker: how often it was told to stay
        self._led = 0  # how often this worker, as the leader, has told the others to stay
        self._how = ""  # where this worker stands; "" within a step
        self.broken = False  # somebody has gone
        self._wanted = False  # somebody waits to come in
        self.told = ""  # what this worker, or whom it leads, is to do: STAY until it stands again, else for good
        self.without: tuple[int, ...] = ()  # who will not come along, once it is MOVE

    @property
    def left_behind(self) -> set[int]:
        """Where this worker leaves: those who have gone on without it."""
        return self.alive - set(self.without) if self.told == MOVE and self._how == LEAVING else set()

    @property
    def leader(self) -> int:
        return min(self.alive)

    @property
    def missing(self) -> set[int]:
        """Who is within a step, as far as this worker knows: the leader does."""
        return self.alive - self._stands.keys() if self.leader == self._me else set()

    @property
    def waits(self) -> bool:
        """Whether this worker is between two steps, and was told nothing yet."""
        return self._how == HERE and not self.told

    def stand(self, how: str) -> list[Letter]:
        """This worker stands there now."""
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
        asked = [(other, self._standing()) for other in sorted(self._unsure & self.missing)]
        return asked + self._conclude()

    def _standing(self) -> Standing:
        return Standing(self._how, self._step, self.broken)

    def receive(self, sender: int, message: Message) -> list[Letter]:
        """A letter has come."""
        if isinstance(message, Standing):
            return self._on_standing(sender, message)
        if sender not in self.alive:
            return []
        if isinstance(message, Impatient):
            return self._move() if sender in self._who(HERE) and self.told not in (MOVE, FINISH) else []
        if self.told or not self._how:
            return []
        if isinstance(message, Stay):
            if message.step == self._step and self._how == HERE:
                self._stay()
        elif isinstance(message, Move):
            self.told, self.without = MOVE, message.without
            return self._tell(message) if self.leader == self._me else []  # it was taken out by a worker that it leads
        elif self._how in (SERVING, LEAVING):
            self.told = FINISH
        return []

    def _on_standing(self, sender: int, message: Standing) -> list[Letter]:
        if self.told == FINISH and message.how != HERE:
            return [(sender, Finish())]
        if self.told == MOVE or sender not in self.alive:
            return [(sender, Move(self.without))]
        if message.how == HERE and message.step < self._led:
            return [(sender, Stay(message.step))]  # the word was lost with its connection
        if sender == self.leader:
            return self._say()
        if self.told == FINISH or not message.how:
            return []
        # It may have heard sooner than this worker that this one leads now.
        self._unsure.discard(sender)
        self._stands[sender] = message.how
        self.broken |= message.broken
        return self._conclude()

    def lost(self, other: int) -> list[Letter]:
        """A worker has died or left."""
        if other not in self.alive:
            return []
        led = self.leader
        self.alive.discard(other)
        self._stands.pop(other, None)
        self.broken = True
        if other == led:
            return self._say()
        return self._conclude()

    def remind(self, other: int) -> list[Letter]:
        """A connection with that worker has ended, and with it perhaps what was said."""
        self._unsure.add(other)  # also for when this worker leads
        if self.told == MOVE or other not in self.alive:
            return [(other, Move(self.without))]
        if self.leader == self._me:
            return [(other, self._standing())]
        return self._say() if other == self.leader and not self.told else []

    def want(self, wanted: bool) -> list[Letter]:
        """Whether somebody waits to come in."""
        self._wanted = wanted
        return self._conclude() if wanted else []

    def give_up(self) -> list[Letter]:
        """This worker waits no longer for those who are within a step: the others go on without them."""
        if self.told or self._how != HERE:
            return []
        return self._move() if self.leader == self._me else [(self.leader, Impatient())]

    def move_alone(self) -> list[Letter]:
        """Nor for the leader."""
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
        leaving = self._who(LEAVING)
        if leaving and not here:
            return self._finish()
        if self.broken or self._wanted or (leaving and here):
            return self._move()
        return self._let_stay(here) if here else []

    def _who(self, how: str) -> list[int]:
        return sorted(who for who, where in self._stands.items() if where == how)

    def _finish(self) -> list[Letter]:
        self.told = FINISH
        return [(other, Finish()) for other in sorted(self.alive - {self._me})]

    def _move(self) -> list[Letter]:
        going = {*self._who(HERE), *self._who(SERVING)}
        self.told, self.without = MOVE, tuple(sorted(self._members - going))
        return self._tell(Move(self.without))

    def _tell(self, message: Move) -> list[Letter]:
        return [(other, message) for other in sorted(self._stands) if other != self._me]

    def _let_stay(self, here: list[int]) -> list[Letter]:
        step, self._led = self._led, self._led + 1
        for who in here:
            del self._stands[who]
        if self._me in here:
            self._stay()
        return [(other, Stay(step)) for other in here if other != self._me]

    def __repr__(self) -> str:
        where = self._how or "within a step"
        stands = f"{sorted(self._stands)} of {sorted(self.alive)} stand"
        return f"<Steps of {self._me}: {where}, {self.told or 'not told'}; {stands}>"
