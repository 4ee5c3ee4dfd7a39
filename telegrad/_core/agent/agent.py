"""The agent of one worker: the interface that this layer offers to the layers above.

Several agents can exist in one process. An agent listens from its creation on. `join` makes it a member of a group: it
then knows the other workers and accepts calls. `close` ends it.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
from collections.abc import Callable, Iterable, Sequence
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from telegrad._core.agent.call_each import EachCall, call_each
from telegrad._core.agent.call_server import Server
from telegrad._core.agent.connections import Connections, MemberDirectory
from telegrad._core.agent.incoming import CallScheduler, Layers
from telegrad._core.agent.peer import Peer
from telegrad._core.agent.pending_call import PendingCall, PreparedCall, begin_call
from telegrad._core.calls.call_context import GraphContext
from telegrad._core.calls.futures import Future, Outcome, Signal, may_lie_on, wait_for
from telegrad._core.calls.settings import DEFAULT, Settings, limit_of
from telegrad._core.interrupts import uninterrupted
from telegrad._core.membership.form_generations import Prober
from telegrad._core.membership.members import Identity, Member
from telegrad._core.memory.device_streams import Streams
from telegrad._core.pickling.exceptions import fresh, rebuild, refused
from telegrad._core.pickling.function_names import name_of, program
from telegrad._core.pickling.pickling import decode
from telegrad._core.reactor.leader_threads import TimerThread
from telegrad._core.reactor.reactor import Reactor, run_for, submit_here
from telegrad._core.reactor.scheduler import Work, WorkQueue
from telegrad._core.security.keyring import Keyring
from telegrad._core.threads import results
from telegrad._core.wire.messages import HAS_GRAPH, LOW_PRIORITY, NOTICE, REFUSAL, RESULT, Message, append, split
from telegrad._core.wire.packing import pack
from telegrad.errors import PeerError, ShutDown, TelegradError

IDLE_TICK = 1.0
BUSY_TICK = 0.02


Callee = str | int | Identity  # a worker's name, rank or identity


class Agent:
    """Makes the calls of a worker, and serves the calls of other workers."""

    def __init__(self, name: str, settings: Settings, entered: Callable[[Agent], None]) -> None:
        """Listen on a Unix socket, where the host supports them, and on a free TCP port.

        `entered` is called with this agent first on each thread that will run user code.
        """
        self.name = name
        self.settings = settings
        self.timeout = settings.timeout
        self.incarnation = secrets.token_hex(8)
        self.program = program()
        self.me: Member  # this worker's member record, set once it joins a group
        self.ticking: list[Callable[[float], float]] = []  # called by the timer's thread; each returns its next time
        self.busy: list[Callable[[], bool]] = []  # each returns True if its layer has calls that are not yet sent
        self.layers = Layers()
        self.layers.tells_times = name if settings.pass_deadlines else ""
        self.layers.sends_modes = settings.sends_modes
        self.streams = Streams(may_lie_on)
        self._timer = TimerThread(self._tick)

        def enter() -> None:
            # Without this call, torch ignores `set_num_threads` on this thread and uses one thread per core.
            torch.get_num_threads()
            entered(self)

        self._reactor = Reactor(settings.threads, settings.most_calls, enter, self._timer)
        shared = settings, self._reactor, self.layers, self.streams
        self._server = Server(*shared, enter, lambda *lost: self._connections.tell_lost(*lost))
        self._server.name_is(name)
        self.ticking.append(self._server.intake.tick)
        self._connections = Connections(*shared, self._server, self._complete)
        self.memory = self._connections.memory  # shared with other workers of this host
        self.lost = self._connections.lost  # called when a connection to a worker has ended; the worker may be alive
        self.reached = self._connections.reached  # called when a connection to or from a worker was made
        # Methods of the parts, without a call of this object between
        self.warn_lost, self.cut = self._connections.warn_lost, self._connections.cut
        self.prober = Prober(self._connections.listener, settings.tls, settings.transport, settings.silence)
        self.forget_names, self.note_return = self._connections.forget_names, self._connections.note_return
        self.park_daemons, self.check_open = self._connections.park_daemons, self._connections.check_open
        self.waiting = self._reactor.waiting
        self.handle_notices = self._server.handle_notices
        self.wake_at = self._timer.wake_by
        self._timer.start(self._watch)
        self._reactor.start()

    # Lifecycle

    def describe(self, id_: int, host: str) -> Member:
        """Return the data that other workers need to reach this worker."""
        listener, settings = self._connections.listener, self.settings
        reached = host, listener.unix, listener.tcp, settings.devices
        return Member(self.name, id_, self.incarnation, self.program, *reached, uses_tls=settings.tls is not None)

    def join(self, me: Member, keys: Keyring, directory: MemberDirectory, used: Iterable[int] = ()) -> None:
        """Join a group and accept calls from now on. Calls may use the accelerators in `used`."""
        self.me = me
        self.name = me.name
        self._server.name_is(me.name)
        for index in used:
            self.streams.use(index)
        self._connections.join(me, keys, directory)

    def begin_close(self) -> PeerError:
        """Return why calls will fail after `close`. From now on, all that fail here do so for that reason."""
        over = f"worker {self.name!r} shut down: calls and references of its group cannot be used after that"
        self._connections.over = reason = self._connections.over or ShutDown(over)
        return reason

    @uninterrupted
    def close(self, reason: PeerError | None = None, how: str = "") -> None:
        """Leave the group. Calls in flight fail, here and at their callers. These get `how` if the end is irregular."""
        reason = reason or self.begin_close()
        # First of all: from here on no call and no peer begins, and the ends of connections are not reported as losses.
        if not self._connections.begin_close(reason):
            return
        if self.layers.references is not None:
            self.layers.references.close(reason)
        if self.layers.graphs is not None:
            self.layers.graphs.close(reason)
        self._connections.close(reason, how)
        self._server.loop.close()
        self._reactor.close()
        self._timer.close()
        self.memory.close()
        self._connections.staging.close()

    def abandon(self) -> None:
        """In a forked child: close the descriptors, since only then the other ends notice the parent's death."""
        self._connections.abandon()
        self._reactor.poller.abandon()

    @property
    def closed(self) -> bool:
        return self._connections.closed

    @property
    def idle(self) -> bool:
        """Return True if no call of this worker is in flight or runs here."""
        return self._server.idle and not self._connections.outstanding and not any(busy() for busy in self.busy)

    @property
    def stands_for(self) -> float:
        """Seconds for which no thread has polled the connections, although one should have."""
        return self._reactor.stands_for(perf_counter())

    def serves_here(self) -> bool:
        """Return True if this thread runs calls of other workers, or callbacks of this worker's calls."""
        return self._reactor.here.own is not None or self._server.loop.runs_here()

    @property
    def served(self) -> int:
        return self._server.served

    @property
    def keys(self) -> Keyring:
        return self._connections.joined.keys

    @property
    def started(self) -> int:
        return self._connections.begun

    # Calls

    def call(
        self, to: Callee, function: Any, args: Any, kwargs: Any, timeout: float = DEFAULT, asked: Any = None
    ) -> Any:
        """Run `function(*args, **kwargs)` on another worker, wait, and return its value; `asked` as in PreparedCall."""
        return self.perform(to, PreparedCall(function, args, kwargs, None, asked), timeout)

    def perform(self, to: Callee, call: PreparedCall, timeout: float = DEFAULT) -> Any:
        """Make a call to another worker, wait, and return its value."""
        peer = self._connections.names.get(to) or self.peer(to)
        limit = self.timeout if timeout is DEFAULT else limit_of(timeout, self.timeout)
        pending = PendingCall(peer, call.function if call.asked is None else call.asked, limit)
        begin_call(pending, call, self.program, self.layers)
        try:
            if not pending.wait():
                raise peer.timeout_error(pending)
        finally:
            if not pending.done:
                peer.forget(pending)
        return self._open(pending)

    def call_async(
        self, to: Callee, function: Any, args: Any, kwargs: Any, timeout: float = DEFAULT, keeps: Any = None
    ) -> Future[Any]:
        """Run `function(*args, **kwargs)` on another worker; return a future. `keeps` lives until it is done."""
        return self.begin(to, PreparedCall(function, args, kwargs, keeps), timeout)

    def begin(
        self, to: Callee, call: PreparedCall, timeout: float = DEFAULT, kind: Callable[[], Future[Any]] = Future
    ) -> Future[Any]:
        """Make a call to another worker; return a future that `kind` makes."""
        future = kind()
        self.call_for(future, to, call, timeout)
        return future

    def call_for(
        self, outcome: Outcome, to: Callee | Peer, call: PreparedCall, timeout: float, creation: Any = None
    ) -> None:
        """Make a call that completes `outcome`. If `outcome.quick`, a call of `expect` must follow.

        With a `creation` (see the reference layer), the value stays on the callee.
        """
        peer = to if isinstance(to, Peer) else self._connections.names.get(to) or self.peer(to)
        if peer.is_full and self._reactor.here.own is None:  # a thread that serves a call must not block
            peer.wait_for_capacity()
        limit = self.timeout if timeout is DEFAULT else limit_of(timeout, self.timeout)
        pending = PendingCall(peer, call.function if call.asked is None else call.asked, limit, outcome, call.keeps)
        begin_call(pending, call, self.program, self.layers, creation)
        if not outcome.quick:
            peer.connection.read_in_background()

    def call_each(self, callees: Iterable[EachCall], call: PreparedCall, timeout: float = DEFAULT) -> None:
        """Call each of many workers as `call_for` does, and encode the arguments once (see `call_each`).

        Raise errors that affect all calls before anything is sent; report errors of single calls to their outcomes.
        """
        limit = self.timeout if timeout is DEFAULT else limit_of(timeout, self.timeout)
        call_each(self._connections, callees, call, limit, self.program)

    def give_back(self, to: str) -> None:
        """Notify a worker now of free memory that it has lent, instead of with the next message."""
        for link in self._connections.accepted_from((to,)):
            link.release()

    def expect(self, to: str | int) -> None:
        """Let the reactor read the answers of a worker, unless a thread reads them already."""
        self.peer(to).connection.read_in_background()

    def _complete(self, pending: PendingCall) -> None:
        """Complete the outcome of a call, which runs its callbacks."""
        outcome = pending.outcome
        assert outcome is not None
        # Before the outcome is completed: a `Future` refuses a result while its call is set. The two also refer to each
        # other, and the future may outlive the call for long.
        outcome.call = pending.outcome = pending.keep_alive = None
        if self.streams.used:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(self.streams.aside())
                except Exception as error:  # the device has failed
                    pending.error = error if pending.error is None else pending.error
                self._tell(outcome, pending)
        # Without accelerators there is nothing to set aside, and a context manager would cost each asynchronous call
        # three more calls of functions.
        else:
            self._tell(outcome, pending)

    def _tell(self, outcome: Outcome, pending: PendingCall) -> None:
        try:
            value = self._open(pending)
        except BaseException as error:  # also of user code that unpickles the value: the waiting thread must wake up
            outcome.about, outcome.begun = pending.described, pending.begun
            outcome.set_exception(error.with_traceback(None))
            if not isinstance(error, Exception):
                raise
        else:
            outcome.set_result(value)

    def _open(self, pending: PendingCall) -> Any:
        """Return the value of a call that is done, or raise its error."""
        if pending.error is not None:
            raise fresh(pending.error)
        if pending.underway is not None:
            pending.underway.check(pending.label, pending.peer.name)
        answer, attachments = pending.answer, pending.attachments
        assert answer is not None
        if answer.kind != RESULT:
            refusal = answer.kind == REFUSAL
            raise refused(pending.peer.name, answer.head) if refusal else rebuild(bytes(answer.body))
        tensors: Sequence[Tensor] = ()
        if answer.meta or answer.flags:
            if pending.unrecorded and answer.flags & HAS_GRAPH:
                answer.flags &= ~HAS_GRAPH
                answer.body, _ = split(answer.body)
            _, tensors = self.layers.take_tensors(answer, pending.peer.identity, self.name)
        return decode(answer.body, tensors, attachments.references if attachments is not None else ())

    def wrap_calls(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None) -> None:
        """Run `wrap(function)` instead of each function that others call; None removes the wrapper."""
        self._server.wrap = wrap

    def set_call_scheduler(self, call_scheduler: CallScheduler) -> Server:
        """Let `call_scheduler` decide when ordered calls run; return the server, which runs them."""
        self._server.call_scheduler = call_scheduler
        return self._server

    def run_at_once(self, function: Callable[..., Any]) -> None:
        """Run calls of a function of this package, which never waits, without a slot."""
        self._server.at_once.add((name_of(function, True) or "").encode())

    def run(self, act: Callable[[Any], None], argument: Any, short: bool, by_who_waits: bool = False) -> None:
        """Run `act(argument)`, possibly user code, on a reactor thread, with a slot as for a call.

        With `by_who_waits`, `act` follows from a message, and a thread that reads that in `wait_for` may run it.
        """
        work = Work(act, argument, is_long=not short)
        if by_who_waits:
            submit_here(self._reactor, work, self._reactor.calls)
        else:
            self._reactor.submit(work, self._reactor.calls)

    def later(self, act: Callable[[Any], None], argument: Any, queue: WorkQueue | None = None) -> None:
        """Run `act(argument)` soon, or in a queue's turn, on a reactor thread, even if the agent closes."""
        self._reactor.submit(Work(act, argument), queue)

    def wait_for(self, future: Future[Any] | Signal, timeout: float = -1, senders: Iterable[str] = ()) -> bool:
        """Wait until `future` is done; return True if it is. A reactor thread releases its slot meanwhile.

        If messages of the workers `senders` will complete the future, this thread may handle them itself.
        """
        with self._reactor.waiting() if self._reactor.here.own is not None else contextlib.nullcontext():
            links = self._connections.accepted_from(senders)
            return bool(links and run_for(future, links, self._reactor)) or wait_for(future, timeout)

    # The group

    def peer(self, to: Callee) -> Peer:
        """Return the worker of that name, rank or identity, which is looked up only once."""
        # Known workers are looked up here: `Connections.peer` would take three more Python calls of the 26 of a call.
        names = self._connections.names
        known = names.get(to.name if isinstance(to, Identity) else to)
        if known is None or (isinstance(to, Identity) and known.identity.incarnation != to.incarnation):
            return self._connections.peer(to)
        return known

    def find(self, to: str | int) -> Member:
        return self._connections.joined.directory.find(to)

    def word_losses(self, news_of: Callable[[Identity, str], str]) -> None:
        """Use `news_of(who, why)` for the text of the warning that a worker is lost; an empty text means no warning."""
        self._connections.news_of = news_of

    def identify(self, to: Callee) -> Identity:
        """Return the worker of that name or rank, which is looked up only once."""
        return self.peer(to).identity

    def is_connected(self, to: Identity) -> bool:
        return self.peer(to).link is not None

    def shares_program(self, *to: str) -> bool:
        """Return True if these workers run the same main program; False if there is no such worker."""
        with contextlib.suppress(TelegradError):
            return all(self.peer(each).member.program == self.program != "" for each in to)
        return False

    def maps_devices_to(self, name: str) -> bool:
        return bool(self.settings.devices.maps.get(name))

    # Control messages of the layers above

    def on(self, message: type, handler: Callable[[Identity, Any], None]) -> None:
        """Have `handler(sender, message)` called for each control message of a class, a `NamedTuple` of a unique name.

        Handlers run on threads of this worker, several at once and without a slot: they must not wait for others.
        """
        self._server.handlers.add(message, handler)

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
        """Send a control message, if an incarnation is given only to that one. On failure, the callbacks in `lost` run.

        The message consists of plain values; `tensors` arrive in its last field, recorded in the `context`, if any. A
        `patient` message leaves with the next message to that worker, or soon, and is handled after it. Tensors on
        accelerators go to the devices of gradients, or with `as_arguments` to those of arguments.
        """
        peer = self._connections.names.get(to)
        if peer is None or (incarnation and peer.identity.incarnation != incarnation):
            peer = self._connections.of_life(to, incarnation)
        body = pickle.dumps((type(message).__name__, *message), 5)  # the class would take longer than all its fields
        notice = Message(NOTICE, 0, LOW_PRIORITY if patient else 0)
        if tensors:
            notice.meta, notice.blobs, _ = pack(tensors, peer.places.calls if as_arguments else peer.places.gradients)
        if context is not None:
            notice.flags |= HAS_GRAPH
            body = append(body, context.sent(tensors, peer.identity, type(message), True))
        notice.body = body
        peer.notify(notice, patient)
        if patient:
            self._timer.wake_by(monotonic() + BUSY_TICK)

    def _watch(self, now: float) -> float:
        self._connections.health.look_at_itself(now)
        return self._reactor.watch(now)

    def _tick(self, now: float) -> float:
        # For batches that no leader and no waiting thread has sent so far (`BATCH_WAIT` in peer.py).
        self._reactor.send_unsent()
        pause = BUSY_TICK if self._timer.is_watching else IDLE_TICK
        return min(now + pause, self._connections.tick(now), *results(self.ticking, now))
