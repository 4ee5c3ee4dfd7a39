"""The generations of an elastic group: which workers form the next one, and when the present one ends.

A generation is a group of fixed size. The next one has its survivors, in the order of their ranks, and then new
workers, as long as there is room. So the worker of rank 0 was in the previous generation, unless no worker was.

It is complete once all living workers of the last one have come, and they are enough. A generation without survivors is
complete once it is full, or no worker has come for some time.

The keys in the directory are:

    elastic/generation  the last generation that has formed (`Formed`); whether the group has ended with it
    elastic/come/LIFE   a worker that wants to join the next one (`Arrival`); has the lease of its process

A generation forms by one compare-and-set of `elastic/generation`, with the previous number plus one. Therefore each
number has one generation, whichever worker decides, even if several do.

Between two steps, the workers of a generation decide if it continues. The living worker with the smallest rank leads.
All workers report their state to it:

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

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from telegrad._core.membership.members import Member, listed, named
from telegrad._core.stores.directory import ABSENT, Directory
from telegrad._core.texts import plural

PREFIX = "elastic/"
GENERATION, COME = PREFIX + "generation", PREFIX + "come/"
HERE, SERVING, LEAVING = "HERE", "SERVING", "LEAVING"
STAY, MOVE, FINISH = "STAY", "MOVE", "FINISH"

IsAlive = Callable[[Member], bool]


class Before(NamedTuple):
    """The generation from which a worker comes."""

    number: int = 0  # 0: it was in none
    group: str = ""  # the identity of the group
    without: tuple[str, ...] = ()  # the incarnations of its members that will not come, though they may be alive
    me: str = ""  # the incarnation that the worker had in it

    @classmethod
    def of(cls, told: list[Any]) -> Before:
        number, group, without, me, *_ = told
        return cls(number, group, tuple(without), me)


class Arrival(NamedTuple):
    """A worker that wants to join the next generation."""

    member: Member  # its rank is the wanted one, or -1
    before: Before = Before()
    limits: str = ""  # the configured limits of the group

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Arrival:
        member, before, limits, *_ = json.loads(text)
        return cls(Member.of(member), Before.of(before), limits)


class Formed(NamedTuple):
    """A generation, as the directory and its members know it."""

    number: int = 0  # 0: none has formed yet
    members: tuple[Member, ...] = ()  # by rank
    survivors: int = 0  # how many of these, by rank, were in the previous one
    limits: str = ""  # of the group
    has_ended: bool = False  # the group has ended normally with this generation
    group: str = ""  # the identity of the group; not part of the JSON

    def to_json(self) -> str:
        return json.dumps(self[:-1])

    @classmethod
    def from_json(cls, text: str | bytes) -> Formed:
        number, members, survivors, limits, has_ended, *_ = json.loads(text)
        return cls(number, tuple(map(Member.of, members)), survivors, limits, has_ended)

    @property
    def lives(self) -> set[str]:
        return {member.incarnation for member in self.members}


NONE = Formed()


class GroupSize(NamedTuple):
    """The limits of the number of workers of a generation."""

    least: int
    most: int = 0  # 0: any number

    def __str__(self) -> str:
        if self.least == self.most:
            return str(self.least)
        return f"{self.least} to {self.most}" if self.most else f"{self.least} or more"

    @property
    def workers(self) -> str:
        return f"{self} {'worker' if self == (1, 1) else 'workers'}"


class Quorum:
    """The workers that have come, as one of them sees it."""

    def __init__(
        self, limits: GroupSize, running: Formed = NONE, arrivals: Sequence[Arrival] = (), dead: Collection[str] = ()
    ) -> None:
        """`running` is the last generation that has formed; `arrivals` are in the order in which the workers came.

        `dead`: the incarnations of workers that were found dead.
        """
        self._limits = limits
        self._running = running
        self._dead = dead
        self._come = [each for each in arrivals if each.limits == str(limits)]  # the others raise
        self._ranks = {} if running.has_ended else {each.incarnation: each.id for each in running.members}

    def awaited(self) -> list[Member]:
        """Return the members of the last generation that have not come, and may be alive."""
        here = self._here()
        # A process has another incarnation in each generation: a survivor comes with its new one, and `before.me` is
        # the one that it has in this generation.
        gone = {*self._dead, *(each.before.me for each in here)}
        for each in here:
            if self._rank(each) >= 0:
                # Only a member of this generation can say which of its members stay behind. The report of a worker from
                # an older generation is about that one.
                gone.update(each.before.without)
        return [each for each in self._running.members if each.incarnation in self._ranks.keys() - gone]

    def chosen(self) -> tuple[list[Member], int]:
        """Return the workers that could be in the next generation, by rank, and how many of them are survivors."""
        here = self._here()
        survivors = sorted((each for each in here if self._rank(each) >= 0), key=self._rank)
        # New workers with a wanted rank come first. The sort is stable, so the others stay in the order in which they
        # came.
        others = sorted(
            (each for each in here if self._rank(each) < 0), key=lambda each: (each.member.id < 0, each.member.id)
        )
        names: set[str] = set()
        members = []
        for member, *_ in (*survivors, *others):
            if member.name not in names:  # else the worker is refused when it finds its name among the members
                members.append(member)
            names |= {member.name} - {""}
        return members[: self._limits.most or None], len(survivors)

    def decide(self, quiet: bool, late: bool) -> Formed | None:
        """Return the next generation, if it is complete.

        `quiet`: no worker has come for some time. `late`: members of the last one are no longer awaited.
        """
        if self.awaited() and not late:
            return None
        members, survivors = self.chosen()
        if len(members) < self._limits.least:
            return None
        if not (survivors or quiet or late or len(members) == self._limits.most):
            return None
        ranked = named(member._replace(id=rank) for rank, member in enumerate(members))
        return Formed(self._running.number + 1, tuple(ranked), survivors, str(self._limits))

    def lacks(self) -> str:
        """Return what the generation waits for, as text."""
        awaited = self.awaited()
        if awaited:
            names = listed([repr(member.name) for member in awaited])
            what = "calls rendezvous_again(), or" if len(awaited) == 1 else "call rendezvous_again(), or one of them"
            return f"generation {self._running.number} is running until {names} {what} is lost"
        names = listed([repr(each.member.name or each.member.role) for each in self._here()])
        count = len(self.chosen()[0])
        more = "" if count < self._limits.least else "; more may join"
        return f"{plural(count, 'worker')} of {self._limits} joined: {names}{more}"

    def missing(self) -> list[str]:
        return [member.name for member in self.awaited()]

    def _here(self) -> list[Arrival]:
        """Return the living workers that have come, except those that do not know yet that they are members."""
        gone = {*self._dead, *self._ranks}
        return [each for each in self._come if each.member.incarnation not in gone]

    def _rank(self, arrival: Arrival) -> int:
        """Return the rank of a worker in the last generation, or -1 if it was not in that."""
        return self._ranks.get(arrival.before.me, -1)


class ElasticState(NamedTuple):
    """The content of the directory at one revision."""

    revision: int = 0
    running: Formed = NONE
    since: int = ABSENT  # the revision of `running`
    arrivals: tuple[Arrival, ...] = ()  # in order of arrival
    came: Mapping[str, int] = {}  # the revisions of the arrivals, by incarnation


def look(directory: Directory) -> ElasticState:
    revision, entries = directory.list(PREFIX)
    running = [(Formed.from_json(each.value), each.revision) for each in entries if each.key == GENERATION]
    come = sorted((each for each in entries if each.key.startswith(COME)), key=lambda each: each.created)
    arrivals = tuple(Arrival.from_json(each.value) for each in come)
    came = {each.key.removeprefix(COME): each.created for each in come}
    return ElasticState(revision, *(running or [(NONE, ABSENT)])[0], arrivals, came)


def lives_in(directory: Directory, is_alive: IsAlive) -> bool:
    """Return True if an elastic group runs, or forms, in this directory."""
    state = look(directory)
    running = () if state.running.has_ended else state.running.members
    return any(map(is_alive, (*running, *(each.member for each in state.arrivals))))


def end(directory: Directory, mine: Formed) -> bool:
    """Write that the group has ended normally with this generation; return False if another one has formed since."""
    state = look(directory)
    if state.running.number != mine.number:
        return False
    return directory.swap(GENERATION, mine._replace(has_ended=True).to_json().encode(), state.since).done


# The end of a generation


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
        """Set and report the state of this worker; it stays at LEAVING."""
        self._how = LEAVING if self.leaves else how
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
