"""Snapshots of an agent's state, for introspection; they block other threads only briefly.

Which thread waits for which call, and which runs which, is read from the stacks of the threads. Calls need no
bookkeeping for it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import CodeType, CoroutineType, FrameType
from typing import Any, NamedTuple

from telegrad._core.agent.agent import Agent
from telegrad._core.agent.call_server import Server
from telegrad._core.agent.incoming import Caller, Incoming
from telegrad._core.agent.peer import Peer
from telegrad._core.agent.pending_call import PendingCall
from telegrad._core.calls import futures
from telegrad._core.reactor.scheduler import Work
from telegrad._core.wire.messages import PREFIX


class Traffic(NamedTuple):
    sent: dict[str, int]
    received: dict[str, int]


def calls_out(agent: Agent) -> list[PendingCall]:
    """Return the unanswered calls of this worker, except calls that are parts of others."""
    peers = list(agent._connections._peers.values())
    calls = [pending for peer in peers for pending in peer.calls.in_flight.copy().values()]
    return [pending for pending in calls if not hasattr(pending.outcome, "behind")]


def calls_going_on(agent: Agent) -> list[tuple[Incoming, CoroutineType[Any, Any, Any] | None]]:
    """Return calls of others whose functions returned a future or a coroutine that has not ended, and the coroutine."""
    server = agent._server
    return [each for each in server.going_on.copy().items() if each[0].message.head not in server.at_once]


def frames_of(coroutine: CoroutineType[Any, Any, Any] | None) -> list[FrameType]:
    """Return the frames of a coroutine that is suspended or has not begun, innermost last."""
    inner: Any = coroutine
    frames = []
    while (frame := getattr(inner, "cr_frame", None)) is not None and not inner.cr_running:
        frames.append(frame)
        inner = inner.cr_await
    return frames


def calls_queued(agent: Agent) -> list[Incoming]:
    """Return calls of others that wait for their turn or for a slot."""
    scheduler = agent._reactor._scheduler
    queues = [each for each in scheduler.ready.copy() if not isinstance(each, Work)]
    queues += [*scheduler.waiting.copy(), *scheduler.held_up.copy()]
    found = [call for call in agent._server.in_turn.copy() if not call.begun]
    for work in [work for queue in queues for work in queue.works.copy()]:
        if isinstance(work.argument, Incoming) and work.run == agent._server._run:
            found.append(work.argument)
        elif isinstance(work.argument, Caller):
            found += work.argument.ordered.copy()
    return list({id(call): call for call in found}.values())


def slots(agent: Agent) -> tuple[int, int]:
    counted = agent._reactor._scheduler
    return counted.count, counted.busy


def traffic(agent: Agent) -> Traffic:
    connections = agent._connections
    links: list[Any] = [peer.link for peer in list(connections._peers.values())]
    links += list(connections._accepted.copy())
    found = Traffic({}, {})
    for link in links:
        if hasattr(link, "taken"):  # a worker's link to itself carries no bytes
            found.sent[link.peer] = found.sent.get(link.peer, 0) + link.sent
            found.received[link.peer] = found.received.get(link.peer, 0) + link.taken
    return found


def size_of(message: tuple[Any, ...]) -> int:
    """Return the bytes that `traffic` counts for a control message without tensors."""
    return PREFIX.size + len(pickle.dumps((type(message).__name__, *message), 5))


def shared(agent: Agent) -> int:
    return sum(agent.memory._bytes.values())


# Stacks of threads


class Stands(NamedTuple):
    """The role of a thread in calls, as its stack shows it."""

    serves: list[Incoming]  # the calls that it runs, the innermost last
    waits: PendingCall | None  # the call whose end it waits for
    room: Peer | None  # the worker for which it waits until fewer calls are in flight


NOWHERE = Stands([], None, None)

# The roles are read from local variables of these functions, by name. A new name for `self`, `call` or `future` there
# breaks `telegrad why`.
_SERVES = {Server._serve.__code__, *(each for each in Server._await.__code__.co_consts if isinstance(each, CodeType))}
_WAITS: dict[CodeType, Callable[[dict[str, Any]], Any]] = {
    PendingCall.wait.__code__: lambda names: names.get("self"),
    PendingCall.help.__code__: lambda names: names.get("self"),
    futures.wait_for.__code__: lambda names: getattr(names.get("future"), "call", None),
}
_ROOM: CodeType = Peer.wait_for_capacity.__code__


def stands(stack: Sequence[FrameType], agent: Agent) -> Stands:
    """Read a stack, outermost frame first. The process may also have threads of other agents."""
    peers: list[Any] = list(agent._connections._peers.values())
    serves: list[Incoming] = []
    waits: PendingCall | None = None
    room: Peer | None = None
    for frame in reversed(stack):
        code = frame.f_code
        if code in _SERVES and frame.f_locals["self"] is agent._server:
            serves.append(frame.f_locals["call"])
        elif code in _WAITS and waits is None and not serves:
            found = _WAITS[code](frame.f_locals)
            found = getattr(getattr(found, "outcome", None), "behind", None) or found  # the call of which it is a part
            waits = found if isinstance(found, PendingCall) and not found.done and found.peer in peers else None
        elif code is _ROOM and not serves and frame.f_locals["self"] in peers:
            room = frame.f_locals["self"]
    return Stands(serves[::-1], waits, room)
