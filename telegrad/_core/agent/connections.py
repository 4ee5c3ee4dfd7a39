"""The connections of one worker: outgoing ones for its calls, and accepted ones for calls of other workers."""

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from time import monotonic, perf_counter
from typing import NamedTuple, Protocol

from telegrad._core import events, forks, processes
from telegrad._core.agent.call_server import Server
from telegrad._core.agent.health import Health
from telegrad._core.agent.incoming import Caller, Layers
from telegrad._core.agent.peer import Peer
from telegrad._core.agent.pending_call import PendingCall
from telegrad._core.calls.settings import Settings
from telegrad._core.membership.members import Identity, Member, map_errors
from telegrad._core.membership.suspects import remember
from telegrad._core.memory.blobs import MemorySources
from telegrad._core.memory.device_streams import Streams
from telegrad._core.memory.extra_streams import LANES
from telegrad._core.memory.staging import Staging
from telegrad._core.memory.warm_memory import ReceiveBufferPool, SharedBlockPool
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.reactor.scheduler import Work
from telegrad._core.security.handshake import PROBE, Hello, StreamId
from telegrad._core.security.keyring import Keyring
from telegrad._core.threads import Thread, results
from telegrad._core.transport.connect import LoopEnd, OpenedChannel, Target, connect, lost, one_sided, part
from telegrad._core.transport.link import AnyLink, Link, LinkHandlers
from telegrad._core.transport.listener import MOST_CONNECTIONS, Listener
from telegrad._core.wire.messages import SILENT
from telegrad._core.wire.tensors import DeviceRoutes, for_calls, for_gradients
from telegrad.errors import DeviceError, LeftEarly, PeerError, PeerLost, PeerUnreachable, ShutDown, UnknownWorker

CONNECT_WITHIN = 10.0  # seconds, and as many for the handshake
LEAVES_WITHIN = 0.5  # seconds for connections that are just being made, when this worker leaves without the others
OTHERS = Thread, threading._DummyThread  # of this package, and of torch's engine: both may work for other workers

log = logging.getLogger("telegrad")


class MemberDirectory(Protocol):
    """Lists the members of the group."""

    def find(self, to: str | int) -> Member: ...


class _Joined(NamedTuple):
    me: Member
    keys: Keyring
    directory: MemberDirectory
    claim: Hello  # of this worker


def _absent(name: str) -> str:
    return f"worker {name!r} is no longer in the group: it left or was lost"


class Connections:
    """Up to two connections with each worker: an outgoing one for calls to it, and an accepted one for its calls."""

    def __init__(
        self,
        settings: Settings,
        reactor: Reactor,
        layers: Layers,
        streams: Streams,
        service: Server,
        complete: Callable[[PendingCall], None],
    ) -> None:
        """Listen on a Unix socket, where the host supports them, and on a free TCP port.

        `service` handles messages from other workers, `complete` is called once for each asynchronous call that has
        ended.
        """
        self.lost: list[Callable[[Identity, PeerError], None]] = []
        self.reached: list[Callable[[Identity], None]] = []
        self.settings = settings
        self.reactor = reactor
        self.layers = layers
        self._service = service
        self.complete = complete
        self._arena = ReceiveBufferPool(settings.shared_memory)
        self._heap = processes.Heap()
        self.staging = Staging(streams)
        # Guards _peers, _gone, _accepted, _cut, _warned, _departed, `closed`, _left, and the replacement of `names`;
        # single reads do not need it.
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}  # by incarnation
        self._gone: set[str] = set()  # incarnations of peers that have left the group
        self._begun = 0  # calls to peers that were dropped
        self._accepted: dict[Link, tuple[str, str]] = {}  # each with its worker's incarnation and its connection id
        self._cut: dict[str, PeerError] = {}  # the most recent incarnations of workers that are out of the group
        self._warned: dict[str, bool] = {}  # incarnations of workers whose loss was logged, or that left in order
        self._departed: dict[str, str] = {}  # incarnations of workers that have left, and how
        self.news_of: Callable[[Identity, str], str] = lambda who, why: why  # text of a warning, or "" for none
        self.health = Health(
            settings.silence,
            settings.heartbeat,
            lambda link, why: reactor.submit(Work(partial(part, link, how=SILENT), why)),
        )
        self.closed = False
        self.over: PeerError | None = None  # once set, the error of all calls that fail
        self._left: tuple[PeerError, str] | None = None  # why and how this worker left, once its connections have ended
        self._joined: _Joined | None = None  # set once
        self._early: list[tuple[OpenedChannel, Hello, StreamId]] = []  # accepted before that; guarded by _lock
        self._parks = False  # True once the program has ended, see `park_daemons`
        self.names: dict[str | int | Identity, Peer] = {}  # cache of lookups; `get` and stores need no lock
        self.listener = Listener(
            settings.address, settings.tls, settings.transport, settings.silence, reactor.poller, self._accept
        )
        self.memory = SharedBlockPool(settings.shared_memory if self.listener.unix else 0)

    def join(self, me: Member, keys: Keyring, directory: MemberDirectory) -> None:
        """Accept connections from now on."""
        with self._lock:
            self._joined = _Joined(me, keys, directory, Hello(me.name, me.id, me.incarnation, me.program))
            early, self._early = self._early, []
        self.listener.serve(keys, self._joined.claim)
        for each in early:
            self._accept(*each)

    @property
    def joined(self) -> _Joined:
        assert self._joined is not None, "it has not joined one yet"
        return self._joined

    @property
    def outstanding(self) -> bool:
        return any(peer.calls.in_flight for peer in list(self._peers.values()))

    @property
    def begun(self) -> int:
        return self._begun + sum(peer.calls.begun for peer in list(self._peers.values()))

    def check_open(self) -> None:
        """Raise ShutDown, or the loss that ended this worker, if it has left its group or is about to."""
        if self.over is not None:
            raise fresh(self.over)

    # Outgoing

    def peer(self, to: str | int | Identity) -> Peer:
        if isinstance(to, Identity):
            try:
                return self.of_life(to.name, to.incarnation)
            except UnknownWorker:
                raise PeerLost(_absent(to.name)) from None
        names = self.names
        peer = names.get(to)
        if peer is None:
            if self._parks and type(thread := threading.current_thread()) not in OTHERS and thread.daemon:
                threading.Event().wait()
            peer = self._peer_of(self.joined.directory.find(to))
            if not self._parks:
                names[to] = peer
        return peer

    def park_daemons(self) -> None:
        """Let daemon threads of the program stop at their next call, as they do at the end of the interpreter."""
        self._parks = True
        self._forget_names(())

    def of_life(self, to: str | int, incarnation: str) -> Peer:
        """Return the peer for calls to a worker, of that incarnation if one is given; raise UnknownWorker if it has
        gone, or PeerUnreachable if it has a connection to this worker, but the directory does not list it yet."""
        try:
            found = self.peer(to)
            if incarnation in ("", found.identity.incarnation):
                return found
            found = self.names[to] = self._peer_of(self.joined.directory.find(to))  # perhaps a new worker has the name
            if found.identity.incarnation == incarnation:
                return found
            raise UnknownWorker(f"the name {to!r} now belongs to another worker")
        except UnknownWorker:
            with self._lock:
                lives = any(caller == incarnation for caller, _ in self._accepted.values())
            if lives:
                raise PeerUnreachable(f"worker {to!r} calls this worker but is not in the directory yet") from None
            raise

    def _peer_of(self, member: Member) -> Peer:
        with self._lock:
            # Under the lock with which `begin_close` sets `closed`: a peer is made before that, so that `close` finds
            # it, or it is refused.
            self.check_open()
            peer = self._peers.get(member.incarnation)
            if peer is None:
                me = self.joined.me
                ways = member.unix and self.listener.unix and self.settings.transport != "tcp"
                is_near = bool(ways) and member.host == me.host and member.incarnation != me.incarnation
                peer = self._peers[member.incarnation] = Peer(member, self._places(member), is_near, self)
        return peer

    def _places(self, member: Member) -> DeviceRoutes:
        mine, theirs = self.joined.me.devices, member.devices
        for fault in map_errors({self.joined.me.name: mine, member.name: theirs}, whole=False):
            raise DeviceError(fault)
        map_ = mine.maps.get(member.name, {})
        return DeviceRoutes(for_calls(member.name, map_), for_gradients(map_, theirs.maps.get(self.joined.me.name, {})))

    def connect_to(self, peer: Peer) -> AnyLink:
        member = peer.member
        if member.incarnation == self.joined.me.incarnation:
            return self._loop(peer)
        unix = member.unix if member.host == self.joined.me.host else ""
        target = Target(member.name, member.incarnation, unix, member.tcp, StreamId(secrets.token_hex(8)))
        try:
            channel = self._reach(target)
        except PeerUnreachable as error:
            if departure := self._departed.get(member.incarnation):
                raise PeerUnreachable(departure) from error.__cause__
            if member.uses_tls != (self.settings.tls is not None):  # it may have ended because of that
                raise one_sided(member.name) from None
            raise
        shared = channel.shared
        widen = None if shared else partial(self._begin_widen, target)
        handlers = LinkHandlers(peer.on_messages, peer.link_closed, False, peer.calls.in_flight.__len__, widen)
        link = self._link(channel, member.name, handlers)
        link.feed(channel.leftover)
        list(results(self.reached, peer.identity))
        if (note := events.note) is not None:
            note((events.CONNECTED, now := perf_counter(), now, member.name, "unix" if shared else "tcp"))
        return link

    def _reach(self, target: Target) -> OpenedChannel:
        settings, keys, claim = self.settings, self.joined.keys, self._claim_to(target.name)
        with processes.translate_error(f"worker {target.name!r} was not called", PeerUnreachable):
            return connect(target, keys, claim, settings.tls, settings.transport, CONNECT_WITHIN, settings.silence)

    def _begin_widen(self, target: Target, link: Link, sends: bool) -> None:
        with contextlib.suppress(RuntimeError, MemoryError):  # there is no free thread; one stream suffices
            Thread(target=self._widen, args=(target, link, sends), name="telegrad-connect").start()

    def _widen(self, target: Target, link: Link, sends: bool) -> None:
        """Add further streams for one direction of a connection."""
        stream_id = StreamId(target.stream_id.connection, 1 if sends else -1)
        try:
            for _ in range(LANES):
                link.join(sends, self._reach(target._replace(unix="", stream_id=stream_id)))
        except Exception as error:
            log.info("telegrad: worker %r and this one use one stream for large tensors: %s", target.name, error)

    def _link(self, channel: OpenedChannel, peer: str, handlers: LinkHandlers) -> Link:
        stores = MemorySources(self._arena, self.memory if channel.shared else None, self.staging)
        return Link(channel.sock, peer, self.reactor.poller, stores, handlers, channel.ciphers)

    def _claim_to(self, name: str) -> Hello:
        return self.joined.claim._replace(map=tuple(self.joined.me.devices.maps.get(name, {}).items()))

    def _loop(self, peer: Peer) -> LoopEnd:
        caller = Caller(self.joined.me.identity, self.joined.me.program != "", self._claim_to(self.joined.me.name).map)
        arrive = partial(self._service.on_messages, caller)
        return LoopEnd(self.joined.me.name, arrive, peer.on_messages, peer.link_closed)

    def peer_lost(self, who: Identity, reason: PeerError) -> None:
        self._forget_names({*self._peers} - {who.incarnation})  # another worker may now have its name
        self.tell_lost(who, reason)

    def forget_names(self, members: Collection[str]) -> None:
        """Forget the results of earlier lookups, except for the members, which have these incarnations."""
        with self._lock:
            self._gone = self._peers.keys() - members
        self._forget_names(members)

    def _forget_names(self, but: Collection[str]) -> None:
        """Replace the table: a lookup that runs now stores its result in the old one."""
        with self._lock:
            known = self.names.copy()
            self.names = {to: peer for to, peer in known.items() if peer.identity.incarnation in but}

    def _drop_gone(self) -> None:
        """Drop the workers that have left the group and with which nothing is in flight."""
        for life in self._gone & self._peers.keys():
            with self._lock:
                peer = self._peers.get(life)
                if peer is None or peer.link is not None or peer.calls.in_flight:
                    continue
                self._begun += peer.calls.begun
                del self._peers[life]
            # A thread may have found it earlier and call now. The call fails, since no tick would end it any more.
            peer.close(PeerLost(_absent(peer.name)))

    # Accepted

    def _accept(self, channel: OpenedChannel, claim: Hello, stream_id: StreamId) -> None:
        """Accept the connection of an authenticated worker."""
        if stream_id == PROBE:
            channel.sock.close()
            return
        with self._lock:
            if self._joined is None:
                # A worker that has joined calls this one, which has not read yet that it is a member, too.
                self._early.append((channel, claim, stream_id))
                return
        if stream_id.lane:
            self._join(channel, claim, stream_id)
            return
        who = Identity(claim.name, claim.id, claim.incarnation)
        caller = Caller(who, claim.program == self.joined.me.program != "", claim.map)

        def gone(link: Link, reason: PeerError) -> None:
            with self._lock:
                self._accepted.pop(link, None)
            self._service.lost(caller)
            self.tell_lost(who, reason)

        handlers = LinkHandlers(partial(self._service.on_messages, caller), gone, prompt=True)
        link = self._link(channel, claim.name, handlers)
        with self._lock:
            closed, left = self.closed, self._left
            # `cut` ends the connections that it finds in `_accepted`: this one, or it has stored its reason before.
            cut = self._cut.get(who.incarnation)
            same = [link for link, (life, _) in self._accepted.items() if life == who.incarnation]
            self._accepted[link] = who.incarnation, stream_id.connection
        if len(same) >= MOST_CONNECTIONS:
            same[0].close(lost(who.name, f"it opened more than {MOST_CONNECTIONS} connections at a time"))
        # `close` stores `_left` and takes its list of connections in one step, under the lock with which this one was
        # added. If `_left` was set, that list lacks this connection. If this worker was closing without `_left`, the
        # list will have it.
        if cut is not None:
            part(link, cut, SILENT)
        elif left is not None:
            part(link, *left)
        elif not closed:
            # The leader may read the bytes that follow these only after they were processed.
            link.feed(channel.leftover)
            link.reading.watch()
            list(results(self.reached, who))

    def _join(self, channel: OpenedChannel, claim: Hello, stream_id: StreamId) -> None:
        with self._lock:
            wanted = claim.incarnation, stream_id.connection
            link = next((link for link, connection in self._accepted.items() if connection == wanted), None)
        if link is None:
            channel.sock.close()  # the connection has ended
        else:
            link.join(stream_id.lane < 0, channel)

    def accepted_from(self, names: Iterable[str]) -> list[Link]:
        wanted = set(names)
        if not wanted:
            return []
        with self._lock:
            return [link for link in self._accepted if link.peer in wanted]

    # Both directions

    def cut(self, who: Identity, reason: PeerError) -> None:
        """End the connections with a worker that is out of the group, and accept no new ones from it."""
        with self._lock:
            remember(self._cut, who.incarnation, reason)
            peer = self._peers.get(who.incarnation)
            links = [link for link, (life, _) in self._accepted.items() if life == who.incarnation]
        if peer is not None and isinstance(peer.link, Link):
            links.append(peer.link)
        for link in links:
            # If it only did not run, it must not take this worker for dead before it learns of its own loss.
            part(link, reason, SILENT)

    def tell_lost(self, who: Identity, reason: PeerError) -> None:
        if self.over is None:  # else this worker leaves
            if (note := events.note) is not None:
                note((events.LOST, now := perf_counter(), now, who.name, str(reason)))
            if isinstance(reason, PeerLost):
                self.warn_lost(who, str(reason))
            elif isinstance(reason, ShutDown):
                with self._lock:
                    if reason._departure:
                        remember(self._departed, who.incarnation, reason._departure)
                    if not isinstance(reason, LeftEarly):  # its other connection ends without a loss
                        remember(self._warned, who.incarnation, True)
            list(results(self.lost, who, reason))

    def warn_lost(self, who: Identity, why: str) -> None:
        """Log a warning about a lost worker, once."""
        with self._lock:
            known = who.incarnation in self._warned
            remember(self._warned, who.incarnation, True)
        news = "" if known else self.news_of(who, why)
        if news:
            events.alarm(news)
        log.log(logging.WARNING if news else logging.INFO, "telegrad: %s", news or why)

    def note_return(self, who: Identity) -> None:
        """Log that a lost worker is back. Its next loss will be logged, too."""
        with self._lock:
            self._warned.pop(who.incarnation, None)
        log.warning("telegrad: worker %r answers again, and is back in the group", who.name)

    def tick(self, now: float) -> float:
        """Expire calls, return lent memory, and notice ends of idle connections; return the time of the next tick."""
        with self._lock:
            peers, accepted = list(self._peers.values()), list(self._accepted)
        links = [link for peer in peers if isinstance(link := peer.link, Link)]
        for peer in peers:
            peer.connection.read_in_background()  # to notice the end of an idle connection
        self._drop_gone()
        upcoming = min([self.health.tick(now, links), *(peer.expire(now) for peer in peers)])
        for link in [*accepted, *links]:
            link.release()
        self.listener.tick(now)
        self._arena.trim(now)
        self._heap.tick(now)
        retired = self.memory.trim(now)
        if retired:
            for link in [*accepted, *links]:
                link.retire(retired)
        return upcoming

    def begin_close(self, reason: PeerError) -> bool:
        """Refuse new connections from now on; return False if this was called before."""
        with self._lock:
            closed, self.closed, self.over = self.closed, True, self.over or reason
        return not closed

    def close(self, reason: PeerError, how: str) -> None:
        """End all connections. Calls in flight fail, here and at their callers, which learn `how` this worker left."""
        with self._lock:
            self._left = reason, how
            peers, accepted, early = list(self._peers.values()), list(self._accepted), self._early
        for channel, *_ in early:
            channel.sock.close()
        for peer in peers:
            peer.close(reason, how)
        for link in accepted:
            part(link, reason, how)
        # Before the listener refuses workers: one to which a connection is just being made would find this worker dead,
        # and then see a sign of life.
        if how:
            until = monotonic() + LEAVES_WITHIN
            for peer in peers:
                peer.connection.finish_connecting(until)
        self.listener.close()  # last: a worker that connects before it has read its BYE gets another one

    def abandon(self) -> None:
        """In a forked child: close the descriptors, since only then the other ends notice the parent's death."""
        for link in [*self._accepted, *(peer.link for peer in self._peers.values())]:
            if isinstance(link, Link):
                link.abandon()
        self.listener.abandon()
        for peer in self._peers.values():  # futures that wait for a call refer to the peers
            forks.disable(peer)
