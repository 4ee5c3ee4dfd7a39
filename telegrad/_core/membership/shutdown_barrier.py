"""The shutdown barrier: a group may shut down when every worker wants to, and no call is in flight.

The living worker with the smallest id leads. It asks all workers in rounds. Each answers as soon as it is quiet, with
the number of calls it has begun so far. Two rounds with equal answers mean that nothing happened between them, so
nothing is in flight. Then the leader sends Leave, each worker confirms with Left, and the leader leaves last. If all
workers are quiet when they enter, and report that, this counts as the first of the two rounds.

    worker                      leader
      | -- Entered(begun) --------> |     (shutdown was called here)
      | <------------- Ask(round) - |     repeatedly, once all have entered
      | -- Quiet(round, begun) ---> |
      | <------------------ Leave - |     after two equal rounds
      | -- Left ------------------> |

A worker that dies is removed; if it led, the others send Entered to the next leader. Leave lists the removed workers.
A removed worker may be alive, since connections to it can fail for a while: its next message, or a new
connection, takes it back.

Only the leader knows which workers have entered. A worker that waits for long sends Who, and the leader answers
Missing. Who also asks for all that may have been lost with a connection: a leader asks its question again, any other
worker in shutdown answers Entered.
"""

from typing import NamedTuple


class Entered(NamedTuple):
    """The sender wants to shut down."""

    begun: int | None = None  # calls since its start, if it is quiet


class Ask(NamedTuple):
    """Answer with Quiet as soon as no call is in flight."""

    round: int


class Quiet(NamedTuple):
    """The sender has no call in flight and runs none; `begun` counts its calls since its start."""

    round: int
    begun: int


class Leave(NamedTuple):
    """Nothing is in flight anywhere."""

    without: tuple[int, ...] = ()  # the removed workers


class Left(NamedTuple):
    """The sender confirms Leave."""


class Who(NamedTuple):
    """The sender, which wants to shut down, asks which workers it waits for, and for lost messages."""


class Missing(NamedTuple):
    """The workers that have not entered; once all have, those that are not quiet yet. Only a leader knows them all."""

    ids: tuple[int, ...]
    busy: tuple[int, ...] = ()


Message = Entered | Ask | Quiet | Leave | Left | Who | Missing
Letter = tuple[int, Message]  # the receiver and the message

WAITING, LEAVING, DONE = "WAITING", "LEAVING", "DONE"


class ShutdownBarrier:
    """One worker's part of the barrier. Each event returns the messages to send."""

    def __init__(self, me: int, members: set[int]) -> None:
        self.state = WAITING
        self._me = me
        self._alive = set(members)
        self._entered: set[int] = set()
        self.inside = False  # this worker has called shutdown
        self._round = 0
        self._of_round: set[int] = set()  # the workers that it asks
        # Several leaders may ask at the same time: for a while, workers may disagree about which of them are alive.
        self._asked: dict[int, int] = {}  # rounds that wait for this worker to be quiet, by their leaders
        self._at_entry: dict[int, int] = {}  # calls begun by workers that were quiet when they entered
        self._answers: dict[int, int] = {}
        self._before: dict[int, int] | None = None  # the answers of the previous round
        self._left: set[int] = set()
        self.lost_ones: set[int] = set()  # the removed workers
        self._told = Missing(())  # the leader's last answer

    @property
    def leader(self) -> int:
        return min(self._alive)

    @property
    def missing(self) -> set[int]:
        """The workers known not to have called shutdown. The leader knows all, others only after `ask_who`."""
        if self.leader == self._me:
            return self._alive - self._entered
        return (self._alive & set(self._told.ids)) - self._entered

    @property
    def busy(self) -> set[int]:
        """The workers with calls in flight that all wait for, as far as they are known here."""
        if self.leader == self._me:
            return self._alive - self._answers.keys() if self._round and self.state == WAITING else set()
        return self._alive & set(self._told.busy)

    def ask_who(self) -> list[Letter]:
        """Ask the leader which workers it waits for. The leader asks those workers again."""
        if not self.inside or self.state == DONE:
            return []
        if self.leader != self._me:
            return [(self.leader, Who())]
        return [letter for other in sorted(self._alive - {self._me}) for letter in self._ask_again(other)]

    @property
    def asked(self) -> bool:
        """Return True if a leader waits for this worker to be quiet."""
        return bool(self._asked) and self.state == WAITING

    def enter(self, begun: int | None = None) -> list[Letter]:
        """Enter the barrier: this worker has called shutdown. `begun` as in Entered."""
        self.inside = True
        self._note_entry(self._me, begun)
        if self.leader != self._me:
            return [(self.leader, Entered(begun))]
        # The leader's message opens the connections whose end reports its death.
        return [(other, Entered()) for other in sorted(self._alive - {self._me})] + self._ask_all()

    def receive(self, sender: int, message: Message) -> list[Letter]:
        if self.state == DONE:
            return []
        if sender not in self._alive:
            # After the decision to leave, it is too late to take it back: then the message is ignored.
            letters = self.take_back(sender)
            return letters + self.receive(sender, message) if sender in self._alive else []
        if not isinstance(message, Missing):  # only a worker in shutdown sends the others
            self._entered.add(sender)
        if isinstance(message, Entered):
            self._note_entry(sender, message.begun)  # the sender may know before this worker that it leads now
            return self._ask_again(sender) if self.leader == self._me else []
        if isinstance(message, Ask):
            self._asked[sender] = message.round
            # `quiet` answers, once no call is in flight here. A leader that asks has found all workers inside, so none
            # is missing.
            self._told = self._told._replace(ids=())
            return []
        if isinstance(message, Quiet):
            return self._on_quiet(sender, message)
        if isinstance(message, Leave):
            self.state = DONE
            self.lost_ones |= set(message.without)
            return [(sender, Left())]
        if isinstance(message, Who):
            if self.leader != self._me:
                return [(sender, Entered() if self.inside else Missing((self._me,)))]
            told = Missing(tuple(sorted(self.missing)), tuple(sorted(self.busy)))
            return [(sender, told), *(self._ask_again(sender) if self.inside else [])]
        if isinstance(message, Missing):
            if sender == self.leader:
                self._told = message
            return []
        self._left.add(sender)
        self._check_left()
        return []

    def take_back(self, other: int) -> list[Letter]:
        """Wait again for a worker that was removed, but is alive."""
        if other not in self.lost_ones or self.state != WAITING:
            return []
        self._alive.add(other)
        self.lost_ones.discard(other)
        return self.remind(other)

    def quiet(self, begun: int) -> list[Letter]:
        """Report that this worker has no call in flight and runs none now."""
        if not self.asked:
            return []
        asked, self._asked = self._asked, {}
        mine = self._on_quiet(self._me, Quiet(asked.pop(self._me), begun)) if self._me in asked else []
        return [(leader, Quiet(number, begun)) for leader, number in asked.items()] + mine

    def lost(self, other: int, died: bool = True) -> list[Letter]:
        """Remove another worker that died or left early; without `died`, it left with the group, and Leave follows."""
        # A worker never removes itself, so there is always a leader.
        if other not in self._alive - {self._me} or self.state == DONE:
            return []
        led = other == self.leader
        self._alive.discard(other)
        if died and self.state == WAITING:
            self.lost_ones.add(other)
        self._told = Missing(())
        self._asked.pop(other, None)
        self._answers.pop(other, None)
        self._at_entry.clear()
        # Nothing is in flight any more. A worker that ends has left in order, even if its Left was lost.
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
        """Send a living worker again the messages that may be lost with a connection, which it may not have noticed.

        Ask for its part, too: its answer shows that it lives.
        """
        if not self.inside or self.state == DONE or other not in self._alive | self.lost_ones:
            return []
        if other not in self._alive:
            return [(other, Who())] if self.state == WAITING else []
        asked = self._ask_again(other) if self.leader == self._me else []
        return [(other, Entered()), *(asked or [(other, Who())])]

    def over(self) -> list[Letter]:
        """End the barrier: the group has ended with one of its workers."""
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
        self._of_round = set(self._alive)
        self._answers = {}
        self._asked[self._me] = self._round
        return [(other, Ask(self._round)) for other in sorted(self._alive - {self._me})]

    def _ask_again(self, other: int) -> list[Letter]:
        """Ask again for the other's entry, its answer in this round, or its end."""
        if self.state == LEAVING:
            return [] if other in self._left else [self._leave(other)]
        if other not in self._entered:
            return [(other, Who())]
        # A worker was removed or taken back since this round began. Only a round that asks all present workers can end
        # the barrier, so begin another one.
        if self._of_round != self._alive:
            return self._ask_all()
        return [] if other in self._answers else [(other, Ask(self._round))]

    def _leave(self, other: int) -> Letter:
        return other, Leave(tuple(sorted(self.lost_ones)))

    def _on_quiet(self, sender: int, message: Quiet) -> list[Letter]:
        # A late answer to an earlier round says nothing about the time since the present one began.
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
