"""One worker: what it offers to the rooms above, put together from the parts of this room.

An agent is an object; several can live in one process. It listens from the start, then joins a group (it knows the
others and can be called), and is closed in the end.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

import torch

from telegrad.agent.cargo import Context, Recorder, Rider, take_cargo, take_tensors
from telegrad.agent.clock import Clock
from telegrad.agent.deadlines import Deadlines
from telegrad.agent.futures import Future, Outcome, wait_for
from telegrad.agent.members import Identity, Member
from telegrad.agent.peer import AnyLink, Peer, Pending
from telegrad.agent.reactor import INSTANT, LONG, QUICK, Reactor, Work
from telegrad.agent.server import Caller, Server
from telegrad.errors import PeerError, PeerLost, ShutDown, UnknownWorker
from telegrad.transport.connect import Wish, connect
from telegrad.transport.handshake import Claim
from telegrad.transport.link import Link
from telegrad.transport.listener import Listener
from telegrad.transport.loopback import LoopEnd, loop
from telegrad.transport.memory import Arena, SharedPool
from telegrad.transport.tls import TlsFiles
from telegrad.wire.failures import fresh, rebuild
from telegrad.wire.functions import name_of, program
from telegrad.wire.messages import BYE, CALL, CARRIES, FAILURE, INFERENCE, NO_GRAD, RECORDED, Frame, load
from telegrad.wire.pickling import decode, encode
from telegrad.wire.tensors import pack

DEFAULT = -1.0  # a call's timeout: take the agent's
IDLE_TICK = 1.0
BUSY_TICK = 0.02

log = logging.getLogger("telegrad")


class Directory(Protocol):
    """Who is in the group."""

    def find(self, to: str | int) -> Member: ...


@dataclass(frozen=True)
class Settings:
    """What can be chosen about an agent; see `telegrad.rpc.options` for the meaning."""

    threads: int = 16
    timeout: float = 60.0
    transport: str = "auto"  # or "unix", "tcp"
    shared_memory: int = 1 << 30
    connect_timeout: float = 10.0
    silence: float = 10.0
    tls: TlsFiles | None = None


class Agent:
    """A worker's calls to others, and its service to their calls."""

    def __init__(self, name: str, settings: Settings, address: str, entered: Callable[[Agent], None]) -> None:
        """Listen, on a Unix socket where hosts have them and on a free TCP port of `address`.

        `entered` is called with this agent first on each thread that will run user code.
        """
        self.name = name
        self.settings = settings
        self.timeout = settings.timeout
        self.incarnation = secrets.token_hex(8)
        self.program = program()
        self.lost: list[Callable[[Identity, PeerError], None]] = []  # called when a connection to a worker ended
        self.ticking: list[Callable[[float], float]] = []  # called now and then; each tells when it wants to be next
        self.rider: Rider | None = None
        self.recorder: Recorder | None = None
        self._clock = Clock(self._tick)
        self._reactor = Reactor(settings.threads, lambda: entered(self), self._clock.wake)
        self._server = Server(
            name, self._reactor, lambda: entered(self), self._take_notice, self._take_cargo, self._tell_lost
        )
        self._arena = Arena(settings.shared_memory)
        self._pool = SharedPool(settings.shared_memory)
        self._handlers: dict[type, Callable[[Identity, Any], None]] = {}
        self._lock = threading.Lock()  # guards _peers, _accepted, _deadlines and _closed
        self._peers: dict[str, Peer] = {}  # by incarnation
        self._accepted: set[Link] = set()
        self._deadlines: Deadlines[Pending] = Deadlines()
        self._closed = False
        self._names: dict[str | int, Peer] = {}  # found before; cleared when one is lost
        self._started = 0
        self._listener = Listener(
            address, settings.tls, settings.transport, settings.silence, self._reactor.poller, self._accept
        )
        self._clock.start(self._reactor)
        self._reactor.start()

    # Life

    def describe(self, id_: int, host: str) -> Member:
        """What others must know to reach this worker."""
        return Member(self.name, id_, self.incarnation, self.program, host, self._listener.unix, self._listener.tcp)

    def join(self, me: Member, key: bytes, directory: Directory) -> None:
        """Take part in a group: from now on calls are accepted."""
        self.me = me
        self._key = key
        self._directory = directory
        self._claim = Claim(me.name, me.id, me.incarnation, me.program)
        self._listener.serve(key, self._claim)

    def close(self, reason: PeerError | None = None) -> None:
        """Leave: calls in flight fail, here and at those who called."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers, accepted = list(self._peers.values()), list(self._accepted)
        reason = reason or ShutDown(f"worker {self.name!r} shut down")
        if self.rider is not None:
            self.rider.close()
        if self.recorder is not None:
            self.recorder.close(reason)
        self._listener.close()
        for peer in peers:
            peer.close(reason)
        for link in accepted:
            try:
                link.send(BYE)
            except PeerError:
                pass
            link.close(reason)
        self._server.close()
        self._reactor.close()
        self._clock.close()
        self._pool.close()

    def abandon(self) -> None:
        """In a forked child: give back the descriptors, so that their other ends hear of the parent's death."""
        self._closed = True
        for link in [*self._accepted, *(peer.link for peer in self._peers.values())]:
            if isinstance(link, Link):
                link.abandon()
        self._listener.abandon()
        self._reactor.poller.abandon()

    @property
    def idle(self) -> bool:
        """Whether no call of this worker is in flight, and none runs here."""
        return self._server.idle and not any(peer.outstanding for peer in list(self._peers.values()))

    @property
    def started(self) -> int:
        """How many calls this worker has begun."""
        return self._started

    # Calls

    def call(self, to: str | int | Identity, function: Any, args: Any, kwargs: Any, timeout: float = DEFAULT) -> Any:
        """Run `function(*args, **kwargs)` on another worker and wait for its value."""
        peer = self._peer(to)
        pending = Pending(peer, function, self.timeout if timeout < 0 else timeout)
        peer.call(pending, self._call_parts(peer, function, args, kwargs))
        try:
            if not peer.wait(pending):
                raise peer.timed_out(pending)
        finally:
            if not pending.done:
                peer.forget(pending)
        return self._open(pending)

    def call_async(
        self,
        to: str | int | Identity,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float = DEFAULT,
        keeps: Any = None,
    ) -> Future[Any]:
        """Run `function(*args, **kwargs)` on another worker; a future of its value. `keeps` lives until it is done."""
        future: Future[Any] = Future()
        self.call_for(future, to, function, args, kwargs, timeout, keeps)
        return future

    def call_for(
        self,
        outcome: Outcome,
        to: str | int | Identity,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float,
        keeps: Any,
        creation: Any = None,
    ) -> None:
        """As `call_async`, but `outcome` is told. After one that is quick `expect` must follow.

        With a `creation`, which the rider understands, the value stays there.
        """
        peer = self._peer(to)
        pending = Pending(peer, function, self.timeout if timeout < 0 else timeout, outcome, keeps)
        outcome.call = pending
        parts = self._call_parts(peer, function, args, kwargs, creation)
        if pending.timeout:
            with self._lock:
                self._deadlines.add(pending, pending.timeout, monotonic())
            self._clock.before(pending.deadline)
        peer.call(pending, parts)

    def expect(self, to: str | int) -> None:
        """Have the answers of a worker read as they come, if nobody does."""
        self._peer(to).expect()

    def _complete(self, pending: Pending) -> None:
        """Tell the outcome of a call, and so whoever has callbacks there."""
        outcome = pending.outcome
        assert outcome is not None
        outcome.call = pending.outcome = pending.keeps = None
        if pending.timeout:
            with self._lock:
                self._deadlines.remove(pending, pending.timeout)
        try:
            value = self._open(pending)
        except Exception as error:
            outcome.set_exception(error.with_traceback(None))
        else:
            outcome.set_result(value)

    def _call_parts(self, peer: Peer, function: Any, args: Any, kwargs: Any, creation: Any = None) -> dict[str, Any]:
        self._started += 1
        same = peer.program == self.program != ""
        name = name_of(function, same)
        args, kwargs = args or (), kwargs or {}
        body, tensors, references = encode((args, kwargs) if name else (function, args, kwargs), same)
        parts: dict[str, Any] = {"kind": CALL, "body": body}
        if name:
            parts["head"] = name.encode()
        if tensors:
            parts["meta"], parts["blobs"] = pack(tensors)
        flags = 0 if torch.is_grad_enabled() else NO_GRAD | (INFERENCE if torch.is_inference_mode_enabled() else 0)
        context = self.recorder.current() if self.recorder is not None else None
        if context is not None:
            flags |= RECORDED
            parts["body"] = body = load(body, context.sent(tensors, peer.identity, function, not flags & NO_GRAD))
        if flags:
            parts["flags"] = flags
        if references or creation is not None:  # last, since nothing can fail from here on
            assert self.rider is not None
            parts["flags"] = flags | CARRIES
            parts["body"] = load(body, self.rider.pack(references, peer.identity, creation))
        return parts

    def _open(self, pending: Pending) -> Any:
        """The value of a call that is done, or its error raised."""
        if pending.error is not None:
            raise fresh(pending.error)
        frame = pending.frame
        assert frame is not None
        if frame.kind == FAILURE:
            raise rebuild(bytes(frame.body))
        references = frame.cargo.references if frame.cargo is not None else ()
        frame, tensors = take_tensors(frame, self.recorder, pending.peer.identity)
        return decode(frame.body, tensors, references)

    def _take_cargo(self, frame: Frame, sender: Identity) -> Frame:
        assert self.rider is not None
        return take_cargo(frame, self.rider, sender)

    def carry(self, rider: Rider) -> None:
        """Send and receive for `rider`."""
        self.rider = rider
        self._server.pack = rider.pack

    def record(self, recorder: Recorder) -> None:
        """Have `recorder` see the tensors that leave and come."""
        self.recorder = self._server.recorder = recorder

    def run(self, act: Callable[[Any], None], argument: Any, short: bool) -> None:
        """Have `act(argument)`, which may be user code, run on a thread for that, as a call would."""
        self._reactor.submit(Work(act, argument, QUICK if short else LONG))

    def wake_at(self, when: float) -> None:
        """Have those in `ticking` called at that time."""
        self._clock.before(when)

    def later(self, act: Callable[[Any], None], argument: Any) -> None:
        """Have `act(argument)` run soon on a thread that may run anybody's code."""
        self._reactor.submit(Work(act, argument, INSTANT))

    def wait_for(self, future: Future[Any], timeout: float = -1) -> bool:
        """Wait until `future` is done; whether it is. A thread of the reactor lets others run calls meanwhile."""
        with self._reactor.waiting():
            return wait_for(future, timeout)

    # The group

    def find(self, to: str | int) -> Member:
        """The member of that name or rank."""
        return self._directory.find(to)

    def identify(self, to: str | int | Identity) -> Identity:
        """Who has that name or rank; looked up once only."""
        return self._peer(to).identity

    # Control messages of the rooms above

    def on(self, message: type, handler: Callable[[Identity, Any], None]) -> None:
        """Have `handler(sender, message)` called for every control message of that class."""
        self._handlers[message] = handler

    def notify(self, to: str | int, message: object, incarnation: str = "", context: Context | None = None) -> None:
        """Send a control message, where an incarnation is given to no other; if it fails, those in `lost` are told.

        In a `context` its tensors are recorded there.
        """
        peer = self._peer(to)
        if incarnation not in ("", peer.identity.incarnation):
            raise UnknownWorker(f"the worker named {to!r} is not the one that it was")
        body, tensors, _ = encode(message, False)
        parts: dict[str, Any] = {}
        if tensors:
            parts["meta"], parts["blobs"] = pack(tensors)
        if context is not None:
            parts["flags"] = RECORDED
            body = load(body, context.sent(tensors, peer.identity, type(message), True))
        peer.notify(body, parts)

    def _take_notice(self, sender: Identity, message: object) -> None:
        self._handlers[type(message)](sender, message)

    # Connections

    def _peer(self, to: str | int | Identity) -> Peer:
        if isinstance(to, Identity):
            found = self._peer(to.name)
            if found.identity != to:
                raise UnknownWorker(f"the worker named {to.name!r} is not the one that it was")
            return found
        peer = self._names.get(to)
        if peer is None:
            member = self._directory.find(to)
            with self._lock:
                if self._closed:
                    raise ShutDown(f"worker {self.name!r} shut down")
                peer = self._peers.get(member.incarnation)
                if peer is None:
                    peer = Peer(
                        member.identity,
                        member.program,
                        self._reactor,
                        lambda peer: self._connect(peer, member),
                        self._complete,
                        self._peer_lost,
                        lambda frame: self._take_cargo(frame, member.identity),
                    )
                    self._peers[member.incarnation] = peer
            self._names[to] = peer
        return peer

    def _connect(self, peer: Peer, member: Member) -> AnyLink:
        if member.incarnation == self.incarnation:
            return self._loop(peer)
        sock, shared, leftover = connect(
            Wish(
                member.name,
                member.incarnation,
                member.unix if member.host == self.me.host else "",
                member.tcp,
            ),
            self._key,
            self._claim,
            self.settings.tls,
            self.settings.transport,
            self.settings.connect_timeout,
            self.settings.silence,
        )
        link = Link(
            sock,
            member.name,
            self._reactor.poller,
            self._arena,
            self._pool if shared else None,
            peer.on_frames,
            peer.on_closed,
            prompt=False,
            given_back=peer.expect,
        )
        link.feed(leftover)
        return link

    def _loop(self, peer: Peer) -> LoopEnd:
        caller = Caller(self.me.identity, self.program != "")
        near = LoopEnd(self.name, peer.on_frames, peer.on_closed)
        far = LoopEnd(self.name, lambda _, frames: self._server.on_frames(caller, frames), lambda *_: None)
        loop(near, far)
        caller.link = far
        return near

    def _accept(self, sock: Any, claim: Claim, shared: bool, leftover: bytes) -> None:
        """A worker has connected and has proved who it is."""
        who = Identity(claim.name, claim.id, claim.incarnation)
        caller = Caller(who, claim.program == self.program != "")
        link = Link(
            sock,
            claim.name,
            self._reactor.poller,
            self._arena,
            self._pool if shared else None,
            lambda _, frames: self._server.on_frames(caller, frames),
            lambda link, reason: self._caller_gone(link, who, reason),
            prompt=True,
        )
        caller.link = link
        with self._lock:
            closed = self._closed
            self._accepted.add(link)
        if closed:
            link.close(ShutDown(f"worker {self.name!r} shut down"))
            return
        link.feed(leftover)
        self._reactor.poller.watch(link, read=True)

    def _caller_gone(self, link: Link, who: Identity, reason: PeerError) -> None:
        with self._lock:
            self._accepted.discard(link)
        self._tell_lost(who, reason)

    def _peer_lost(self, peer: Peer, reason: PeerError) -> None:
        self._names.clear()  # in a dynamic group its name may now be another's
        self._tell_lost(peer.identity, reason)

    def _tell_lost(self, who: Identity, reason: PeerError) -> None:
        if not self._closed:
            if isinstance(reason, PeerLost):
                log.info("telegrad: %s", reason)
            for told in self.lost:
                told(who, reason)

    # Time

    def _tick(self, now: float) -> float:
        with self._lock:
            expired = self._deadlines.due(now)
            upcoming = self._deadlines.next()
            peers, accepted = list(self._peers.values()), list(self._accepted)
        for pending in expired:
            pending.peer.expire(pending)
        for peer in peers:
            peer.tick()
        for link in accepted:
            link.release()
        self._listener.tick(now)
        self._arena.trim(now)
        retired = self._pool.trim(now)
        if retired:
            for peer in peers:
                peer.retire(retired)
            for link in accepted:
                link.retire(retired)
        upcoming = min([upcoming, *(tick(now) for tick in self.ticking)])
        return min(upcoming, now + (BUSY_TICK if self._reactor.watched else IDLE_TICK))


__all__ = ["DEFAULT", "Agent", "Directory", "Settings", "UnknownWorker"]
