"""One worker: what it offers to the layers above, put together from the parts of this layer.

An agent is an object; several can live in one process. It listens from the start, then joins a group (it knows the
others and can be called), and is closed in the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from telegrad._core.agent.connections import Connections, Directory
from telegrad._core.agent.fanout import EachCall, Fanout
from telegrad._core.agent.incoming import Doorkeeper
from telegrad._core.agent.notices import Handlers, notice_to
from telegrad._core.agent.outgoing import attach, encoded
from telegrad._core.agent.peer import Peer
from telegrad._core.agent.pending_call import PendingCall
from telegrad._core.agent.server import Server
from telegrad._core.calls.attachments import GraphContext, Layers
from telegrad._core.calls.call_names import user_name
from telegrad._core.calls.cancelling import serving
from telegrad._core.calls.deadlines import DEFAULT, limit_of
from telegrad._core.calls.futures import Future, Outcome, Signal, may_lie_on, wait_for
from telegrad._core.calls.in_flight_tensors import Underway
from telegrad._core.calls.settings import Settings
from telegrad._core.devices.device_streams import Streams
from telegrad._core.interrupts import uninterrupted
from telegrad._core.membership.members import Identity, Member
from telegrad._core.pickling.exceptions import fresh, rebuild, refused
from telegrad._core.pickling.function_names import name_of, program
from telegrad._core.pickling.pickling import decode
from telegrad._core.reactor import helping
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.reactor.scheduler import Work, WorkQueue
from telegrad._core.reactor.timer import TimerThread
from telegrad._core.security.keyring import Keyring
from telegrad._core.wire.messages import CALL, REFUSAL, RESULT, Message
from telegrad._core.wire.packing import pack
from telegrad.errors import PeerError, ShutDown

IDLE_TICK = 1.0
BUSY_TICK = 0.02


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
        self.ticking: list[Callable[[float], float]] = []  # called now and then; each tells when it wants to be next
        self.busy: list[Callable[[], bool]] = []  # whether a layer above has calls that are not made now
        self.layers = Layers()
        self.layers.tells_times = name if settings.pass_deadlines else ""
        self.streams = Streams(may_lie_on)
        self._handlers = Handlers()
        self._timer = TimerThread(self._tick)

        def enter() -> None:
            torch.get_num_threads()  # else torch uses as many as there are cores here, whatever set_num_threads said
            entered(self)

        self._reactor = Reactor(settings.threads, settings.most_calls, enter, self._timer)
        parts = name, self._reactor, self.layers, self.streams, enter
        self._server = Server(
            *parts,
            self._handlers.take,
            lambda *lost: self._connections.tell_lost(*lost),
            (settings.most_waiting, settings.most_waiting_bytes, self._timer.wake_by),
        )
        self.ticking.append(self._server.intake.tick)
        self._connections = Connections(
            *(settings, address, self._reactor, self.layers, self.streams, self._server),
            self._complete,
            self._timer.wake_by,
        )
        self.memory = self._connections.memory  # which workers of this host have in common
        self._fanout = Fanout(self._connections, self._reactor, self.layers)
        self.lost = self._connections.lost  # called when a connection to a worker ended
        self._timer.start(lambda now: self._reactor.watch(now))
        self._reactor.start()

    def __repr__(self) -> str:
        return f"<Agent {self.name!r}{', closed' * self.closed}: {self._connections!r}; {self._reactor!r}>"

    # Life

    def describe(self, id_: int, host: str) -> Member:
        """What others must know to reach this worker."""
        listener = self._connections.listener
        reached = listener.unix, listener.tcp
        return Member(self.name, id_, self.incarnation, self.program, host, *reached, self.settings.devices)

    def join(self, me: Member, keys: Keyring, directory: Directory, used: Iterable[int] = ()) -> None:
        """Take part in a group: from now on calls are accepted, which may touch the accelerators that are `used`."""
        self.name = me.name
        self._server.name_is(me.name)
        for index in used:
            self.streams.use(index)
        self._connections.join(me, keys, directory)

    @uninterrupted
    def close(self, reason: PeerError | None = None, how: str = "") -> None:
        """Leave: calls in flight fail, here and at those who called; `how` is for these, where it is not in order."""
        reason = reason or ShutDown(f"worker {self.name!r} shut down")
        if not self._connections.begin_close(reason):
            return
        if self.layers.references is not None:
            self.layers.references.close()
        if self.layers.graphs is not None:
            self.layers.graphs.close(reason)
        self._connections.close(reason, how)
        self._server.close()
        self._reactor.close()
        self._timer.close()
        self._connections.release_memory()

    def abandon(self) -> None:
        """In a forked child: give back the descriptors, so that their other ends hear of the parent's death."""
        self._connections.abandon()
        self._reactor.poller.abandon()

    @property
    def me(self) -> Member:
        """What others know of this worker, once it has joined a group."""
        return self._connections.joined.me

    @property
    def closed(self) -> bool:
        return self._connections.closed

    @property
    def idle(self) -> bool:
        """Whether no call of this worker is in flight, and none runs here."""
        return self._server.idle and not self._connections.outstanding and not any(busy() for busy in self.busy)

    @property
    def stands_for(self) -> float:
        """For how many seconds no thread of this worker has looked at its connections, though some should have."""
        return self._reactor.stands_for(perf_counter())

    def serves_here(self) -> bool:
        """Whether this thread runs what others called, or callbacks of what this worker called."""
        return self._reactor.on_worker() or self._server.on_loop()

    @property
    def served(self) -> int:
        """About how many calls of others have begun to run here."""
        return self._server.served

    @property
    def keys(self) -> Keyring:
        """The keys of its group."""
        return self._connections.joined.keys

    @property
    def started(self) -> int:
        """How many calls this worker has begun."""
        return self._connections.begun

    # Calls

    def call(
        self,
        to: str | int | Identity,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float = DEFAULT,
        asked: Any = None,
    ) -> Any:
        """Run `function(*args, **kwargs)` on another worker and wait for its value.

        `asked` is what the user has called, where that is not `function`: `naming.user_name` knows its name.
        """
        peer = self._connections.peer(to)
        limit = self.timeout if timeout is DEFAULT else limit_of(timeout, self.timeout)
        pending = PendingCall(peer, function if asked is None else asked, limit)
        parent = serving.get()
        if parent is not None:
            parent.admit(pending)
        peer.call(pending, self._message(peer, pending, function, args, kwargs))
        if parent is not None:
            parent.hold(pending)
        try:
            if not pending.wait():
                raise peer.timeout_error(pending)
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
        asked: Any = None,
    ) -> Future[Any]:
        """Run `function(*args, **kwargs)` on another worker; a future of its value. `keeps` lives until it is done."""
        future: Future[Any] = Future()
        self.call_for(future, to, function, args, kwargs, timeout, keeps, asked=asked)
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
        asked: Any = None,
    ) -> None:
        """As `call_async`, but `outcome` is told. After one that is quick `expect` must follow.

        With a `creation`, which the layer of references understands, the value stays there.
        """
        peer = self._connections.peer(to)
        if peer.is_full and not self._reactor.on_worker():  # a thread that serves a call goes on: others wait for it
            peer.wait_for_capacity()
        limit = self.timeout if timeout is DEFAULT else limit_of(timeout, self.timeout)
        pending = PendingCall(peer, function if asked is None else asked, limit, outcome, keeps)
        parent = serving.get()
        if parent is not None:
            parent.admit(pending)
        outcome.call = pending
        peer.call(pending, self._message(peer, pending, function, args, kwargs, creation))
        if parent is not None:
            parent.hold(pending)
        if not outcome.quick:
            peer.connection.read_in_background()

    def call_each(
        self,
        calls: Iterable[EachCall],
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float = DEFAULT,
        asked: Any = None,
    ) -> None:
        """As `call_for` to each of many workers, with one encoding for all: see `fanout`.

        Raises what fails for all, before anything is sent; what fails for one is told to its outcome.
        """
        limit = self.timeout if timeout is DEFAULT else limit_of(timeout, self.timeout)
        self._fanout.call(calls, function, args, kwargs, limit, asked, self.program)

    def give_back(self, to: str) -> None:
        """Tell a worker at once which of the memory that it has lent is free; else that goes with what is said next."""
        for link in self._connections.accepted_from((to,)):
            link.release()

    def expect(self, to: str | int) -> None:
        """Have the answers of a worker read as they come, if nobody does."""
        self._connections.peer(to).connection.read_in_background()

    def _complete(self, pending: PendingCall) -> None:
        """Tell the outcome of a call, and so whoever has callbacks there."""
        outcome = pending.outcome
        assert outcome is not None
        outcome.call = pending.outcome = pending.keep_alive = None
        if self.streams.used:
            with self.streams.aside():
                self._tell(outcome, pending)
        else:
            self._tell(outcome, pending)

    def _tell(self, outcome: Outcome, pending: PendingCall) -> None:
        try:
            value = self._open(pending)
        except BaseException as error:  # of code of the user that opens the value, too: who waits must not wait on
            outcome.about = f"{user_name(pending.label)} on worker {pending.peer.name!r}"
            outcome.set_exception(error.with_traceback(None))
            if not isinstance(error, Exception):
                raise
        else:
            outcome.set_result(value)

    def _message(
        self, peer: Peer, pending: PendingCall, function: Any, args: Any, kwargs: Any, creation: Any = None
    ) -> Message:
        """Return the message of a call, whose weight is known then."""
        name, arguments = encoded(function, args, kwargs, peer.member.program == self.program != "")
        body, tensors, references, buffers = arguments
        message = Message(CALL, 0, 0, name)
        if tensors:
            message.meta, blobs = pack(tensors, peer.places.calls, buffers)
            if blobs:
                message.blobs = blobs
                pending.weight = sum(blob.nbytes for blob in blobs)
                pending.underway = Underway(tensors[: len(tensors) - buffers], pending.outcome is None)
        attach(self.layers, message, body, pending, function, tensors, references, creation)
        return message

    def _open(self, pending: PendingCall) -> Any:
        """The value of a call that is done, or its error raised."""
        if pending.error is not None:
            raise fresh(pending.error)
        if pending.underway is not None:
            pending.underway.check(pending.label, pending.peer.name)
        answer, attachments = pending.answer, pending.attachments
        assert answer is not None
        if answer.kind != RESULT:
            refusal = answer.kind == REFUSAL
            raise refused(pending.peer.name, answer.head) if refusal else rebuild(bytes(answer.body))
        _, tensors = self.layers.take_tensors(answer, pending.peer.identity, self.name)
        return decode(answer.body, tensors, attachments.references if attachments is not None else ())

    def wrap_calls(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None) -> None:
        """Have `wrap(function)` run in place of each function that others call; None ends it."""
        self._server.wrap = wrap

    def keep_door(self, doorkeeper: Doorkeeper) -> Server:
        """Have `doorkeeper` say when calls run whose order counts; what runs them."""
        self._server.doorkeeper = doorkeeper
        return self._server

    def run_at_once(self, function: Callable[..., Any]) -> None:
        """Let calls of a function of this package, which never waits, need no slot."""
        self._server.at_once.add((name_of(function, True) or "").encode())

    def run(self, act: Callable[[Any], None], argument: Any, short: bool, by_who_waits: bool = False) -> None:
        """Have `act(argument)`, which may be user code, run on a thread for that, as a call would.

        With `by_who_waits`, it follows from a message, and a thread that waits for such may do it.
        """
        work = Work(act, argument, is_long=not short)
        if by_who_waits:
            helping.submit(self._reactor, work, self._reactor.calls)
        else:
            self._reactor.submit(work, self._reactor.calls)

    def wake_at(self, when: float, rough: bool = False) -> None:
        """Have those in `ticking` called at that time, or if `rough` some milliseconds later, at no cost."""
        self._timer.wake_by(when, rough)

    def later(self, act: Callable[[Any], None], argument: Any, queue: WorkQueue | None = None) -> None:
        """Have `act(argument)` run soon, or in a queue's turn, by a thread for anybody's code, even if this closes."""
        self._reactor.submit(Work(act, argument), queue)

    def wait_for(self, future: Future[Any] | Signal, timeout: float = -1, senders: Iterable[str] = ()) -> bool:
        """Wait until `future` is done; whether it is. A thread of the reactor lets others run calls meanwhile.

        Where messages of certain workers will complete it, this thread can see to them itself.
        """
        with self._reactor.waiting() if self._reactor.on_worker() else nullcontext():
            links = self._connections.accepted_from(senders)
            if links:
                helping.run_for(future, links, self._reactor)
            return wait_for(future, timeout)

    def waiting(self) -> AbstractContextManager[None]:
        """Inside, this thread waits, and does not count as one that runs a call."""
        return self._reactor.waiting()

    def handle_notices(self, timeout: float) -> bool:
        """Wait until the control messages that have come so far have been handled; False where the time was over."""
        return self._server.handle_notices(timeout)

    # The group

    def find(self, to: str | int) -> Member:
        """The member of that name or rank."""
        return self._connections.joined.directory.find(to)

    def warn_lost(self, who: Identity, why: str) -> None:
        """Say that a worker was lost, unless that was said before."""
        self._connections.warn_lost(who, why)

    def forget_names(self, but: Collection[str]) -> None:
        """Look up again who goes by which name, but for those of these incarnations."""
        self._connections.forget_names(but)

    def cut(self, who: Identity, reason: PeerError) -> None:
        """End the connections with a worker that is out of the group, and accept none from it any more."""
        self._connections.cut(who, reason)

    def identify(self, to: str | int | Identity) -> Identity:
        """Who has that name or rank; looked up once only."""
        return self._connections.peer(to).identity

    def is_connected(self, to: Identity) -> bool:
        """Whether there is a connection from here to a worker."""
        return self._connections.peer(to).link is not None

    def shares_program(self, to: str) -> bool:
        """Whether that worker runs the same main program."""
        return self._connections.peer(to).member.program == self.program != ""

    def maps_devices_to(self, name: str) -> bool:
        """Whether this worker has a device map to that one."""
        return bool(self.settings.devices.maps.get(name))

    # Control messages of the layers above

    def on(self, message: type, handler: Callable[[Identity, Any], None]) -> None:
        """Have `handler(sender, message)` called for every control message of that class, a `NamedTuple`."""
        self._handlers.add(message, handler)

    def notify(
        self,
        to: str | int,
        message: tuple[Any, ...],
        incarnation: str = "",
        tensors: Sequence[Tensor] = (),
        context: GraphContext | None = None,
        patient: bool = False,
        as_arguments: bool = False,
    ) -> None:
        """Send a control message, where an incarnation is given to no other; if it fails, those in `lost` are told.

        It is made of plain things; `tensors` arrive in its last field, recorded in the `context`, if any.
        A patient one leaves with the next message that goes there, or within a moment, and is taken in after it.
        Tensors on accelerators go where gradients do, or `as_arguments` do.
        """
        peer = self._connections.of_life(to, incarnation)
        peer.notify(notice_to(peer, message, tensors, context, patient, as_arguments), patient)
        if patient:
            self._timer.wake_by(monotonic() + BUSY_TICK)

    # Time

    def _tick(self, now: float) -> float:
        self._reactor.send_unsent()
        upcoming = min([self._connections.tick(now), *(tick(now) for tick in self.ticking)])
        return min(upcoming, now + (BUSY_TICK if self._timer.is_watching else IDLE_TICK))
