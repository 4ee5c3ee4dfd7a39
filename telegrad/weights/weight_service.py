"""The publishers and subscribers of one worker: send their messages as notices, and deliver incoming messages.

Each endpoint has a state machine, the memory of its versions, and a lock. Messages are sent after the lock was
released, so one may overtake another. All state machines tolerate this.

Messages are notices and not calls. So no call is in flight while a reader waits for a version, and a graceful shutdown,
which waits until no call is in flight, is not delayed. Notices need no slot: a learner that computes in all its slots
still serves versions.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, Generic, NamedTuple, Self, TypeVar

from torch import Tensor

from telegrad.errors import PeerError, TelegradError, UsageError
from telegrad.ext.calls import Agent
from telegrad.ext.feedback import Wait
from telegrad.ext.host import forks
from telegrad.ext.workers import Identity
from telegrad.weights.deltas import DeltaCache
from telegrad.weights.protocols import PublisherProtocol, SubscriberProtocol
from telegrad.weights.transfer import (
    Available,
    EndpointAddress,
    JoinAgain,
    Outgoing,
    Unsubscribe,
    VersionOpened,
    WeightPiece,
)

TICK = 1.0  # seconds after which unanswered requests are repeated

T = TypeVar("T")
M = TypeVar("M", bound=PublisherProtocol | SubscriberProtocol)


class Closable:
    """An object that can be closed, also by the end of a `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Envelope(NamedTuple):
    """A message between two endpoints."""

    to: int
    sender: int
    message: Any
    tensors: Sequence[Tensor] = ()


class Endpoint(Closable, Generic[M]):
    def __init__(self, service: "WeightsService", me: EndpointAddress, machine: M) -> None:
        self.me = me
        self.machine = machine
        self.changed = threading.Condition()  # guards the machine, and all fields below
        self.memory: dict[int, Tensor] = {}  # by version number
        self.deltas = DeltaCache()  # between versions
        self.changes = 0  # how often waiting threads were woken
        self.has_left = False  # its memory was dropped, and messages are ignored
        self._service = service

    def update(self, act: Callable[[], Outgoing]) -> None:
        """Call `act`, which changes the machine, under the lock, and send the messages that it returns."""
        with self.changed:
            if self.has_left:
                return
            out = act()
            # Take the bytes before the memory of dropped versions is released: `act` may drop a version that it sends.
            # This also releases memory that `act` was given for a message that it then ignored.
            parcels = [(to, *self._with_bytes(message)) for to, message in out]
            store = self.machine.store
            for number in [number for number in self.memory if number not in store.info]:
                del self.memory[number]
        for to, message, tensors in parcels:
            self._service.send(to, Envelope(to.number, self.me.number, message, tensors))

    def take(self, sender: EndpointAddress, message: Any, tensors: Sequence[Tensor]) -> None:
        self.update(lambda: self.machine.receive(sender, message))
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Wake the threads that wait for a version, or for readers."""
        with self.changed:
            self.changes += 1
            self.changed.notify_all()

    def lost(self, incarnation: str) -> None:
        """Notify the machine that a connection with that worker has ended."""
        self.update(lambda: self.machine.lost(incarnation))
        self.wake_waiters()

    def on_tick(self) -> None:
        """Repeat requests that may have been lost; called each second."""
        self.update(self.machine.on_tick)

    def wait_until(self, check: Callable[[], T | None], wait: Wait, limit: float) -> T | None:
        """Call `check` at each change; return its first result that is not None, or None after `limit` s (0: never)."""
        until = monotonic() + limit if limit > 0 else float("inf")
        with wait, self._service.agent.waiting():
            while True:
                # Read the count before the check. The thread that handles a message may otherwise change the machine
                # after the check and count before this read, and this thread would sleep although its version is here.
                # The wait ends each TICK all the same, since `check` also depends on the agent and on the directory,
                # which do not wake it.
                heard = self.changes
                found = check()
                left = until - monotonic()
                if found is not None or left <= 0:
                    return found
                wait.look()
                with self.changed:
                    self.changed.wait_for(lambda heard=heard: self.changes != heard, min(left, TICK))  # type: ignore[misc]

    def wait_for_messages(self, limit: float) -> bool:
        """Wait until all messages that have arrived are handled; return False after `limit` seconds, 0 for no limit."""
        agent, until = self._service.agent, monotonic() + limit if limit else float("inf")
        # A publisher sends the notice of a version before it calls this worker, but other threads may still handle the
        # notice while that call runs here.
        while not agent.handle_notices(min(until - monotonic(), TICK)):
            agent.check_open()
            if monotonic() >= until:
                return False
        return True

    def _with_bytes(self, message: Any) -> tuple[Any, Sequence[Tensor]]:
        if isinstance(message, VersionOpened) and message.whole:
            return message, (self.memory[message.number],)
        if isinstance(message, WeightPiece):
            whole = self.piece(message)
            deltas = self.deltas.between(message.base, message.number, message.piece, len(whole))
            # Some step from the version of the reader is not here, or the deltas are not smaller than the piece.
            if not deltas:
                return message._replace(base=0), (whole,)
            heads = tuple(delta.heads for delta in deltas)
            return message._replace(heads=heads), [tensor for delta in deltas for tensor in delta.tensors]
        return message, ()

    def piece(self, message: WeightPiece) -> Tensor:
        length = self.machine.store.info[message.number].piece
        return self.memory[message.number][message.piece * length : (message.piece + 1) * length]


class WeightsService:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.changed = threading.Condition()  # guards all fields below; `_endpoints` is also read without the lock
        self._endpoints: dict[int, Endpoint[Any]] = {}  # by endpoint number
        self.published: dict[str, Endpoint[Any]] = {}  # by name
        self._subscribers = itertools.count(1)
        self._publishers = itertools.count(-1, -1)
        self._due = 0.0  # next time to check; used by the timer thread only
        agent.on(Envelope, self._deliver)
        agent.lost.append(self._lost)
        agent.ticking.append(self._tick)

    def party(self, publishes: bool) -> EndpointAddress:
        """Return the address of a new endpoint of this worker."""
        number = next(self._publishers if publishes else self._subscribers)
        return EndpointAddress(self.agent.name, self.agent.incarnation, number)

    def add(self, endpoint: Endpoint[Any], name: str = "") -> None:
        """Deliver messages to an endpoint, a publisher under its name; raise UsageError if another has that name."""
        with self.changed:
            if name in self.published:
                raise UsageError(
                    f"worker {self.agent.name!r} has a publisher {name!r} already: close it first, or use another name"
                )
            if name:
                self.published[name] = endpoint
            self._endpoints[endpoint.me.number] = endpoint
            self.changed.notify_all()

    def remove(self, endpoint: Endpoint[Any], name: str = "") -> None:
        with self.changed:
            self.published.pop(name, None)
            self._endpoints.pop(endpoint.me.number, None)

    def close_later(self, endpoint: Endpoint[Any]) -> None:
        """Close an endpoint that was dropped, on another thread, since the current one may hold any lock."""
        if not forks.is_inherited(self):
            self.agent.later(lambda _: endpoint.close(), None)

    def send(self, to: EndpointAddress, envelope: Envelope) -> None:
        agent = self.agent
        if to.incarnation == agent.incarnation:
            # On another thread, as for a message of another worker. A direct call would nest each answer in the message
            # before, and run the messages of a subscriber on the thread of the program that publishes. The announcement
            # of a version is handled here: subscribers of this worker must know the version once `publish` returns.
            deliver = partial(self._deliver, agent.me.identity)
            if isinstance(envelope.message, Available):
                deliver(envelope)
            else:
                agent.later(deliver, envelope)
            return
        with suppress(TelegradError):  # the worker is lost: its endpoints join again, or time out
            agent.notify(to.worker, envelope._replace(tensors=()), to.incarnation, envelope.tensors, as_arguments=True)

    def _deliver(self, worker: Identity, envelope: Envelope) -> None:
        sender = EndpointAddress(worker.name, worker.incarnation, envelope.sender)
        endpoint = self._endpoints.get(envelope.to)
        if endpoint is not None:
            endpoint.take(sender, envelope.message, envelope.tensors)
        # The sender still counts on an endpoint that was closed. The sender of Unsubscribe or JoinAgain does not: an
        # answer would be useless, and two workers would send Unsubscribe to each other without end.
        elif not isinstance(envelope.message, Unsubscribe | JoinAgain):
            self.send(sender, Envelope(sender.number, envelope.to, Unsubscribe()))

    def _lost(self, who: Identity, _: PeerError) -> None:
        # `list` copies in one step: other threads add and remove endpoints.
        for endpoint in list(self._endpoints.values()):
            endpoint.lost(who.incarnation)

    def _tick(self, now: float) -> float:
        if now >= self._due:
            self._due = now + TICK
            for endpoint in list(self._endpoints.values()):
                endpoint.on_tick()
        return self._due if self._endpoints else float("inf")
