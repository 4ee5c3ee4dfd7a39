"""Encodes calls and control messages, and makes one call to many workers.

Arguments are pickled once for all workers that run this worker's main program, and once for all others. Tensor metadata
is encoded once, unless it depends on devices. Large tensors are copied once into common memory for the workers of this
host. Data that is specific to a worker is made for each: references, autograd records, the call context.

All messages are sent before any wait. Each call has its own outcome: an unreachable worker does not affect the others.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad._core.agent.connections import Connections
from telegrad._core.agent.peer import Peer
from telegrad._core.agent.pending_call import MutationCheck, PendingCall
from telegrad._core.calls import call_context
from telegrad._core.calls.attachments import GraphContext, Layers
from telegrad._core.calls.call_names import OWN_ARGUMENTS, user_name
from telegrad._core.calls.cancelling import serving
from telegrad._core.calls.futures import Outcome
from telegrad._core.interrupts import raised_by_handler
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.pickling.function_names import name_of
from telegrad._core.pickling.pickling import Encoded, blame_again, encode
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.wire.messages import (
    CALL,
    HAS_CALL_CONTEXT,
    HAS_GRAPH,
    HAS_REFERENCES,
    INFERENCE,
    LOW_PRIORITY,
    NO_GRAD,
    NOTICE,
    Message,
    append,
)
from telegrad._core.wire.packing import pack
from telegrad._core.wire.tensors import Blob
from telegrad.errors import CannotEncode


def encoded(function: Any, args: Any, kwargs: Any, same_program: bool) -> tuple[bytes, Encoded]:
    """Return a function's name, or an empty name if the function itself must be pickled; and the encoded arguments."""
    name = name_of(function, same_program)
    args, kwargs = args or (), kwargs or {}
    try:
        if name:
            return name.encode(), encode((args, kwargs), same_program)
        return b"", encode((function, args, kwargs), same_program)
    except CannotEncode as error:
        own = getattr(function, OWN_ARGUMENTS, 0)
        raise (blame_again((args[own:], kwargs), error, same_program) if own else error) from error.__cause__


def attach(
    layers: Layers,
    message: Message,
    body: bytes,
    pending: PendingCall,
    function: Any,
    tensors: Sequence[Tensor],
    references: Sequence[Any],
    creation: Any,
) -> None:
    """Set a message's body, and append the call context and the data of the layers above."""
    flags = 0 if torch.is_grad_enabled() else NO_GRAD | (INFERENCE if torch.is_inference_mode_enabled() else 0)
    if layers.tells_times or call_context.matters():
        said, pending.in_turn = call_context.described(*pending.time(layers.tells_times))
        if said:
            flags |= HAS_CALL_CONTEXT
            body = append(body, said)
    context = layers.graphs.current() if layers.graphs is not None else None
    if context is not None:
        flags |= HAS_GRAPH
        body = append(body, context.sent(tensors, pending.peer.identity, function, not flags & NO_GRAD))
    if references or creation is not None:  # last, since from here on nothing can fail
        assert layers.references is not None
        flags |= HAS_REFERENCES
        body = append(body, layers.references.pack(references, pending.peer.identity, creation))
    message.flags, message.body = flags, body


def notice_to(
    peer: Peer,
    message: tuple[Any, ...],
    tensors: Sequence[Tensor],
    context: GraphContext | None,
    patient: bool,
    as_arguments: bool,
) -> Message:
    """Return the message for a worker: see `Agent.notify`."""
    body = pickle.dumps((type(message).__name__, *message), 5)  # to pickle the class takes longer than all its fields
    notice = Message(NOTICE, 0, LOW_PRIORITY if patient else 0)
    if tensors:
        notice.meta, notice.blobs = pack(tensors, peer.places.calls if as_arguments else peer.places.gradients)
    if context is not None:
        notice.flags |= HAS_GRAPH
        body = append(body, context.sent(tensors, peer.identity, type(message), True))
    notice.body = body
    return notice


COMMON_FROM = 1 << 25  # smaller blobs are copied for each worker: page faults of a new mapping cost more


class EachCall(NamedTuple):
    outcome: Outcome
    to: str | int | Identity
    keeps: Any = None  # stays alive until the call is done
    creation: Any = None  # as in `Agent.call_for`


@dataclass(slots=True)
class _Packed:
    meta: bytes = b""
    blobs: Sequence[Blob] = ()
    weight: int = 0
    underway: MutationCheck | None = None
    near: int = 0  # receivers on this host


class _Said(NamedTuple):
    """The encoded call for some of the workers."""

    name: bytes
    encoded: Encoded
    packed: _Packed


_Ready = tuple[EachCall, Peer, _Said]


class _Wording:
    """Encodes a call, once for all workers that get the same data."""

    def __init__(self, function: Any, args: Any, kwargs: Any, program: str) -> None:
        self._call = function, args, kwargs
        self._program = program
        self._made: dict[Any, Any] = {}  # encoded data, or the error of encoding it
        self.encodings = 0
        self.packed: list[_Packed] = []
        self._plain: dict[str, _Said] = {}  # by program: data that does not depend on the receiver's devices

    def to(self, peer: Peer) -> _Said:
        said = self._plain.get(peer.member.program)
        if said is not None and (not said.packed.meta or peer.places.calls.keeps_host):
            return said
        same, place = peer.member.program == self._program != "", peer.places.calls
        name, arguments = self._once(same, self._encode)
        tensors = arguments.tensors
        if tensors and not (place.keeps_host and all(tensor.is_cpu for tensor in tensors)):
            return _Said(name, arguments, self._once((same, place), self._pack, arguments, place))
        packed = self._once((same, None), self._pack, arguments, place) if tensors else _Packed()
        said = self._plain[peer.member.program] = _Said(name, arguments, packed)
        return said

    def failed_for_all(self, error: Exception) -> bool:
        """Return True if the error does not depend on the callee."""
        return any(error is made for key, made in self._made.items() if isinstance(key, bool) or key[1] is None)

    def _once(self, key: Any, make: Callable[..., Any], *args: Any) -> Any:
        if key not in self._made:
            try:
                self._made[key] = make(key, *args)
            except Exception as error:
                if raised_by_handler(error):
                    raise
                self._made[key] = error.with_traceback(None)  # the frames of a traceback would refer to this object
        made = self._made[key]
        if isinstance(made, Exception):
            raise made
        return made

    def _encode(self, same: bool) -> tuple[bytes, Encoded]:
        self.encodings += 1
        return encoded(*self._call, same)

    def _pack(self, _: Any, arguments: Encoded, place: Any) -> _Packed:
        tensors, buffers = arguments.tensors, arguments.buffers
        meta, blobs = pack(tensors, place, buffers)
        underway = MutationCheck(tensors[: len(tensors) - buffers], False) if blobs else None
        packed = _Packed(meta, blobs, sum(blob.nbytes for blob in blobs), underway)
        self.packed.append(packed)
        return packed


class Fanout:
    """Makes calls of one worker to many at once."""

    def __init__(self, connections: Connections, reactor: Reactor, layers: Layers) -> None:
        self._connections = connections
        self._reactor = reactor
        self._layers = layers
        self.encodings = 0  # how often arguments were pickled; approximate, since threads may miscount it

    def call(
        self, calls: Iterable[EachCall], function: Any, args: Any, kwargs: Any, timeout: float, asked: Any, program: str
    ) -> None:
        """Call the workers. Raise errors that would affect every worker; report all others to the outcomes."""
        wording = _Wording(function, args, kwargs, program)
        asked = function if asked is None else asked
        ready: list[_Ready] = []
        failed: list[tuple[EachCall, Exception]] = []
        for each in calls:
            try:
                peer = self._connections.peer(each.to)
                said = wording.to(peer)
                said.packed.near += peer.is_near
                ready.append((each, peer, said))
            except Exception as error:
                if raised_by_handler(error):
                    raise
                failed.append((each, error.with_traceback(None)))
        self.encodings += wording.encodings
        general = next((why for _, why in failed if wording.failed_for_all(why)), None)
        if general is not None and not ready:
            raise fresh(general)
        for packed in wording.packed:
            if packed.near > 1:
                packed.blobs = list(map(self._in_common, packed.blobs))
        may_wait = not self._reactor.on_worker()  # a thread that serves a call must not block: others may wait for it
        has_room = [not (peer.is_full and may_wait) for _, peer, _ in ready]
        self._send(list(compress(ready, has_room)), function, timeout, asked)
        for each, why in failed:
            _tell(each, asked, why)
        for one in compress(ready, map(not_, has_room)):
            one[1].wait_for_capacity()
            self._send([one], function, timeout, asked)

    def _in_common(self, blob: Blob) -> Blob:
        if not isinstance(blob, Tensor) or blob.numel() < COMMON_FROM:
            return blob
        return self._connections.memory.in_common(blob)

    def _send(self, ready: list[_Ready], function: Any, timeout: float, asked: Any) -> None:
        """Create all messages, then write them, then let the answers be read; otherwise the threads would alternate."""
        made = [self._made(*one, function, timeout, asked) for one in ready]
        parent = serving.get()
        for each, peer, pending, message in filter(None, made):
            try:
                peer.call(pending, message)
            except Exception as error:
                if raised_by_handler(error):
                    raise
                _tell(each, asked, error)
            else:
                if parent is not None:
                    parent.hold(pending)
        for each, peer, _ in ready:
            if not each.outcome.quick:
                peer.connection.read_in_background()

    def _made(
        self, each: EachCall, peer: Peer, said: _Said, function: Any, timeout: float, asked: Any
    ) -> tuple[EachCall, Peer, PendingCall, Message] | None:
        """Return a call that is ready to be sent, or None after a failure."""
        name, (body, tensors, references, _), packed = said
        pending = PendingCall(peer, asked, timeout, each.outcome, each.keeps)
        pending.underway = packed.underway
        pending.weight = packed.weight
        message = Message(CALL, 0, 0, name, packed.meta, b"", packed.blobs)
        try:
            if (parent := serving.get()) is not None:
                parent.admit(pending)
            attach(self._layers, message, body, pending, function, tensors, references, each.creation)
        except Exception as error:
            if raised_by_handler(error):
                raise
            _tell(each, asked, error)
            return None
        each.outcome.call = pending
        return each, peer, pending, message


def _tell(each: EachCall, asked: Any, error: Exception) -> None:
    each.outcome.call = None
    each.outcome.about = f"{user_name(asked)} on worker {getattr(each.to, 'name', each.to)!r}"
    each.outcome.set_exception(error.with_traceback(None))
