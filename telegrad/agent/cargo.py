"""What the rooms above send along with calls and answers, behind their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from telegrad.devices.streams import settle
from telegrad.errors import PeerError
from telegrad.group.members import Identity
from telegrad.wire.messages import CARRIES, RECORDED, Frame, unload
from telegrad.wire.unpacking import unpack


class Destination(Protocol):
    """Where the value of a call goes that stays on the callee."""

    def fulfil(self, value: Any) -> None: ...

    def fail(self, failure: bytes) -> None:
        """There is an exception in its place, as `wire.failures` describes it."""

    def receipt(self) -> bytes:
        """What the answer carries."""


class Cargo(NamedTuple):
    """What came along with a frame."""

    references: list[Any]  # for the slots of its body
    destination: Destination | None


class Rider(Protocol):
    """The room above that uses frames so. What one connection brings is received in the order of sending."""

    def pack(self, references: Sequence[Any], to: Identity, creation: Any) -> bytes:
        """References are about to leave, and perhaps a call that creates one."""

    def receive(self, data: bytes, sender: Identity) -> Cargo: ...

    def close(self) -> None:
        """The worker leaves."""


class Context(Protocol):
    """In which calls run and tensors cross."""

    def sent(self, tensors: Sequence[Tensor], to: Identity, what: Any, graph: bool) -> bytes:
        """Tensors are about to leave; what the frame shall say of that. Without `graph` nothing is recorded."""

    def entered(self) -> AbstractContextManager[None]:
        """What runs inside of it belongs to this context."""


class Recorder(Protocol):
    """The room above that follows tensors from worker to worker."""

    def current(self) -> Context | None:
        """The context in which this thread's code runs."""

    def received(self, data: bytes, tensors: list[Tensor], sender: Identity) -> tuple[Context | None, Sequence[Tensor]]:
        """Tensors have come: their context, if it has not ended, and what to put in their places."""

    def close(self, reason: PeerError) -> None:
        """The worker leaves."""


def take_tensors(frame: Frame, recorder: Recorder | None, sender: Identity) -> tuple[Frame, Sequence[Tensor]]:
    """The tensors of a frame; what recorded them is taken from behind its body, and its context entered."""
    tensors: Sequence[Tensor] = unpack(frame.meta, settle(frame.blobs)) if frame.meta else []
    if frame.flags & RECORDED:
        assert recorder is not None
        body, data = unload(frame.body)
        context, tensors = recorder.received(bytes(data), list(tensors), sender)
        frame = frame._replace(flags=frame.flags & ~RECORDED, body=body, context=context)
    return frame, tensors


def take_cargo(frame: Frame, rider: Rider, sender: Identity) -> Frame:
    """A frame that carries something, with that taken from behind its body."""
    body, data = unload(frame.body)
    return frame._replace(flags=frame.flags & ~CARRIES, body=body, cargo=rider.receive(bytes(data), sender))
