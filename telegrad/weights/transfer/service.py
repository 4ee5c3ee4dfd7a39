"""The publishers and subscribers of one worker: their messages leave as notices, and messages that come are delivered.

Each endpoint has a machine, the memory of its versions, and a lock. The machine's messages are sent after the lock was
released, so that a message may overtake another, which all machines bear.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from telegrad.errors import PeerError, TelegradError, UsageError
from telegrad.ext.calls import Agent
from telegrad.ext.processes import forks
from telegrad.ext.workers import Identity
from telegrad.weights.transfer.deltas import DeltaCache
from telegrad.weights.transfer.messages import JoinAgain, Leave, Outgoing, Party, Piece, WholeVersion
from telegrad.weights.transfer.version_store import VersionStore

TICK = 1.0  # seconds after which requests that are not answered are sent again


class Envelope(NamedTuple):
    """A message of one party to another."""

    to: int
    sender: int
    message: Any
    tensors: Sequence[Tensor] = ()


class Machine(Protocol):
    store: VersionStore

    def receive(self, sender: Party, message: Any) -> Outgoing: ...

    def lost(self, incarnation: str) -> Outgoing: ...


class Endpoint:
    """One party of this worker."""

    def __init__(self, service: WeightsService, me: Party, machine: Machine) -> None:
        self.me = me
        self.changed = threading.Condition()  # guards the machine, and all below
        self.memory: dict[int, Tensor] = {}  # the memory of the versions that are here
        self.deltas = DeltaCache()  # between versions
        self.changes = 0  # how often waiting threads were woken
        self.has_left = False  # its memory was dropped, and messages are handled no more
        self._service = service
        self._machine = machine

    def update(self, act: Callable[[], Outgoing]) -> None:
        """Have the machine do something, and send its messages."""
        with self.changed:
            if self.has_left:
                return
            out = act()
            parcels = [(to, *self._with_bytes(message)) for to, message in out]
            store = self._machine.store
            for number in [number for number in self.memory if number not in store.info]:
                del self.memory[number]
        for to, message, tensors in parcels:
            self._service.send(self, to, message, tensors)

    def take(self, sender: Party, message: Any, tensors: Sequence[Tensor]) -> None:
        """Handle a message."""
        self.update(lambda: self._machine.receive(sender, message))
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Wake the threads that wait for a version, or for readers."""
        with self.changed:
            self.changes += 1
            self.changed.notify_all()

    def lost(self, incarnation: str) -> None:
        """Tell the machine that a connection with that worker has ended."""
        self.update(lambda: self._machine.lost(incarnation))
        self.wake_waiters()

    def on_tick(self) -> None:
        """Do again what may have been lost; called each second."""

    def close(self) -> None:
        """Take part no more."""

    def _with_bytes(self, message: Any) -> tuple[Any, Sequence[Tensor]]:
        if isinstance(message, WholeVersion):
            return message, (self.memory[message.number],)
        if isinstance(message, Piece):
            whole = self.piece(message)
            deltas = self.deltas.between(message.base, message.number, message.piece, len(whole))
            if not deltas:
                return message._replace(base=0), (whole,)
            heads = tuple(delta.heads for delta in deltas)
            return message._replace(heads=heads), [tensor for delta in deltas for tensor in delta.tensors]
        return message, ()

    def piece(self, message: Piece) -> Tensor:
        """Return the memory of a piece."""
        length = self._machine.store.info[message.number].piece
        return self.memory[message.number][message.piece * length : (message.piece + 1) * length]


class WeightsService:
    """The endpoints of one worker."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.changed = threading.Condition()  # guards what follows; `_endpoints` is also looked at without
        self._endpoints: dict[int, Endpoint] = {}  # by the number of the party
        self.published: dict[str, Endpoint] = {}  # by names
        self._subscribers = itertools.count(1)
        self._publishers = itertools.count(-1, -1)
        self._due = 0.0  # when to look next; the clock's
        agent.on(Envelope, self._take)
        agent.lost.append(self._lost)
        agent.ticking.append(self._tick)

    def __repr__(self) -> str:
        return f"<WeightsService: {len(self._endpoints)} endpoints>"

    def party(self, publishes: bool) -> Party:
        """Return a new party of this worker."""
        number = next(self._publishers if publishes else self._subscribers)
        return Party(self.agent.name, self.agent.incarnation, number)

    def add(self, endpoint: Endpoint, name: str = "") -> None:
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
                self.published[name] = endpoint
            self._endpoints[endpoint.me.number] = endpoint
            self.changed.notify_all()

    def remove(self, endpoint: Endpoint, name: str = "") -> None:
        with self.changed:
            self.published.pop(name, None)
            self._endpoints.pop(endpoint.me.number, None)

    def close_later(self, endpoint: Endpoint) -> None:
        """Close a party whose user has dropped it: on another thread, since this one may hold any lock."""
        if not forks.is_inherited(self):
            self.agent.later(lambda _: endpoint.close(), None)

    def send(self, endpoint: Endpoint, to: Party, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        self._send(to, Envelope(to.number, endpoint.me.number, message, tensors))

    def _send(self, to: Party, envelope: Envelope) -> None:
        agent = self.agent
        if to.incarnation == agent.incarnation:
            agent.later(lambda envelope: self._deliver(agent.name, agent.incarnation, envelope), envelope)
            return
        with suppress(TelegradError):  # a lost worker: its endpoints join again, or time out
            agent.notify(to.worker, envelope._replace(tensors=()), to.incarnation, envelope.tensors, as_arguments=True)

    def _take(self, sender: Identity, envelope: Envelope) -> None:
        self._deliver(sender.name, sender.incarnation, envelope)

    def _deliver(self, worker: str, incarnation: str, envelope: Envelope) -> None:
        sender = Party(worker, incarnation, envelope.sender)
        endpoint = self._endpoints.get(envelope.to)
        if endpoint is not None:
            endpoint.take(sender, envelope.message, envelope.tensors)
        elif not isinstance(envelope.message, Leave | JoinAgain):
            self._send(sender, Envelope(sender.number, envelope.to, Leave()))

    def _lost(self, who: Identity, _: PeerError) -> None:
        for endpoint in list(self._endpoints.values()):
            endpoint.lost(who.incarnation)

    def _tick(self, now: float) -> float:
        if now >= self._due:
            self._due = now + TICK
            for endpoint in list(self._endpoints.values()):
                endpoint.on_tick()
        return self._due if self._endpoints else float("inf")
