"""The errors of calls whose connection has ended."""

from __future__ import annotations

import contextlib
from typing import Any

from telegrad._core.host import resources
from telegrad._core.wire.messages import BYE, MOVED, OVER, SILENT, Message
from telegrad.errors import GenerationOver, LeftEarly, PeerError, PeerLost, ShutDown


def part(link: Any, reason: PeerError, how: str) -> None:
    """Close a connection and send the reason `how`. Without it, the other worker would declare this one lost."""
    with contextlib.suppress(PeerError):
        link.send(Message(BYE, body=how.encode()))
    link.close(reason)


def departed_error(peer: str, how: str) -> PeerError:
    """Return the error for calls to a worker that announced the end of the connection; `how` says why."""
    uncertain = "calls in flight to it may or may not have run"
    if how == MOVED:
        return GenerationOver(
            f"worker {peer!r} has moved to the next generation of its group; {uncertain}. "
            "Call it again after rendezvous_again()"
        )
    if how == OVER:
        error = ShutDown(f"worker {peer!r} shut down together with its group; {uncertain}")
        error._ends_group = True
        return error
    if how == SILENT:
        return PeerLost(
            f"worker {peer!r} closed the connection, because this worker gave no sign of life for too long (options "
            f"silence and heartbeat); {uncertain}. The next call connects again"
        )
    if how:
        return LeftEarly(f"worker {peer!r} left without the others: {how}; {uncertain}")
    return ShutDown(f"worker {peer!r} shut down; {uncertain}")


def broken(peer: str, error: Exception, why: str) -> PeerLost:
    """Return the error if `error` ended the connection, because of `why` unless this process lacks a resource."""
    cause = error.__cause__ or error
    if resources.out_of_files(cause):
        lacks = "file descriptor"
    elif resources.out_of_memory(cause):
        lacks = "memory"
    else:
        return lost(peer, why)
    return PeerLost(
        f"this process has no {lacks} left for the data of worker {peer!r}, and has closed the connection to it: "
        f"{resources.error_text(cause) or type(cause).__name__}; calls in flight to that worker may or may not "
        "have run"
    )


def lost(peer: str, why: str) -> PeerLost:
    return PeerLost(
        f"worker {peer!r} was lost: {why}; calls in flight to it may or may not have run. "
        "If that worker is still alive, the next call connects again"
    )
