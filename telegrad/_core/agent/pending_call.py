"""A call to another worker: how it is encoded, and how a thread waits for it; the table of the calls to one worker.

The waiting thread reads the connection itself if it gets the right to, which saves a wake-up. Otherwise the leader
reads the answer and wakes the thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad._core import events
from telegrad._core.agent.incoming import Attachments, Layers
from telegrad._core.calls import call_context, profiling
from telegrad._core.calls.call_context import DerivedTimeout, NestedCall, seen
from telegrad._core.calls.call_names import (
    KNOWN_AS,
    NAMED,
    NEXT_ITEMS,
    NOTED_AS,
    shown_names,
    user_name,
    users_call,
)
from telegrad._core.calls.cancelling import Served, serving
from telegrad._core.calls.futures import Future, Outcome, wait_for
from telegrad._core.events import CALLED
from telegrad._core.interrupts import SLEEP, Resumed, releases_before_handler, waiting_loop
from telegrad._core.pickling.function_names import name_of, verified
from telegrad._core.pickling.pickling import blame_again, encode, encode_call
from telegrad._core.reactor.leader_threads import SOON, Spin
from telegrad._core.texts import ProgramLine, hint, users_line
from telegrad._core.transport.link import AnyLink, Link
from telegrad._core.transport.poller import Waker, waker_here
from telegrad._core.wire.messages import (
    CALL,
    CANCEL,
    FAILURE,
    HAS_CALL_CONTEXT,
    HAS_GRAPH,
    HAS_REFERENCES,
    INFERENCE,
    NO_GRAD,
    Message,
    append,
)
from telegrad._core.wire.packing import SMALL, pack
from telegrad._core.wire.tensors import Blob, DeviceMapping
from telegrad.errors import CallCancelled, CallTimeout, CannotEncode, PeerError, PeerLost

_empty = torch.empty(0, device="cpu")
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
RAISED, GAVE_UP = "raised", "gave up"  # results of a call: its function raised; its caller was interrupted
_UNWATCHED = contextlib.nullcontext()
SEARCH_PAUSE = 0.02  # seconds between two searches for expired calls: one search takes 1.6 ms for 32,768 calls


class PreparedCall(NamedTuple):
    """A function with its arguments, and an object that must live until the call is answered."""

    function: Any
    args: Any = None
    kwargs: Any = None
    keeps: Any = None
    asked: Any = None  # the function that the user called, if another is sent; see `call_names.user_name`

    @property
    def users(self) -> Any:
        """The function that the user called, or a text."""
        return self.function if self.asked is None else self.asked


class MutationCheck:
    """The tensors of one call, with their version counters at its start."""

    __slots__ = ("_counters", "_line")

    def __init__(self, tensors: Sequence[Tensor], waits: bool) -> None:
        """`waits`: the calling thread itself runs the check."""
        self._line: ProgramLine | None = None if waits else users_line()
        self._counters = [_counter_of(each) for each in tensors if _is_watched(each)]

    def check(self, asked: Any, worker: str) -> None:
        shape = next((shape for counter, before, shape in self._counters if counter._version != before), None)
        if shape is not None:
            hint(
                "changed underway",
                f"a tensor of shape {tuple(shape)} was modified while the call of {user_name(asked)} that sends it "
                f"to worker {worker!r} was in flight: the worker may receive the old values, the new ones, or a mix. "
                "Modify it once the call's future is done, or send tensor.clone()",
                self._line,
            )


def _is_watched(tensor: Tensor) -> bool:
    """Return True if the tensor is sent from its own memory and torch counts writes to it."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return plain and tensor.nbytes >= SMALL and not tensor.is_meta and not tensor.is_inference()


def _counter_of(tensor: Tensor) -> tuple[Tensor, int, torch.Size]:
    """Return a tensor that shares the version counter but not the memory, the version, and the shape."""
    counter = tensor.detach()
    counter.data = _empty if tensor.is_cpu else _empty.to(tensor.device)
    return counter, counter._version, tensor.shape


class EncodedCall:
    """A call as bytes, for all workers that get the same data."""

    __slots__ = (
        *("blobs", "body", "function", "meta", "name", "near", "references", "tensors", "underway", "weight"),
        "_buffers",
    )

    def __init__(self, call: PreparedCall, same_program: bool) -> None:
        """Pickle the arguments. Without a name that leads to the function at the receiver, pickle that as well."""
        self.function = function = call.function
        name = (verified.get(function) if type(function) in NAMED else None) or name_of(function, same_program)
        args, kwargs = call.args or (), call.kwargs or {}
        try:
            if name:
                encoded = encode_call(args, kwargs, same_program)
            else:
                encoded = encode((function, args, kwargs), same_program)
        except CannotEncode as error:
            raise blame_again(users_call(function, args, kwargs), error, same_program) from error.__cause__
        self.name = name.encode() if name else b""
        self.body, self.tensors, self.references, self._buffers = encoded
        self.meta = b""
        self.blobs: Sequence[Blob] = ()
        self.weight = 0  # bytes of the tensors
        self.underway: MutationCheck | None = None
        self.near = 0  # receivers on this host, if there are several receivers

    def pack(self, place: DeviceMapping, waits: bool) -> EncodedCall:
        """Describe the tensors for the devices of a receiver. `waits` as in `MutationCheck`."""
        self.meta, self.blobs, self.weight = pack(self.tensors, place, self._buffers)
        if self.blobs:
            self.underway = MutationCheck(self.tensors[: len(self.tensors) - self._buffers], waits)
        return self

    def message_to(self, pending: PendingCall, layers: Layers, creation: Any) -> Message:
        """Return the message of a call: append the call context, and the data of the layers above."""
        # The order of the parts is part of the protocol, since the receiver cuts them off from the end: first the
        # references, on the thread that reads, then the autograd record, when the tensors are taken, and last the call
        # context.
        body, pending.weight, pending.underway = self.body, self.weight, self.underway
        flags = 0 if torch.is_grad_enabled() else NO_GRAD | (INFERENCE if torch.is_inference_mode_enabled() else 0)
        if flags and not layers.sends_modes:
            pending.unrecorded, flags = True, 0
        if layers.tells_times or seen.call_context or profiling.follower is not None or call_context.is_autocast_on():
            said, pending.in_turn = call_context.described(*pending.time(layers.tells_times), layers.sends_modes)
            if said:
                flags |= HAS_CALL_CONTEXT
                body = append(body, said)
        to = pending.peer.identity
        context = layers.graphs.current() if layers.graphs is not None and layers.entered_id() is not None else None
        if context is not None:
            flags |= HAS_GRAPH
            body = append(body, context.sent(self.tensors, to, self.function, not flags & NO_GRAD))
        if self.references or creation is not None:  # last, since from here on nothing can fail
            assert layers.references is not None
            flags |= HAS_REFERENCES
            body = append(body, layers.references.pack(self.references, to, creation))
        return Message(CALL, 0, flags, self.name, self.meta, body, self.blobs)


class PendingCall:
    """A call to another worker.

    Many may be in flight, and the garbage collector visits each object of each. A call is therefore one object besides
    its future, and has a lock only if a thread waits for another one.
    """

    __slots__ = (
        *("abandoned", "answer", "attachments", "awaited", "begun", "deadline", "done", "done_lock", "error", "id"),
        *("in_turn", "keep_alive", "label", "link", "outcome", "parent", "peer", "reader_completes", "timeout"),
        *("underway", "unrecorded", "waker", "weight"),
    )

    def __init__(
        self, peer: Any, label: Any, timeout: float, outcome: Outcome | None = None, keep_alive: Any = None
    ) -> None:
        """`peer` is the `Peer` that is called, `label` is what the user has called, for errors.

        An asynchronous call has an `outcome`, and `keep_alive` lives as long as the call.
        """
        self.peer = peer
        self.label = label
        self.begun = perf_counter()
        self.timeout = timeout
        self.deadline = monotonic() + timeout if timeout else inf
        self.outcome = outcome
        self.keep_alive = keep_alive
        self.id = 0
        self.weight = 0  # bytes of its tensors
        self.unrecorded = False  # its result has no history, although the callee records it
        self.in_turn: NestedCall | None = None  # the actor method that makes the call
        self.underway: MutationCheck | None = None  # its tensors, if they are sent from their own memory
        self.link: AnyLink | None = None  # the link that carries it
        self.answer: Message | None = None
        self.attachments: Attachments | None = None  # data that came with the answer
        self.error: BaseException | None = None
        self.done = False
        self.awaited = False  # the thread that reads the link waits for this call
        self.reader_completes = False  # that thread has read the answer, and will complete the outcome
        self.done_lock: threading.Lock | None = None  # held until the call is done; created by a thread that waits
        self.waker: Waker | None = None  # of the thread that reads the link, if other threads may cancel the call
        self.parent: Served | None = None  # the served call that made this one
        self.abandoned = False  # it ended before its answer came

    @property
    def described(self) -> str:
        return f"{user_name(self.label)} on worker {self.peer.name!r}"

    def limit(self, timeout: float) -> None:
        self.timeout = timeout
        self.deadline = monotonic() + timeout if timeout else inf

    # Waiting

    def help(self, until: float = inf) -> None:
        """Wait until the outcome is complete; this thread reads the answer if it can.

        A Signal may still be incomplete after this, at the time `until` or at the deadline of the call.
        """
        try:
            self.wait(until=until)
        finally:
            if self.reader_completes:
                # Two threads may wait for one future. The lock lets one of them complete it.
                with self.peer.lock:
                    is_mine, self.reader_completes = self.reader_completes, False
                if is_mine:
                    self.peer.host.complete(self)
        outcome = self.outcome
        if isinstance(outcome, Future) and not outcome.done():
            with self.peer.reactor.waiting():
                wait_for(outcome)

    @waiting_loop
    def wait(self, releases_slot: bool = True, until: float = inf) -> bool:
        """Wait until the call is done, without a reactor thread's slot; return False if its deadline passed before.

        `until` is an earlier end of this wait, which leaves the call as it is.
        """
        peer = self.peer
        if releases_slot and peer.reactor.here.own is not None:
            with peer.reactor.waiting(), self.in_turn.waited_for() if self.in_turn else _UNWATCHED:
                return self.wait(releases_slot=False, until=until)
        until = min(until, self.deadline)
        # The call may be in a batch, which would leave a moment later.
        if peer.reactor.unsent:
            peer.reactor.send_unsent()
        while not self.done:
            if (remaining := until - monotonic()) <= 0:
                return False
            if isinstance(link := peer.connection.link, Link) and link.reading.take():
                held = [link]
                try:  # around the call, since a signal may come at any instruction of it
                    self._read(link, held, until)
                except Resumed:
                    pass
                finally:
                    if held:  # otherwise a signal handler has run, which released the right
                        link.stop_reading()
            else:
                self._wait_done(min(remaining, SLEEP))
        return True

    @releases_before_handler
    @waiting_loop
    def _read(self, link: Link, held: list[Link], until: float) -> None:
        """Read until the call is done or that time, with the right to read, as long as `held` has the connection."""
        connection = self.peer.connection
        # Set while this thread has the right to read: the thread that finds the answer is this one. A signal handler
        # may release the right meanwhile, and another thread then finds it. The outcome is left to this thread in both
        # cases (`help`).
        self.awaited = True
        start = perf_counter()
        # Within a nested call, the leader polls for the calls that this one causes, and two busy threads would compete.
        spins, spin = connection.is_prompt and self.peer.reactor.here.own is None, None
        try:
            # If the next frame awaits lanes, `wait` passes the right on to them, and this thread waits like any other.
            while not (self.done or link.reader.awaits_lanes) and link.closed is None:
                if link.read() or (spins and (spin := spin or Spin(start)).again()):
                    continue
                if (remaining := until - monotonic()) <= 0:
                    return
                # Let threads that may cancel the call wake this one, and then check again.
                if self.waker is None and (self.outcome is not None or self.parent is not None):
                    self.waker = waker_here()
                    if self.waker is not None:
                        continue
                link.wait_readable(min(remaining, SLEEP), self.waker)
        finally:
            self.awaited = False
            connection.is_prompt = perf_counter() - start < SOON

    def _wait_done(self, limit: float) -> None:
        """Wait until another thread has ended the call."""
        with self.peer.lock:  # ensures that only one lock is created
            if self.done_lock is None:
                self.done_lock = threading.Lock()
                self.done_lock.acquire()
            lock = self.done_lock
        # `Peer._end` sets `done` and then looks for a lock to release; this thread has stored the lock and now looks at
        # `done`. One of them sees the other.
        if self.done:
            return
        got: list[bool] = []
        try:
            got.extend(map(lock.acquire, (True,), (limit,)))  # entirely in C: no interrupt can lose the lock
        finally:
            if any(got):
                lock.release()  # for the next thread that waits

    def cancel(self, why: str = "") -> bool:
        """Cancel the call and notify the callee; return False if the call has already ended."""
        return bool(self.peer.cancel(self, why))

    def send_cancel(self) -> None:
        """Notify the callee that the call has ended, if it was sent."""
        # Store, then look. The sending thread sets `link`, writes the call, and then reads `abandoned`. If this thread
        # finds no link, the sending thread finds the mark and sends CANCEL itself. If it finds one, its CANCEL may
        # still overtake the call and be ignored; then the sending thread sends another.
        self.abandoned = True
        if self.link is not None:
            with contextlib.suppress(PeerError):  # the end of the link also notifies the callee
                self.link.send(Message(CANCEL, self.id))

    # Texts

    def time(self, caller: str) -> tuple[float, str]:
        """Return the timeout to send (0 for none) and its origin; send the call's own if `caller` is set."""
        if not self.timeout or not (caller or isinstance(self.timeout, DerivedTimeout)):
            return 0.0, ""
        own = f"the {self.timeout:g} s of the call of {user_name(self.label)} by worker {caller!r}"
        return float(self.timeout), self._whose or own

    @property
    def _whose(self) -> str:
        return self.timeout.whose if isinstance(self.timeout, DerivedTimeout) else ""

    def connection_lost_error(self, reason: PeerError) -> PeerError:
        age = perf_counter() - self.begun
        is_users = callable(self.label) and not hasattr(self.label, KNOWN_AS)  # a text is the name of a call of ours
        can_repeat = isinstance(reason, PeerLost) and is_users
        again = "; rpc_sync and rpc_async repeat a call with idempotent=True" if can_repeat else ""
        error = type(reason)(f"{reason}. This call of {user_name(self.label)} was in flight for {age:.1f} s{again}")
        error.__cause__ = reason.__cause__
        return error

    def timeout_error(self, remote_status: str) -> CallTimeout:
        shared = f", what was left of {self._whose}" if self._whose else ""
        return CallTimeout(
            f"RPC ran for more than set timeout ({self.timeout:g} s{shared}): {self.described}. "
            f"It may still be running there{remote_status}. "
            "Give a longer timeout (rpc_timeout in the options, or timeout=... per call)"
        )

    def event(self, failure: str) -> events.Event:
        if not failure and self.answer is not None and self.answer.kind == FAILURE:
            failure = RAISED
        kind = type(self.label)
        known = shown_names.get(self.label) if kind in NAMED else getattr(kind, NOTED_AS, None)
        name = known or user_name(self.label)
        if failure == CallCancelled.__name__ and name.startswith(NEXT_ITEMS):
            failure = ""
        return (CALLED, self.begun, perf_counter(), self.peer.name, self.id, name, self.weight, failure)

    def __repr__(self) -> str:
        state = "done" if self.done else f"in flight for {perf_counter() - self.begun:.1f} s"
        return f"<call {self.id} of {user_name(self.label)} on {self.peer.name!r}: {state}>"


def begin_call(pending: PendingCall, call: PreparedCall, program: str, layers: Layers, creation: Any = None) -> None:
    """Send a call. `program` is that of this worker; `creation` as in `Agent.call_for`."""
    parent, peer = serving.get(), pending.peer
    # `admit` comes first, since it may refuse the call. `hold` comes last, and cancels the call if the served call was
    # cancelled meanwhile: before `Peer.call` the call is in no table, and `Peer.cancel` would not find it.
    if parent is not None:
        parent.admit(pending)
    if pending.outcome is not None:
        pending.outcome.call = pending
    encoded = EncodedCall(call, peer.member.program == program != "")
    if encoded.tensors:
        encoded.pack(peer.places.calls, pending.outcome is None)
    peer.call(pending, encoded.message_to(pending, layers, creation))
    if parent is not None:
        parent.hold(pending)


class CallTable:
    """The calls in flight. The peer's lock guards it."""

    def __init__(self, most_calls: int, most_bytes: int) -> None:
        self.in_flight: dict[int, PendingCall] = {}
        self.begun = 0  # calls so far; the number of each is its id
        # A lower bound of the deadlines. A sorted structure would cost more for each call than a search costs for all.
        self.next_due = inf
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        self.weight = 0

    def add(self, call: PendingCall) -> bool:
        """Give a call its id and put it in flight; return True if its deadline is now the earliest."""
        self.begun += 1
        call.id = self.begun
        self.in_flight[call.id] = call
        self.weight += call.weight
        # A thread that waits for its own call, which has no outcome, checks the deadline itself.
        if call.outcome is None or call.deadline >= self.next_due:
            return False
        self.next_due = call.deadline
        return True

    def pop(self, id_: int) -> PendingCall | None:
        """Remove a call that has ended; return None if it was removed before."""
        call = self.in_flight.pop(id_, None)
        if call is not None:
            self.weight -= call.weight
        return call

    def pop_all(self, matches: Callable[[PendingCall], bool] = lambda _: True) -> list[PendingCall]:
        found = [call for call in self.in_flight.values() if matches(call)]
        for call in found:
            self.pop(call.id)
        return found

    def pop_expired(self, now: float) -> list[PendingCall]:
        """Remove and return the expired calls; set `next_due` to the time of the next search."""
        if now < self.next_due:
            return []
        expired = self.pop_all(lambda call: call.outcome is not None and call.deadline <= now)
        timed = (call.deadline for call in self.in_flight.values() if call.outcome is not None)
        self.next_due = max(min(timed, default=inf), now + SEARCH_PAUSE)
        return expired

    @property
    def is_full(self) -> bool:
        return len(self.in_flight) >= self._most_calls or self.weight >= self._most_bytes
