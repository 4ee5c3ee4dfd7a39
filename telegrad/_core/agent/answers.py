"""Answers to calls that have come: made of a value or an error, and sent."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from functools import partial
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
from telegrad._core.pickling.remote_text import first_line, told_before
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.transport.link import Link
from telegrad._core.transport.loopback import LoopEnd
from telegrad._core.wire.messages import FAILURE, HAS_GRAPH, HAS_REFERENCES, NO_GRAD, RESULT, Message, append
from telegrad._core.wire.packing import pack
from telegrad._core.wire.tensors import Blob
from telegrad.errors import CallCancelled, CannotEncode, LimitReached, PeerError, ShutDown, UsageError

_NOTHING = encode(None, False)

SMALL = 1 << 14  # bytes of an answer that may wait for others to leave with it

log = logging.getLogger("telegrad")


class Answers:
    """What the worker `name` answers."""

    def __init__(
        self,
        name: str,
        reactor: Reactor,
        layers: Layers,
        streams: Streams,
        undelivered: Callable[[Identity, PeerError], None],
    ) -> None:
        """`undelivered` is told where an answer that carries something finds no connection any more."""
        self.name = name
        self._reactor = reactor
        self._layers = layers
        self._streams = streams
        self._undelivered = undelivered
        self._refusal = "", b""  # the text of the last refusal, and its description: many in a row are the same
        self.sent_memory: Callable[[Caller, Link | LoopEnd], None] = lambda *_: None  # called after each such answer

    def made_of(self, call: Incoming, result: Any, function: Any) -> Message:
        """The answer of a function that has returned; where its value cannot be sent, an error."""
        if self._streams.used:
            self._streams.publish()  # whoever hears of the end may go on with what the function has left here
        caller, asked = call.caller, call.message
        destination = call.attachments.destination if call.attachments is not None else None
        if destination is not None:
            destination.fulfil(result)
            return Message(RESULT, asked.id, HAS_REFERENCES, body=append(_NOTHING.body, destination.receipt()))
        if call.cancelled:
            return Message(RESULT, asked.id)  # nobody takes it
        flags = 0
        try:
            if result is None:
                encoded = _NOTHING
            elif call.context is None or type(result) is Tensor or asked.flags & NO_GRAD:
                encoded = encode(result, caller.same_program)
            else:
                with call.context.entered():  # where tensors that lose their history on the way are refused
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
        """Answer with an error; `name` is that of the function, or empty where it was not even found."""
        error = readable(error)
        if call.cancelled:
            if call.destination is None:
                self.send(call, Message(FAILURE, call.message.id))
                return
            error = CallCancelled(f"{call.described} was cancelled, so there is no value") if _is_end(error) else error
        name = name or bytes(call.message.head).decode().replace(":", ".")
        if not call.cancelled:
            self._note_failure(call, error, name)
        self._streams.publish()
        self.send(call, self._failure(call, describe(error, self.name, name)))

    def refuse(self, error: LimitReached, call: Incoming) -> None:
        """Answer a call that shall not run; without a line in the log, since there may be many."""
        text, body = self._refusal
        if text != str(error):
            body = describe(error, self.name)
            self._refusal = str(error), body
        self.send(call, self._failure(call, body))

    def _failure(self, call: Incoming, body: bytes) -> Message:
        """Return the answer of a call that has failed; `body` describes the error."""
        flags = 0
        if call.destination is not None:
            call.destination.fail(body)
            flags, body = HAS_REFERENCES, append(body, call.destination.receipt())
        return Message(FAILURE, call.message.id, flags, body=body)

    def _note_failure(self, call: Incoming, error: BaseException, name: str) -> None:
        if isinstance(error, LimitReached) or told_before(error, self.name):
            return  # there may be many, as in `refuse`; or it was raised here by an earlier call, which has noted it
        if isinstance(error, ShutDown) and isinstance(call.link.closed, ShutDown):
            return  # the call has failed since this worker, or the caller, has left
        log.warning(
            "telegrad: worker %r: %s, called by worker %r, raised %s: %s",
            *(self.name, name or "a call", call.caller.name, type(error).__name__, first_line(error)),
        )

    def send(self, call: Incoming, answer: Message) -> None:
        """End a call. If it is cancelled, its answer is sent only for what that carries."""
        if not call.cancelled or answer.flags & HAS_REFERENCES:
            link, queue = call.link, call.caller.queue
            later = False  # as long as there is nothing to send it with, or nothing is gained by that
            if queue.works and len(answer.body) < SMALL:
                later = self._reactor.batches()
            try:
                if not link.send(answer, later):  # else nothing waits
                    self._look_at_outbox(call, answer, later)
            except PeerError as error:  # the caller has gone: nobody waits for the answer
                if answer.flags & HAS_REFERENCES:
                    self._undelivered(call.caller.identity, error)
            except Exception as error:
                link.fail(error)
                raise
        del call.caller.calls[answer.id]

    def _look_at_outbox(self, call: Incoming, answer: Message, later: bool) -> None:
        """After a message was not sent as a whole: see that the rest leaves, and that not too much waits."""
        link, queue = call.link, call.caller.queue
        if later and isinstance(link, Link):
            self._reactor.sent_later(link)
        if answer.blobs:
            self.sent_memory(call.caller, link)
        if link.is_congested:  # the caller does not read: no further call of it begins until it does
            self._reactor.hold_up(queue, True)
            link.when_drained(partial(self._reactor.hold_up, queue, False))


def _handed_over(blobs: list[Blob]) -> Iterator[Blob]:
    """One by one, and held here no longer: what lies in a lent block frees it as soon as it is copied."""
    blobs.reverse()
    while blobs:
        yield blobs.pop()


def its_future(function: Any, result: Any) -> Any:
    """The future that a function marked with async_execution returned, or the error that it is none."""
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


def _is_end(error: BaseException) -> bool:
    """Whether an error is what a cancelled function ends with."""
    return isinstance(error, CallCancelled | CancelledError)


def _about_result(error: BaseException) -> BaseException:
    if isinstance(error, CannotEncode):
        said = CannotEncode(f"the function returned, but its result cannot be sent: {error}")
        said.__cause__ = error.__cause__
        return said
    return error
