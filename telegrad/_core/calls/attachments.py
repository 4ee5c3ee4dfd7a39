"""What the layers above send along with calls and answers, behind their bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from telegrad._core.devices.device_streams import settle
from telegrad._core.membership.members import Identity
from telegrad._core.wire.messages import HAS_GRAPH, HAS_REFERENCES, Message, Unreceived, split
from telegrad._core.wire.unpacking import unpack
from telegrad.errors import LimitReached, PeerError


class Destination(Protocol):
    """Where the value of a call goes that stays on the callee."""

    def fulfil(self, value: Any) -> None: ...

    def fail(self, failure: bytes) -> None:
        """There is an exception in its place, as `wire.failures` describes it."""

    def receipt(self) -> bytes:
        """What the answer carries."""


class Attachments(NamedTuple):
    """What came along with a message."""

    references: list[Any]  # for the slots of its body
    destination: Destination | None
    refusal: LimitReached | None = None  # why the call must not run


class ReferenceLayer(Protocol):
    """That of references, which uses messages so. What one connection brings is received in the order of sending."""

    def pack(self, references: Sequence[Any], to: Identity, creation: Any) -> bytes:
        """References are about to leave, and perhaps a call that creates one."""

    def receive(self, data: bytes, sender: Identity) -> Attachments: ...

    def excess(self, holder: Identity) -> LimitReached | None:
        """Why no further value is kept for a worker, if so."""

    def close(self) -> None:
        """The worker leaves."""


class GraphContext(Protocol):
    """In which calls run and tensors cross."""

    def sent(self, tensors: Sequence[Tensor], to: Identity, what: Any, graph: bool) -> bytes:
        """Tensors are about to leave; what the frame shall say of that. Without `graph` nothing is recorded."""

    def entered(self) -> AbstractContextManager[None]:
        """What runs inside of it belongs to this context."""


class GraphLayer(Protocol):
    """That of gradients, which follows tensors from worker to worker."""

    def current(self) -> GraphContext | None:
        """The context in which this thread's code runs."""

    def received(
        self, data: bytes, tensors: list[Tensor], sender: Identity
    ) -> tuple[GraphContext | None, Sequence[Tensor]]:
        """Tensors have come: their context, if it has not ended, and what to put in their places."""

    def close(self, reason: PeerError) -> None:
        """The worker leaves."""


class Layers:
    """The layers above that send something along, as far as there are such, by which it is packed and received."""

    def __init__(self) -> None:
        self.references: ReferenceLayer | None = None
        self.graphs: GraphLayer | None = None
        self.tells_times = ""  # by which name this worker's calls tell how long they have, if they do
        # What a worker says at once that it is at with a call of that number from here, for the end of a sentence.
        self.last_word: Callable[[Identity, int], str] = lambda callee, number: ""

    def take_tensors(
        self, message: Message, sender: Identity, receiver: str
    ) -> tuple[GraphContext | None, Sequence[Tensor]]:
        """The tensors of a message; what recorded them is taken from behind its body, and its context, too."""
        tensors: list[Tensor] = []
        if message.meta:
            for blob in message.blobs:
                if type(blob) is Unreceived:
                    raise blob.error(receiver, sender.name)
            tensors = unpack(message.meta, settle(message.blobs))
        if not message.flags & HAS_GRAPH:
            return None, tensors
        assert self.graphs is not None
        message.flags &= ~HAS_GRAPH
        message.body, data = split(message.body)
        return self.graphs.received(bytes(data), tensors, sender)

    def take_attachments(self, message: Message, sender: Identity) -> Attachments:
        """What a message carries, taken from behind its body."""
        assert self.references is not None
        message.flags &= ~HAS_REFERENCES
        message.body, data = split(message.body)
        return self.references.receive(bytes(data), sender)
