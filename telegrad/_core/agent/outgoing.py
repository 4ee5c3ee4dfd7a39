"""Encodes calls: a part that is common to all callees, and data appended for a single callee."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad._core.agent.pending_call import PendingCall
from telegrad._core.calls import call_context
from telegrad._core.calls.attachments import Layers
from telegrad._core.calls.call_names import OWN_ARGUMENTS
from telegrad._core.pickling.function_names import name_of
from telegrad._core.pickling.pickling import Encoded, blame_again, encode
from telegrad._core.wire.messages import (
    HAS_CALL_CONTEXT,
    HAS_GRAPH,
    HAS_REFERENCES,
    INFERENCE,
    NO_GRAD,
    Message,
    append,
)
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
