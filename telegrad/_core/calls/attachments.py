"""Data that higher layers append to the bodies of requests and responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from telegrad._core.membership.members import Identity
from telegrad._core.memory.device_streams import wait_for_arrivals
from telegrad._core.wire.messages import HAS_GRAPH, HAS_REFERENCES, Message, Unreceived, split
from telegrad._core.wire.packing import unpack
from telegrad.errors import LimitReached, PeerError


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


class GraphContext(Protocol):
    """The autograd context in which calls run and tensors are sent."""

    def sent(self, tensors: Sequence[Tensor], to: Identity, what: Any, graph: bool) -> bytes:
        """Record tensors that are about to be sent, and return data for the frame. Without `graph`, record nothing."""

    def entered(self) -> AbstractContextManager[None]:
        """Return a context manager: code inside its block belongs to this context."""


class GraphLayer(Protocol):
    """Interface of the autograd layer, which follows tensors from worker to worker."""

    def current(self) -> GraphContext | None:
        """Return the context in which this thread's code runs."""

    def received(self, data: bytes, tensors: list[Tensor], sender: Identity) -> tuple[GraphContext, Sequence[Tensor]]:
        """Return the context of received tensors, which may have ended, and the tensors that replace them."""

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
