"""Access the connections of a worker, for tests that inspect, block or break them."""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from telegrad._core.agent.agent import Agent
from telegrad._core.agent.incoming import Caller, Incoming
from telegrad._core.memory.blobs import MemorySources
from telegrad._core.memory.device_streams import Streams
from telegrad._core.memory.staging import Staging
from telegrad._core.memory.warm_memory import ReceiveBufferPool, SharedBlockPool
from telegrad._core.security.noise import Ciphers
from telegrad._core.transport.link import Link, LinkHandlers
from telegrad._core.transport.poller import Poller
from telegrad._core.wire.messages import CALL, FAILURE, RESULT, Message
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import PeerLost
from tests.cluster import PATIENCE, wait_until


class LinkEnd:
    """A link that belongs to no worker, and the other end of its socket, which the test has."""

    def __init__(
        self, pool: SharedBlockPool | None = None, ciphers: Ciphers | None = None, descriptor: int | None = None
    ) -> None:
        """`pool`: memory that the link lends; `descriptor`: the number of its socket."""
        self.frames: list[Message] = []
        self._poller = Poller()
        ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(PATIENCE)
        if descriptor is not None:
            ours = socket.socket(fileno=os.dup2(ours.detach(), descriptor))
        sources = MemorySources(ReceiveBufferPool(0), pool, Staging(Streams()))
        handlers = LinkHandlers(lambda _, found: self.frames.extend(found), lambda *_: None, prompt=False)
        self.link = Link(ours, "w1", self._poller, sources, handlers, ciphers)

    def close(self) -> None:
        self.link.close(PeerLost("the end of the test"))
        self.theirs.close()
        self._poller.close()


def made(worker: Worker) -> list[Link]:
    """Return the connections that a worker has made."""
    return [peer.link for peer in list(worker.agent._connections._peers.values()) if isinstance(peer.link, Link)]


def accepted(worker: Worker) -> list[Link]:
    """Return the connections that a worker has accepted."""
    return list(worker.agent._connections._accepted)


def link_to(worker: Worker, name: str) -> Link:
    """Return the connection that a worker has made; the thread that makes it may still send the first messages."""
    peer = worker.agent._connections.peer(name)
    wait_until(lambda: isinstance(peer.link, Link))
    return peer.link  # type: ignore[return-value]


def callers_of(worker: Worker) -> list[Caller]:
    """Return the callers that are connected to a worker."""
    return [link._on_messages.args[0] for link in accepted(worker)]  # type: ignore[attr-defined]


def calls_of(worker: Worker) -> list[Incoming]:
    """The calls that a worker runs or has queued."""
    return [call for caller in callers_of(worker) for call in [*caller.calls.values()]]


def wait_for_calls(count: int) -> None:
    """Wait until the worker of this process runs or has queued so many calls."""
    wait_until(lambda: len(calls_of(current.here())) == count)


def cut(worker: Worker) -> None:
    """Break all accepted connections of a worker, and wait until it has noticed that."""
    links = accepted(worker)
    shut(links)
    wait_until(lambda: not set(links).intersection(accepted(worker)))


def shut(links: list[Link]) -> None:
    for link in links:
        with contextlib.suppress(OSError):
            link._sock.shutdown(socket.SHUT_RDWR)


def count_sent(monkeypatch: pytest.MonkeyPatch, kinds_of: Callable[[Any], Iterable[str]]) -> Counter[str]:
    """Count the calls and answers that are sent from now on, and the kinds that a function finds in other messages."""
    counts: Counter[str] = Counter()
    write, notify = Link.send, Agent.notify

    def send(link: Link, message: Message, later: bool = False) -> bool:
        counts.update({CALL: ["call"], RESULT: ["result"], FAILURE: ["failure"]}.get(message.kind, []))
        return write(link, message, later)

    def tell(agent: Agent, to: str | int, message: tuple[Any, ...], *rest: Any, **more: Any) -> None:
        counts.update(kinds_of(message))
        notify(agent, to, message, *rest, **more)

    monkeypatch.setattr(Link, "send", send)
    monkeypatch.setattr(Agent, "notify", tell)
    return counts


@contextlib.contextmanager
def unread(link: Link) -> Iterator[None]:
    """Stop reading from a link."""
    wait_until(link.reading.take)
    try:
        yield
    finally:
        link.reading.give_back()
