"""When may a group shut down? When every worker wants to, and no call is left anywhere.

One living worker leads (the one with the smallest id). It asks all in rounds; each answers as soon as it is quiet,
with the number of calls it has begun so far. Two rounds with equal answers mean that nothing happened between them,
so nothing is in flight: the leader says Leave, each confirms with Left, and the leader leaves last. Where all are
quiet as they enter, and say so, that is the first of the two rounds.

    worker                      leader
      | -- Entered(begun) --------> |     (shutdown was called here)
      | <------------- Ask(round) - |     once all have entered, again and again
      | -- Quiet(round, begun) ---> |
      | <------------------ Leave - |     after two equal rounds
      | -- Left ------------------> |

A worker that dies is taken out; if it led, the others enter anew with the next leader. Leave tells all who was.

Only the leader knows who has entered. Who waits for long may ask it: Who, and the answer is Missing.
"""

from __future__ import annotations

from typing import NamedTuple


class Entered(NamedTuple):
    """The sender wants to shut down; from a leader: it is the one to tell."""

    begun: int | None = None  # calls since its start, where it is quiet


class Ask(NamedTuple):
    """Say when you are quiet."""

    round: int


class Quiet(NamedTuple):
    """The sender has no call in flight and runs none; it has begun so many since its start."""

    round: int
    begun: int


class Leave(NamedTuple):
    """Nothing is in flight anywhere."""

    without: tuple[int, ...] = ()  # those that were taken out


class Left(NamedTuple):
    """The sender has taken note of Leave."""


class Who(NamedTuple):
    """Whom does the sender wait for?"""


class Missing(NamedTuple):
    """Those who have not entered; once all have, those who are not quiet yet."""

    ids: tuple[int, ...]
    busy: tuple[int, ...] = ()


Message = Entered | Ask | Quiet | Leave | Left | Who | Missing
Letter = tuple[int, Message]  # to whom, what

WAITING, LEAVING, DONE = "WAITING", "LEAVING", "DONE"


class Farewell:
    """One worker's part. Feed it what happens; it returns the letters to be sent."""

    def __init__(self, me: int, members: set[int]) -> None:
        self.state = WAITING
        self._me = me
        self._alive = set(members)
        self._entered: set[int] = set()
        self.inside = False  # this worker has called shutdown
        self._round = 0
        self._asked: int | None = None  # the leader's round that waits for this worker's quiet
        self._at_entry: dict[int, int] = {}  # calls begun by those that were quiet as they entered
        self._answers: dict[int, int] = {}
        self._before: dict[int, int] | None = None  # the answers of the round before
        self._left: set[int] = set()
        self.lost_ones: set[int] = set()  # who was taken out
        self._told = Missing(())  # what the leader answered last

    def __repr__(self) -> str:
        who = f"{len(self._entered)} of {len(self._alive)} are known to have entered"
        return f"<Farewell of {self._me}: {self.state}, led by {self.leader}, {who}, {len(self.lost_ones)} lost>"

    @property
    def leader(self) -> int:
        return min(self._alive)

    @property
    def missing(self) -> set[int]:
        """Who has not called shutdown yet, as far as this worker knows: the leader does, others can ask it."""
        if self.leader == self._me:
            return self._alive - self._entered
        return self._alive & set(self._told.ids)

    @property
    def busy(self) -> set[int]:
        """Who has calls under way that all wait for, as far as this worker knows."""
        if self.leader == self._me:
            return self._alive - self._answers.keys() if self._round and self.state == WAITING else set()
        return self._alive & set(self._told.busy)

    def ask_who(self) -> list[Letter]:
        """This worker wants to know who is missing."""
        return [] if self.leader == self._me or self.state == DONE else [(self.leader, Who())]

    @property
    def asked(self) -> bool:
        """Whether the leader waits for this worker to be quiet."""
        return self._asked is not None and self.state == WAITING

    def enter(self, begun: int | None = None) -> list[Letter]:
        """This worker has called shutdown; `begun` as in Entered."""
        self.inside = True
        self._note_entry(self._me, begun)
        if self.leader != self._me:
            return [(self.leader, Entered(begun))]
        # Its greeting opens the connections by whose end it learns of a death.
        return [(other, Entered()) for other in sorted(self._alive - {self._me})] + self._ask_all()

    def receive(self, sender: int, message: Message) -> list[Letter]:
        """A letter has come."""
        if sender not in self._alive or self.state == DONE:
            return []
        if isinstance(message, Entered):
            self._note_entry(sender, message.begun)  # it may have heard sooner than this worker that this one leads now
            return self._ask_again(sender) if self.leader == self._me else []
        if isinstance(message, Ask):
            self._asked = message.round
            return []
        if isinstance(message, Quiet):
            return self._on_quiet(sender, message)
        if isinstance(message, Leave):
            self.state = DONE
            self.lost_ones |= set(message.without)
            return [(sender, Left())]
        if isinstance(message, Who):
            told = Missing(tuple(sorted(self.missing)), tuple(sorted(self.busy)))
            return [(sender, told)] if self.leader == self._me else []
        if isinstance(message, Missing):
            self._told = message
            return []
        self._left.add(sender)
        self._check_left()
        return []

    def quiet(self, begun: int) -> list[Letter]:
        """This worker has no call in flight and runs none, just now."""
        if not self.asked:
            return []
        assert self._asked is not None
        number, self._asked = self._asked, None
        if self.leader == self._me:
            return self._on_quiet(self._me, Quiet(number, begun))
        return [(self.leader, Quiet(number, begun))]

    def lost(self, other: int, died: bool = True) -> list[Letter]:
        """A worker has died, or has left: with the group, whose Leave is on its way, or, as if it had died, early."""
        if other not in self._alive or self.state == DONE:
            return []
        led = other == self.leader
        self._alive.discard(other)
        if died and self.state == WAITING:
            self.lost_ones.add(other)
        self._told = Missing(())
        self._answers.pop(other, None)
        self._at_entry.clear()
        if self.state == LEAVING:
            self._check_left()
            return []
        if not self.inside:
            return []
        if led:
            return self.enter()
        if self.leader != self._me:
            return []
        self._before = None
        return self._conclude() if self._round else self._ask_all()

    def remind(self, other: int) -> list[Letter]:
        """A letter to a worker that lives may have been lost, which that worker need not have noticed."""
        if not self.inside or other not in self._alive or self.state == DONE:
            return []
        return [(other, Entered()), *(self._ask_again(other) if self.leader == self._me else [])]

    def over(self) -> list[Letter]:
        """The group has ended with one of its workers, for whom this one waits no more, nor for any other."""
        self.state = DONE
        return []

    def _note_entry(self, who: int, begun: int | None) -> None:
        self._entered.add(who)
        if begun is not None:
            self._at_entry[who] = begun

    def _ask_all(self) -> list[Letter]:
        if not self._alive <= self._entered:
            return []
        if self._round == 0 and self._at_entry.keys() == self._alive:
            self._before = dict(self._at_entry)
        self._round += 1
        self._answers = {}
        self._asked = self._round
        return [(other, Ask(self._round)) for other in sorted(self._alive - {self._me})]

    def _ask_again(self, other: int) -> list[Letter]:
        return [self._leave(other)] if self.state == LEAVING else self._ask_all()

    def _leave(self, other: int) -> Letter:
        return other, Leave(tuple(sorted(self.lost_ones)))

    def _on_quiet(self, sender: int, message: Quiet) -> list[Letter]:
        if message.round != self._round or self.leader != self._me:
            return []
        self._answers[sender] = message.begun
        return self._conclude()

    def _conclude(self) -> list[Letter]:
        if self._answers.keys() != self._alive:
            return []
        if self._answers != self._before:
            self._before = self._answers
            return self._ask_all()
        self.state = LEAVING
        self._check_left()
        return [self._leave(other) for other in sorted(self._alive - {self._me})]

    def _check_left(self) -> None:
        if self.state == LEAVING and self._alive - {self._me} <= self._left:
            self.state = DONE
