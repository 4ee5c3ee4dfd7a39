"""Incoming calls, their callers and answers; the handlers of control messages; what the layers above add to messages.

Calls of actors are ordered: the calls of one caller are opened one after the other, in the order of arrival. Opening
unpickles the arguments and can take long. A thread that may run user code does it, not the reader thread. The reader
adds the call to `Caller.ordered`, and submits a work that opens the first call there.
"""

import logging
import threading
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from telegrad._core.calls.call_context import CallContext, GraphContext, GraphLayer, Hops, hops_of, setting
from telegrad._core.calls.call_names import user_name
from telegrad._core.calls.cancelling import Served, finishes
from telegrad._core.membership.members import Identity
from telegrad._core.memory.device_streams import Streams, wait_for_arrivals
from telegrad._core.pickling.exceptions import describe, readable
from telegrad._core.pickling.pickling import encode
from telegrad._core.pickling.remote_text import first_line
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.reactor.scheduler import WorkQueue
from telegrad._core.transport.connect import LoopEnd
from telegrad._core.transport.link import Link
from telegrad._core.wire.messages import (
    FAILURE,
    HAS_CALL_CONTEXT,
    HAS_GRAPH,
    HAS_REFERENCES,
    NO_GRAD,
    RESULT,
    Message,
    Unreceived,
    append,
    split,
)
from telegrad._core.wire.packing import pack, unpack
from telegrad._core.wire.tensors import Blob, for_answers
from telegrad.errors import CallCancelled, CannotEncode, LimitReached, PeerError, ShutDown, UsageError

_NOTHING = encode(None, False)
SMALL = 1 << 14  # bytes; smaller answers may wait and leave together
MOST_UNKNOWN = 20  # classes of messages that the log names

log = logging.getLogger("telegrad")

Opened = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # function and arguments of a call


class Destination(Protocol):
    """Stores the result of a call whose value stays on the callee."""

    def fulfil(self, value: Any) -> None: ...

    def fail(self, failure: bytes) -> None:
        """Store an exception instead of a value, in the format of `pickling.exceptions.describe`."""

    def receipt(self) -> bytes:
        """Return the data that the response carries."""


class Attachments(NamedTuple):
    """Data that came with a message."""

    references: list[Any]  # for the slots of the message's body
    destination: Destination | None
    refusal: LimitReached | None = None  # reason why the call must not run


class ReferenceLayer(Protocol):
    """Interface of the reference layer. Data from one connection is received in the order of sending."""

    def pack(self, references: Sequence[Any], to: Identity, creation: Any) -> bytes:
        """Serialise references that are about to be sent; `creation` is set for a call that creates a reference."""

    def receive(self, data: bytes, sender: Identity) -> Attachments: ...

    def excess(self, holder: Identity) -> LimitReached | None:
        """Return an error if the worker keeps too many values for `holder`."""

    def close(self, reason: PeerError) -> None:
        """Release resources when the worker leaves the group."""


class Layers:
    """The optional layers that append data to messages."""

    def __init__(self) -> None:
        self.references: ReferenceLayer | None = None
        self.graphs: GraphLayer | None = None
        self.entered_id: Callable[[], int | None] = lambda: None  # of the context in which this thread's code runs
        self.tells_times = ""  # this worker's name if its calls send their deadlines, else empty
        self.sends_modes = True  # see `Settings`
        # Ask a callee what it is doing for a call, given by its id. Return the end of a sentence, or "".
        self.last_word: Callable[[Identity, int], str] = lambda callee, number: ""

    def take_tensors(
        self, message: Message, sender: Identity, receiver: str
    ) -> tuple[GraphContext | None, Sequence[Tensor]]:
        """Remove the autograd data from a message's body, and return the context and the tensors."""
        tensors: list[Tensor] = []
        if message.meta:
            for blob in message.blobs:
                if type(blob) is Unreceived:
                    raise blob.error(receiver, sender.name)
            tensors = unpack(message.meta, wait_for_arrivals(message.blobs) if message.blobs else ())
        if not message.flags & HAS_GRAPH:
            return None, tensors
        assert self.graphs is not None
        message.flags &= ~HAS_GRAPH
        message.body, data = split(message.body)
        return self.graphs.received(bytes(data), tensors, sender)

    def take_attachments(self, message: Message, sender: Identity) -> Attachments:
        """Remove the reference data from a message's body, and return what it contains."""
        assert self.references is not None
        message.flags &= ~HAS_REFERENCES
        message.body, data = split(message.body)
        return self.references.receive(bytes(data), sender)


class Caller:
    """The worker at the other end of an accepted connection."""

    __slots__ = (
        *("calls", "cancelled", "control", "identity", "name", "opening", "ordered", "place", "queue", "read"),
        *("same_program", "slow"),
    )

    def __init__(self, identity: Identity, same_program: bool, map_: Iterable[tuple[str, str]]) -> None:
        """`map_` maps devices of the caller to those of this worker."""
        self.identity = identity
        self.name = identity.name
        self.same_program = same_program
        self.place = for_answers(identity.name, dict(map_))
        self.ordered: deque[Incoming] = deque()  # to be opened by the thread that holds `opening`
        self.opening = threading.Lock()
        self.queue: WorkQueue = WorkQueue()  # for its calls
        self.control: WorkQueue = WorkQueue(has_slots=False)  # for its control messages
        self.read = 0  # bytes sent to it when it was last seen to have read everything
        self.slow = 0  # twice the waiting calls when they were found to be slow; AHEAD more may wait (`BackPressure`)
        self.cancelled = 0  # cancelled calls since the queue was last searched for them
        # Unanswered calls by their ids; no lock: each use is one operation of a dict.
        self.calls: dict[int, Incoming] = {}


class Incoming(Served):
    """A received message, usually a call."""

    __slots__ = (
        *("args", "attachments", "begun", "caller", "came", "context", "function", "kwargs", "link", "message", "name"),
        *("on_end", "call_context"),
    )

    came: float  # time of arrival, set if the message has flags
    # Fields of an ordered call after it was opened:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call_context: CallContext | None  # in which it runs
    on_end: Callable[[], None] | None  # called once, after the answer was sent

    def __init__(self, caller: Caller, link: Link | LoopEnd, message: Message) -> None:
        self.caller = caller
        self.link = link
        self.message = message
        self.begun = 0.0  # when it began to run
        self.name = ""  # function name for events; set after opening if there are listeners
        self.attachments: Attachments | None = None  # data that came with it
        self.context: GraphContext | None = None  # autograd context; known after its tensors were taken
        self.cancelled = False
        self.nested = None
        self.stop = None

    @property
    def destination(self) -> Destination | None:
        return self.attachments.destination if self.attachments is not None else None

    @property
    def callers_context(self) -> bytes | memoryview:
        return split(self.message.body)[1] if self.message.flags & HAS_CALL_CONTEXT else b""

    def setting(self) -> AbstractContextManager[None]:
        """Return a context manager that applies the caller's grad mode, autograd context and call context."""
        flags = self.message.flags
        if not flags and self.context is not None:  # the usual case
            return self.context.entered()
        return setting(flags, self.callers_context, self.context, self.came if flags & HAS_CALL_CONTEXT else 0.0)

    def opened(self, opened: Opened) -> None:
        self.function, self.args, self.kwargs = opened
        self.call_context = self.on_end = None

    def take(self) -> Opened:
        opened = self.function, self.args, self.kwargs
        del self.function, self.args, self.kwargs
        if self.cancelled:
            self.check_begins(finishes(*opened[:2]))
        return opened

    def take_end(self) -> Callable[[], None] | None:
        on_end, self.on_end = self.on_end, None
        return on_end

    @property
    def hops(self) -> Hops:
        context = self.callers_context
        return hops_of(context) if context else ()

    @property
    def described(self) -> str:
        name = self.name or self.message.head.decode().replace(":", ".") or "a function"
        return f"the call of {name} by worker {self.caller.name!r}"


class CallScheduler(Protocol):
    """The layer above that decides when ordered calls run."""

    def heeds(self, name: bytes) -> bool:
        """Return True if calls of a function are ordered."""

    def admit(self, call: Incoming) -> bool:
        """Return True if a call may run at once; otherwise call `Server.perform` or `refuse` for it later. Raise
        UsageError if it must not run at all."""


class Handlers:
    """The handlers of one worker, added before the first message can arrive."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Callable[..., Any], Callable[[Identity, Any], None]]] = {}  # by class
        self._unknown: set[str] = set()  # classes of messages that were dropped

    def add(self, message: type, handler: Callable[[Identity, Any], None]) -> None:
        if message.__name__ in self._of:
            raise UsageError(
                f"{message.__module__}.{message.__name__} has the same name as another class of control messages of "
                "this worker, and messages are identified by class name: rename it"
            )
        self._of[message.__name__] = message, handler

    def take(self, sender: Identity, message: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        kind, *fields = message
        if tensors:
            fields[-1] = tensors
        if kind not in self._of:
            if kind not in self._unknown and len(self._unknown) < MOST_UNKNOWN:
                self._unknown.add(kind)
                log.warning(
                    "telegrad: worker %r sends messages %.60r, which are dropped: no extension handles them here. "
                    "Import the extension here, too, before init_rpc",
                    sender.name,
                    kind,
                )
            return
        make, handler = self._of[kind]
        handler(sender, make(*fields))


class Refused(Exception):
    """Raised by a function of this package instead of running: the caller gets the reason, without a traceback.

    The reason, a LimitReached, is the only argument. Describing an error takes half a millisecond of the interpreter,
    and a caller above a limit may send thousands of calls.
    """


class Answers:
    """Sends the responses of a worker."""

    level = logging.DEBUG  # of errors that callers get; the drop-in mode warns of them, as torch's workers do

    def __init__(
        self, reactor: Reactor, layers: Layers, streams: Streams, undelivered: Callable[[Identity, PeerError], None]
    ) -> None:
        """`undelivered` is called if an answer with references finds its connection closed."""
        self.name = ""  # of the worker
        self._reactor = reactor
        self._layers = layers
        self._streams = streams
        self._undelivered = undelivered
        self._refusal = "", b""  # text and encoding of the last refusal: many in a row are equal
        self.sent_memory: Callable[[Caller, Link | LoopEnd], None] = lambda *_: None  # called after answers with memory

    def made_of(self, call: Incoming, result: Any, function: Any) -> Message:
        """Return the response for a function's result; if the result cannot be sent, the response is an error."""
        if self._streams.used:
            self._streams.publish()  # code that learns of the end may use device results of the function
        caller, asked = call.caller, call.message
        destination = call.attachments.destination if call.attachments is not None else None
        # The value stays here. It is stored also if the caller has cancelled the call: other workers may hold
        # references to it.
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
            meta, blobs, _ = pack(tensors, caller.place, buffers) if tensors else (b"", [], 0)
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
            return self._answer_of(call, _about_result(error), call.name or user_name(function))
        return Message(RESULT, asked.id, flags, b"", meta, body, _handed_over(blobs) if blobs else ())

    def fail(self, call: Incoming, error: BaseException, name: str) -> None:
        """Send an error as the response; `name` is that of the function, or empty if the function was not found."""
        error = readable(error)
        if call.cancelled:
            if call.destination is None:
                self.send(call, Message(FAILURE, call.message.id))
                return
            if isinstance(error, CallCancelled | CancelledError):  # the normal end of a cancelled function
                error = CallCancelled(
                    f"{call.described} was cancelled by its caller, or timed out, so there is no value"
                )
        self.send(call, self._answer_of(call, error, name or bytes(call.message.head).decode().replace(":", ".")))

    def refuse(self, error: LimitReached, call: Incoming) -> None:
        """Respond to a call that must not run. Do not log this, since there may be many."""
        text, body = self._refusal
        if text != str(error):
            body = describe(error, self.name)
            self._refusal = str(error), body
        self.send(call, self._failure(call, body))

    def give_up(self, call: Incoming, fault: BaseException) -> None:
        """End a call whose error could not be sent: with the `fault` that prevented this, or else its connection."""
        try:
            self.send(call, self._failure(call, describe(fault, self.name, same_program=call.caller.same_program)))
        except BaseException as error:
            call.caller.calls.pop(call.message.id, None)
            call.link.fail(error)
            raise

    def _failure(self, call: Incoming, body: bytes) -> Message:
        flags = 0
        if call.destination is not None:
            call.destination.fail(body)
            flags, body = HAS_REFERENCES, append(body, call.destination.receipt())
        return Message(FAILURE, call.message.id, flags, body=body)

    def _answer_of(self, call: Incoming, error: BaseException, name: str) -> Message:
        """Log the error of a function, as a warning if the connection with the caller is lost; return the response."""
        gone = call.link.closed
        is_lost = gone is not None and not isinstance(gone, ShutDown)
        level = logging.WARNING if is_lost else self.level
        if log.isEnabledFor(level) and not call.cancelled:
            log.log(
                level,
                "telegrad: worker %r: %s, called by worker %r, %sraised %s: %s",
                *(self.name, name or "a call", call.caller.name),
                *("whose connection is lost, " if is_lost else "", type(error).__name__),
                first_line(error),
            )
        self._streams.publish()
        return self._failure(call, describe(error, self.name, name, call.caller.same_program))

    def send(self, call: Incoming, answer: Message) -> None:
        """Send the response and end the call. A cancelled call gets a response only if that carries references."""
        if not call.cancelled or answer.flags & HAS_REFERENCES:
            link, queue = call.link, call.caller.queue
            later = False  # stays False if there is nothing to send it with, or no gain
            # An answer is batched only if more calls of the same caller wait here, whose answers leave with it. If the
            # caller waits for this answer alone, it must not wait for calls of others.
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
        # After the answer was sent: until then a CANCEL finds the call, and the limits count it. If the answer cannot
        # be sent, the call must still be there, so that `fail` or `give_up` can end it.
        del call.caller.calls[answer.id]

    def _look_at_outbox(self, call: Incoming, answer: Message, later: bool) -> None:
        """Schedule the rest of an incompletely sent message, and limit the amount of unsent data."""
        link, queue = call.link, call.caller.queue
        if later and isinstance(link, Link):
            self._reactor.sent_later(link)
        if answer.blobs:
            self.sent_memory(call.caller, link)
        # The caller does not read: no further call of it begins until it does. Hold up first: `when_drained` acts at
        # once if the outbox was drained meanwhile, and a release before the hold-up would leave the queue held up
        # forever.
        if link.is_congested:
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
