"""Creates and sends responses to calls, from a value or an error."""

from __future__ import annotations

import logging
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from telegrad._core.agent.incoming import Caller, Incoming
from telegrad._core.calls.attachments import Layers
from telegrad._core.calls.call_names import user_name
from telegrad._core.devices.device_streams import Streams
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.exceptions import describe, readable
from telegrad._core.pickling.pickling import encode
from telegrad._core.pickling.remote_text import already_described, first_line
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.security.handshake import Refusals
from telegrad._core.transport.link import Link
from telegrad._core.transport.loopback import LoopEnd
from telegrad._core.wire.messages import FAILURE, HAS_GRAPH, HAS_REFERENCES, NO_GRAD, RESULT, Message, append
from telegrad._core.wire.packing import pack
from telegrad._core.wire.tensors import Blob
from telegrad.errors import CallCancelled, CannotEncode, LimitReached, PeerError, ShutDown, UsageError

_NOTHING = encode(None, False)

MOST_FAILURES = 300  # failed calls of one caller that are logged in a minute
SMALL = 1 << 14  # bytes; smaller answers may wait and leave together

log = logging.getLogger("telegrad")


class Answers:
    """Sends the responses of the worker `name`."""

    def __init__(
        self,
        name: str,
        reactor: Reactor,
        layers: Layers,
        streams: Streams,
        undelivered: Callable[[Identity, PeerError], None],
    ) -> None:
        """`undelivered` is called if an answer with references finds its connection closed."""
        self.name = name
        self._reactor = reactor
        self._layers = layers
        self._streams = streams
        self._undelivered = undelivered
        self._lock = threading.Lock()  # guards _failures
        self._failures = Refusals(MOST_FAILURES)  # by caller
        self._refusal = "", b""  # text and encoding of the last refusal: many in a row are equal
        self.sent_memory: Callable[[Caller, Link | LoopEnd], None] = lambda *_: None  # called after answers with memory

    def made_of(self, call: Incoming, result: Any, function: Any) -> Message:
        """Return the response for a function's result; if the result cannot be sent, the response is an error."""
        if self._streams.used:
            self._streams.publish()  # code that learns of the end may use device results of the function
        caller, asked = call.caller, call.message
        destination = call.attachments.destination if call.attachments is not None else None
        if destination is not None:
            destination.fulfil(result)
            return Message(RESULT, asked.id, HAS_REFERENCES, body=append(_NOTHING.body, destination.receipt()))
        if call.cancelled:
            return Message(RESULT, asked.id)  # the caller ignores it
        flags = 0
        try:
            if result is None:
                encoded = _NOTHING
            elif call.context is None or type(result) is Tensor or asked.flags & NO_GRAD:
                encoded = encode(result, caller.same_program)
            else:
                with call.context.entered():  # refuses tensors that would lose their history on the way
                    encoded = encode(result, caller.same_program)
            body, tensors, references, buffers = encoded
            meta, blobs = pack(tensors, caller.place, buffers) if tensors else (b"", [])
            if call.context is not None and any(tensor.requires_grad for tensor in tensors):
                flags, what = HAS_GRAPH, getattr(function, "__name__", None) or asked.head.decode()
                body = append(body, call.context.sent(tensors, caller.identity, what, not asked.flags & NO_GRAD))
            if references:
                assert self._layers.references is not None
                if (excess := self._layers.references.excess(caller.identity)) is not None:
                    raise excess
                flags |= HAS_REFERENCES
                body = append(body, self._layers.references.pack(references, caller.identity, None))
        except BaseException as error:
            error, name = _about_result(error), call.name or user_name(function)
            self._note_failure(call, error, name)
            self._streams.publish()
            return self._failure(call, describe(error, self.name, name))
        return Message(RESULT, asked.id, flags, b"", meta, body, _handed_over(blobs) if blobs else ())

    def fail(self, call: Incoming, error: BaseException, name: str) -> None:
        """Send an error as the response; `name` is that of the function, or empty if the function was not found."""
        error = readable(error)
        if call.cancelled:
            if call.destination is None:
                self.send(call, Message(FAILURE, call.message.id))
                return
            if isinstance(error, CallCancelled | CancelledError):  # the normal end of a cancelled function
                error = CallCancelled(f"{call.described} was cancelled, so there is no value")
        name = name or bytes(call.message.head).decode().replace(":", ".")
        if not call.cancelled:
            self._note_failure(call, error, name)
        self._streams.publish()
        self.send(call, self._failure(call, describe(error, self.name, name)))

    def refuse(self, error: LimitReached, call: Incoming) -> None:
        """Respond to a call that must not run. Do not log this, since there may be many."""
        text, body = self._refusal
        if text != str(error):
            body = describe(error, self.name)
            self._refusal = str(error), body
        self.send(call, self._failure(call, body))

    def _failure(self, call: Incoming, body: bytes) -> Message:
        flags = 0
        if call.destination is not None:
            call.destination.fail(body)
            flags, body = HAS_REFERENCES, append(body, call.destination.receipt())
        return Message(FAILURE, call.message.id, flags, body=body)

    def _note_failure(self, call: Incoming, error: BaseException, name: str) -> None:
        if isinstance(error, LimitReached) or already_described(error, self.name):
            return  # refusals may be many; the other errors were raised here by an earlier call, which logged them
        if isinstance(error, ShutDown) and isinstance(call.link.closed, ShutDown):
            return  # the call failed since this worker or the caller has left
        with self._lock:
            if not self._failures.should_log(call.caller.name, monotonic()):
                return
        log.warning(
            "telegrad: worker %r: %s, called by worker %r, raised %s: %s",
            *(self.name, name or "a call", call.caller.name, type(error).__name__, first_line(error)),
        )

    def tick(self, now: float) -> float:
        """Log how many failures were left out of the log; return the time of the next check."""
        with self._lock:
            left_out = self._failures.left_out(now)
        for caller, count in left_out:
            log.warning("telegrad: %d more calls of %s failed in the last minute", count, caller)
        return inf

    def send(self, call: Incoming, answer: Message) -> None:
        """Send the response and end the call. A cancelled call gets a response only if that carries references."""
        if not call.cancelled or answer.flags & HAS_REFERENCES:
            link, queue = call.link, call.caller.queue
            later = False  # stays False if there is nothing to send it with, or no gain
            if queue.works and len(answer.body) < SMALL:
                later = self._reactor.batches()
            try:
                if not link.send(answer, later):  # otherwise nothing waits
                    self._look_at_outbox(call, answer, later)
            except PeerError as error:  # the caller has gone
                if answer.flags & HAS_REFERENCES:
                    self._undelivered(call.caller.identity, error)
            except Exception as error:
                link.fail(error)
                raise
        del call.caller.calls[answer.id]

    def _look_at_outbox(self, call: Incoming, answer: Message, later: bool) -> None:
        """Schedule the rest of an incompletely sent message, and limit the amount of unsent data."""
        link, queue = call.link, call.caller.queue
        if later and isinstance(link, Link):
            self._reactor.sent_later(link)
        if answer.blobs:
            self.sent_memory(call.caller, link)
        if link.is_congested:  # the caller does not read: no further call of it begins until it does
            self._reactor.hold_up(queue, True)
            link.when_drained(partial(self._reactor.hold_up, queue, False))


def _handed_over(blobs: list[Blob]) -> Iterator[Blob]:
    """Yield the blobs one by one and drop each reference: a copied blob frees its lent block immediately."""
    blobs.reverse()
    while blobs:
        yield blobs.pop()


def its_future(function: Any, result: Any) -> Any:
    """Return the future that an async_execution function returned, or an error if it returned something else."""
    if isinstance(result, torch._C.Future):
        return result
    name = getattr(function, "__qualname__", repr(function))
    if isinstance(getattr(function, "__wrapped__", None), torch.jit.ScriptFunction):
        kind = type(result).__name__
        return UsageError(f"{name}: Async functions must return an IValue of Future type, but got {kind}")
    return UsageError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
        f"{name} returned {type(result).__name__}"
    )


def _about_result(error: BaseException) -> BaseException:
    """Return the error of a result. Inlined, it would need a second variable, which makes a reference cycle."""
    if isinstance(error, CannotEncode):
        said = CannotEncode(f"the function returned, but its result cannot be sent: {error}")
        said.__cause__ = error.__cause__
        return said
    return error
