"""One call to many workers.

Arguments are pickled once for all workers that run this worker's main program, and once for all others. Tensor metadata
is encoded once, unless it depends on devices. Large tensors are copied once into common memory for the workers of this
host. Data that is specific to a worker is made for each: references, autograd records, the call context.

All messages are sent before any wait. Each call has its own outcome: an unreachable worker does not affect the others.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

from torch import Tensor

from telegrad._core.agent.connections import Connections
from telegrad._core.agent.peer import Peer
from telegrad._core.agent.pending_call import EncodedCall, PendingCall, PreparedCall
from telegrad._core.calls.call_names import user_name
from telegrad._core.calls.cancelling import serving
from telegrad._core.calls.futures import Outcome
from telegrad._core.interrupts import raised_by_handler
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.wire.messages import Message
from telegrad._core.wire.tensors import DeviceMapping

COMMON_FROM = 1 << 25  # smaller blobs are copied for each worker: page faults of a new mapping cost more

ENCODED, ON_HOST = "encoded", "on the host"  # keys of encodings that suit all devices of the receivers


class EachCall(NamedTuple):
    outcome: Outcome
    to: str | int | Identity
    creation: Any = None  # as in `Agent.call_for`


_Ready = tuple[EachCall, Peer, EncodedCall]


class _Encodings:
    """Encodes a call once for all workers that get the same data."""

    def __init__(self, call: PreparedCall, program: str) -> None:
        self._call = call
        self._program = program
        # What was made for workers of this program or of others, by devices of the receiver; or the error.
        self._made: dict[tuple[bool, DeviceMapping | str], Any] = {}

    def to(self, peer: Peer) -> EncodedCall:
        same, place = peer.member.program == self._program != "", peer.places.calls
        plain: tuple[EncodedCall, bool] = self._once((same, ENCODED), lambda: self._encode(same))
        encoded, is_on_host = plain
        if encoded.tensors:
            key: DeviceMapping | str = ON_HOST if is_on_host and place.keeps_host else place
            encoded = self._once((same, key), lambda: copy(plain[0]).pack(place, False))
        return encoded

    def _encode(self, same: bool) -> tuple[EncodedCall, bool]:
        encoded = EncodedCall(self._call, same)
        return encoded, all(tensor.is_cpu for tensor in encoded.tensors)

    def _once(self, key: tuple[bool, DeviceMapping | str], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            try:
                self._made[key] = make()
            except Exception as error:
                if raised_by_handler(error):
                    raise
                self._made[key] = error.with_traceback(None)  # the frames of a traceback would refer to this object
        made = self._made[key]
        if isinstance(made, Exception):
            raise made
        return made

    def failed_for_all(self, error: Exception) -> bool:
        """Return True if the error does not depend on the callee."""
        return any(error is made for (_, place), made in self._made.items() if isinstance(place, str))

    @property
    def packed(self) -> Iterator[EncodedCall]:
        return (made for (_, place), made in self._made.items() if place != ENCODED and type(made) is EncodedCall)


def call_each(
    connections: Connections, callees: Iterable[EachCall], call: PreparedCall, timeout: float, program: str
) -> None:
    """Call many workers at once. Raise errors that would affect every worker; report all others to the outcomes."""
    encodings = _Encodings(call, program)
    ready: list[_Ready] = []
    failed: list[tuple[EachCall, Exception]] = []
    for each in callees:
        try:
            peer = connections.peer(each.to)
            encoded = encodings.to(peer)
            encoded.near += peer.is_near
            ready.append((each, peer, encoded))
        except Exception as error:
            if raised_by_handler(error):
                raise
            failed.append((each, error.with_traceback(None)))
    general = next((why for _, why in failed if encodings.failed_for_all(why)), None)
    if general is not None and not ready:
        raise fresh(general)
    # Only now is it known how many receivers are on this host. A copy into common memory pays off from the second on.
    for packed in encodings.packed:
        if packed.near > 1:
            common, blobs = connections.memory.in_common, packed.blobs
            packed.blobs = [common(b) if isinstance(b, Tensor) and b.numel() >= COMMON_FROM else b for b in blobs]
    # A thread that serves a call must not block: others may wait for it.
    may_wait = connections.reactor.here.own is None
    has_room = [not (peer.is_full and may_wait) for _, peer, _ in ready]
    _send(connections, list(compress(ready, has_room)), call, timeout)
    for each, why in failed:
        _fail(each, call, why)
    # The workers with room have their calls already: a worker that is behind does not delay them.
    for one in compress(ready, map(not_, has_room)):
        one[1].wait_for_capacity()
        _send(connections, [one], call, timeout)


def _send(connections: Connections, ready: list[_Ready], call: PreparedCall, timeout: float) -> None:
    """Create all messages, then write them, then let the answers be read; otherwise the threads would alternate."""
    parent = serving.get()
    made: list[tuple[EachCall, PendingCall, Message]] = []
    for each, peer, encoded in ready:
        pending = PendingCall(peer, call.users, timeout, each.outcome, call.keeps)
        try:
            if parent is not None:
                parent.admit(pending)
            made.append((each, pending, encoded.message_to(pending, connections.layers, each.creation)))
        except Exception as error:
            _fail(each, call, error)
        else:
            each.outcome.call = pending
    for each, pending, message in made:
        try:
            pending.peer.call(pending, message)
        except Exception as error:
            _fail(each, call, error)
        else:
            if parent is not None:
                parent.hold(pending)
    for each, peer, _ in ready:
        if not each.outcome.quick:
            peer.connection.read_in_background()


def _fail(each: EachCall, call: PreparedCall, error: Exception) -> None:
    """Report an error to the outcome of a call; raise it again if a signal handler has raised it."""
    if raised_by_handler(error):
        raise error
    each.outcome.call = None
    each.outcome.about = f"{user_name(call.users)} on worker {getattr(each.to, 'name', each.to)!r}"
    each.outcome.set_exception(error.with_traceback(None))
