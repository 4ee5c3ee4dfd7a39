"""The rim of a feed's machines: what parties of this worker say leaves as notices, and what comes is given to them.

A party is a machine with the memory of its versions. Each has a lock of its own; what the machine wants said is said
once that was given back, so that a word may overtake another: which all machines bear.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from telegrad import forks
from telegrad.agent.agent import Agent
from telegrad.errors import PeerError, TelegradError, UsageError
from telegrad.group.members import Identity
from telegrad.weights.deltas import DeltaCache
from telegrad.weights.versions import Shelf
from telegrad.weights.words import Forgot, Leave, Lent, Out, Party, Piece

LOOK = 1.0  # seconds between looks at whether anything comes


class Mail(NamedTuple):
    """A word of one party to another."""

    to: int
    sender: int
    word: Any
    tensors: Sequence[Tensor] = ()


class Machine(Protocol):
    shelf: Shelf

    def receive(self, sender: Party, word: Any) -> Out: ...

    def lost(self, incarnation: str) -> Out: ...


class Box:
    """One party of this worker."""

    def __init__(self, desk: Desk, me: Party, machine: Machine) -> None:
        self.me = me
        self.changed = threading.Condition()  # guards the machine, and all below
        self.stock: dict[int, Tensor] = {}  # the memory of the versions that are here
        self.deltas = DeltaCache()  # between versions
        self.heard = 0  # how often something has changed for who waits
        self.has_left = False  # its memory was dropped: what was about to be handled no longer is
        self._desk = desk
        self._machine = machine

    def step(self, act: Callable[[], Out]) -> None:
        """Have the machine do something, and say what it wants said."""
        with self.changed:
            if self.has_left:
                return
            out = act()
            parcels = [(to, *self._with_bytes(word)) for to, word in out]
            shelf = self._machine.shelf
            for number in [number for number in self.stock if number not in shelf.about]:
                del self.stock[number]
        for to, word, tensors in parcels:
            self._desk.send(self, to, word, tensors)

    def take(self, sender: Party, word: Any, tensors: Sequence[Tensor]) -> None:
        """Somebody says something."""
        self.step(lambda: self._machine.receive(sender, word))
        self.tell()

    def tell(self) -> None:
        """Wake who waits."""
        with self.changed:
            self.heard += 1
            self.changed.notify_all()

    def lost(self, incarnation: str) -> None:
        """A connection with that worker has ended."""
        self.step(lambda: self._machine.lost(incarnation))
        self.tell()

    def look(self) -> None:
        """Do again what may have been lost; called each second."""

    def close(self) -> None:
        """Take part no more."""

    def _with_bytes(self, word: Any) -> tuple[Any, Sequence[Tensor]]:
        if isinstance(word, Lent):
            return word, (self.stock[word.number],)
        if isinstance(word, Piece):
            whole = self.piece(word)
            deltas = self.deltas.between(word.base, word.number, word.piece, len(whole))
            if not deltas:
                return word._replace(base=0), (whole,)
            heads = tuple(delta.heads for delta in deltas)

            return word._replace(heads=heads), [tensor for delta in deltas for tensor in delta.tensors]
        return word, ()

    def piece(self, word: Piece) -> Tensor:
        """Where its bytes are, or shall be."""
        length = self._machine.shelf.about[word.number].piece
        return self.stock[word.number][word.piece * length : (word.piece + 1) * length]


class Desk:
    """The parties of one worker."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.changed = threading.Condition()  # guards what follows; `_boxes` is also looked at without
        self._boxes: dict[int, Box] = {}  # by the number of the party
        self.published: dict[str, Box] = {}  # by names
        self._subscribers = itertools.count(1)
        self._publishers = itertools.count(-1, -1)
        self._due = 0.0  # when to look next; the clock's
        agent.on(Mail, self._take)
        agent.lost.append(self._lost)
        agent.ticking.append(self._tick)

    def __repr__(self) -> str:
        return f"<Desk: {len(self._boxes)} parties of feeds>"

    def party(self, publishes: bool) -> Party:
        """Return a new party of this worker."""
        number = next(self._publishers if publishes else self._subscribers)
        return Party(self.agent.name, self.agent.incarnation, number)

    def add(self, box: Box, name: str = "") -> None:
        """Deliver messages to a party from now on; a publisher is found by its name.

        Raises:
            UsageError: there is a publisher of that name already.
        """
        with self.changed:
            if name in self.published:
                raise UsageError(
                    f"worker {self.agent.name!r} has a publisher {name!r} already: close that one first, or take "
                    "another name"
                )
            if name:
                self.published[name] = box
            self._boxes[box.me.number] = box
            self.changed.notify_all()

    def remove(self, box: Box, name: str = "") -> None:
        with self.changed:
            self.published.pop(name, None)
            self._boxes.pop(box.me.number, None)

    def close_later(self, box: Box) -> None:
        """Close a party whose user has dropped it: on another thread, since this one may hold any lock."""
        if not forks.is_inherited(self):
            self.agent.later(lambda _: box.close(), None)

    def send(self, box: Box, to: Party, word: Any, tensors: Sequence[Tensor] = ()) -> None:
        self._send(to, Mail(to.number, box.me.number, word, tensors))

    def _send(self, to: Party, mail: Mail) -> None:
        agent = self.agent
        if to.incarnation == agent.incarnation:
            agent.later(lambda mail: self._deliver(agent.name, agent.incarnation, mail), mail)
            return
        with suppress(TelegradError):  # who cannot be reached any more; whoever should know is told, too
            agent.notify(to.worker, mail._replace(tensors=()), to.incarnation, mail.tensors, as_arguments=True)

    def _take(self, sender: Identity, mail: Mail) -> None:
        self._deliver(sender.name, sender.incarnation, mail)

    def _deliver(self, worker: str, incarnation: str, mail: Mail) -> None:
        sender = Party(worker, incarnation, mail.sender)
        box = self._boxes.get(mail.to)
        if box is not None:
            box.take(sender, mail.word, mail.tensors)
        elif not isinstance(mail.word, Leave | Forgot):
            self._send(sender, Mail(sender.number, mail.to, Leave()))

    def _lost(self, who: Identity, _: PeerError) -> None:
        for box in list(self._boxes.values()):
            box.lost(who.incarnation)

    def _tick(self, now: float) -> float:
        if now >= self._due:
            self._due = now + LOOK
            for box in list(self._boxes.values()):
                box.look()
        return self._due if self._boxes else float("inf")
