"""What the rooms above send along with calls and answers, behind their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from telegrad.agent.members import Identity
from telegrad.wire.messages import CARRIES, Frame, unload


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


def take_cargo(frame: Frame, rider: Rider, sender: Identity) -> Frame:
    """A frame that carries something, with that taken from behind its body."""
    body, data = unload(frame.body)
    return frame._replace(flags=frame.flags & ~CARRIES, body=body, cargo=rider.receive(bytes(data), sender))
