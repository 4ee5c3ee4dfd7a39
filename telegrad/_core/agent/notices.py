"""Control messages of the layers above: their classes, encoding and handlers."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from telegrad._core.agent.peer import Peer
from telegrad._core.calls.attachments import GraphContext
from telegrad._core.membership.members import Identity
from telegrad._core.wire.messages import HAS_GRAPH, LOW_PRIORITY, NOTICE, Message, append
from telegrad._core.wire.packing import pack
from telegrad.errors import UsageError

MOST_UNKNOWN = 20  # classes of messages that the log names

log = logging.getLogger("telegrad")


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
