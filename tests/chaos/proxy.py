"""A TCP proxy between workers that can behave like a bad network.

A worker registers the address on which it listens and gets the one to publish (`stand_behind_proxy`): the address of a
door of the proxy, one door per worker. Everything runs on one thread; `Proxy.do` runs a function there.

TCP delivers bytes in order, once, or not at all; so does the proxy. Swallowed bytes are never followed by later ones:
such a connection stays silent until it is cut.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from telegrad._core.agent.agent import Agent
    from telegrad._core.membership.members import Member

T = TypeVar("T")
Address = tuple[str, int]

HOST = "127.0.0.1"
CHUNK = 1 << 18
FULL = 1 << 22  # bytes that a direction keeps at most before it stops reading
OPENING = 4096  # first bytes of each connection, which a stranger will send again
PATIENCE = 30.0


class Weather:
    """The current state of the network to one worker."""

    def __init__(self) -> None:
        self.delay = 0.0  # seconds for which bytes are held back
        self.morsel = 0  # bytes that are passed on at once; 0 for all
        self.silent = False  # bytes are taken and never passed on
        self.shut = False  # connections are refused


class Proxy:
    """The doors of all workers, and the connections through them."""

    def __init__(self) -> None:
        self.doors: dict[str, Door] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed = False
        self._desk = _listen()
        self.address: Address = self._desk.getsockname()
        self._selector.register(self._woken, selectors.EVENT_READ, self._take_orders)
        self._selector.register(self._desk, selectors.EVENT_READ, self._register)
        self._thread = threading.Thread(target=self._serve, name="proxy")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._close)
        self._thread.join()

    def do(self, order: Callable[[], T]) -> T:
        """Run `order` on the proxy's thread."""
        done: Future[T] = Future()
        self._orders.append((order, done))
        self._wake.send(b"!")
        return done.result(PATIENCE)

    # The thread

    def _serve(self) -> None:
        while not self._closed:
            pipes = [pipe for door in self.doors.values() for pipe in door.pipes]
            due = min((pipe.due for pipe in pipes if pipe.due is not None), default=None)
            for key, mask in self._selector.select(None if due is None else max(0.0, due - monotonic())):
                key.data(mask)
            for pipe in pipes:
                pipe.pump()

    def _take_orders(self, _: int) -> None:
        self._woken.recv(4096)
        while self._orders:
            order, done = self._orders.popleft()
            try:
                done.set_result(order())
            except BaseException as error:
                done.set_exception(error)

    def _register(self, _: int) -> None:
        sock, _ = self._desk.accept()
        with sock:
            sock.settimeout(PATIENCE)
            name, address = json.loads(sock.makefile().readline())
            door = self.doors[name] = Door(self._selector, tuple(address))
            sock.sendall(json.dumps(door.address).encode() + b"\n")

    def _close(self) -> None:
        self._closed = True
        for door in self.doors.values():
            door.close()
        for sock in (self._desk, self._wake, self._woken):
            sock.close()
        self._selector.close()


class Door:
    """The address at which others reach one worker."""

    def __init__(self, selector: selectors.BaseSelector, target: Address) -> None:
        self.target = target
        self.weather = Weather()
        self.connections: list[Connection] = []
        self._selector = selector
        self._sock = _listen()
        self.address: Address = self._sock.getsockname()
        selector.register(self._sock, selectors.EVENT_READ, self._accept)

    @property
    def pipes(self) -> list[Pipe]:
        return [pipe for connection in self.connections for pipe in connection.pipes]

    def _accept(self, _: int) -> None:
        client, _ = self._sock.accept()
        if self.weather.shut:
            _reset(client)
            return
        try:
            server = socket.create_connection(self.target, PATIENCE)
        except OSError:  # the worker's process has ended
            _reset(client)
            return
        self.connections.append(Connection(self, self._selector, client, server))

    def reset_all(self) -> None:
        for connection in list(self.connections):
            connection.end(reset=True)

    def close(self) -> None:
        self.reset_all()
        self._selector.unregister(self._sock)
        self._sock.close()


class Connection:
    """Two sockets with a pipe for each direction."""

    def __init__(
        self, door: Door, selector: selectors.BaseSelector, client: socket.socket, server: socket.socket
    ) -> None:
        self.door = door
        self.opening = b""  # the first bytes of the client
        self.open = True
        self._sockets = client, server
        self._selector = selector
        self.pipes = Pipe(self, client, server, first=True), Pipe(self, server, client, first=False)
        for sock, coming, leaving in ((client, *self.pipes), (server, *self.pipes[::-1])):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(sock, selectors.EVENT_READ, _both(coming, leaving))

    def watch(self) -> None:
        """Wait for the events that the pipes can use."""
        for sock, coming, leaving in zip(self._sockets, self.pipes, self.pipes[::-1], strict=True):
            mask = selectors.EVENT_READ * coming.wants_to_read | selectors.EVENT_WRITE * leaving.blocked
            key = self._selector.get_map().get(sock)
            if mask and key is None:
                self._selector.register(sock, mask, _both(coming, leaving))
            elif mask and key is not None and key.events != mask:
                self._selector.modify(sock, mask, key.data)
            elif key is not None and not mask:
                self._selector.unregister(sock)

    def end(self, reset: bool) -> None:
        if not self.open:
            return
        self.open = False
        self.door.connections.remove(self)
        for sock in self._sockets:
            if self._selector.get_map().get(sock) is not None:
                self._selector.unregister(sock)
            if reset:
                _reset(sock)
            else:
                sock.close()


class Pipe:
    """A direction of a connection."""

    def __init__(self, connection: Connection, source: socket.socket, sink: socket.socket, first: bool) -> None:
        self.budget: int | None = None  # bytes after which the connection ends
        self._connection = connection
        self._weather = connection.door.weather
        self._source, self._sink = source, sink
        self._first = first
        self._held: deque[tuple[float, memoryview]] = deque()  # (time to pass on, data)
        self._size = 0
        self._ended = False  # nothing more comes
        self.blocked = False  # the sink takes nothing now

    @property
    def wants_to_read(self) -> bool:
        return not self._ended and self._size < FULL

    @property
    def due(self) -> float | None:
        """The time at which `pump` will have work of which no socket tells."""
        return self._held[0][0] if self._held and not self.blocked else None

    def on_readable(self) -> None:
        if not self.wants_to_read or not self._connection.open:
            return
        try:
            data = self._source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._connection.end(reset=True)
            return
        if self._first and len(self._connection.opening) < OPENING:
            self._connection.opening += data[: OPENING - len(self._connection.opening)]
        if not data:
            self._ended = True
        elif not self._weather.silent:
            self._held.append((monotonic() + self._weather.delay, memoryview(data)))
            self._size += len(data)

    def pump(self) -> None:
        """Pass on the data that is due."""
        if not self._connection.open:
            return
        try:
            self._pass_on()
        except OSError:
            self._connection.end(reset=True)
            return
        if self._ended and not self._held:
            self._connection.end(reset=False)
        elif self._connection.open:
            self._connection.watch()

    def _pass_on(self) -> None:
        while self._held and self._held[0][0] <= monotonic() and not self.blocked:
            when, data = self._held.popleft()
            part = data[: self._weather.morsel or len(data)]
            if self.budget is not None:
                part = part[: self.budget]
            try:
                sent = self._sink.send(part)
            except BlockingIOError:
                sent = 0
                self.blocked = True
            if sent < len(data):
                self._held.appendleft((when, data[sent:]))
            self._size -= sent
            if self.budget is not None:
                self.budget -= sent
                if not self.budget:
                    self._connection.end(reset=False)
                    return
            if self._weather.morsel:
                return


def _both(coming: Pipe, leaving: Pipe) -> Callable[[int], None]:
    """Return the handler for events of a socket that one pipe reads and the other writes."""

    def act(mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            leaving.blocked = False
        if mask & selectors.EVENT_READ:
            coming.on_readable()

    return act


def _listen() -> socket.socket:
    sock = socket.socket()
    sock.bind((HOST, 0))
    sock.listen(64)
    return sock


def _reset(sock: socket.socket) -> None:
    """Close a socket with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def stand_behind_proxy(proxy: Address) -> None:
    """Let the worker of this process, which has not joined yet, publish the address of one of the proxy's doors."""
    from telegrad._core.agent.agent import Agent

    describe = Agent.describe

    def describe_behind_proxy(self: Agent, id_: int, host: str) -> Member:
        member = describe(self, id_, host)
        with socket.create_connection(proxy, PATIENCE) as desk:
            desk.sendall(json.dumps([member.name, member.tcp]).encode() + b"\n")
            return member._replace(tcp=tuple(json.loads(desk.makefile().readline())))

    Agent.describe = describe_behind_proxy
