"""The embedded directory for its tests: a process that a keeper starts, or a thread of this process."""

import contextlib
import itertools
import os
import signal
import socket
import threading
import time

from telegrad._core.security.keyring import Keyring
from telegrad._core.sockets import shut
from telegrad._core.stores import directory_server
from telegrad._core.stores.directory_client import EmbeddedDirectory, EmbeddedSession
from telegrad._core.stores.directory_server import DirectoryServer, ServerProcess
from telegrad._core.stores.lease_table import Limits
from tests.cluster import KEYS
from tests.directory.harness import PATIENCE, written

CHANGES = 2000  # kept by the server of the tests


class ProcessEngine:
    """An engine of the contract in its own process."""

    ttl, slack = 0.3, 0.3

    def __init__(self) -> None:
        self.keeper = ServerProcess(KEYS, limits=Limits(changes=CHANGES))
        with contextlib.closing(self.client(PATIENCE)) as client:
            client.list("")  # some tests wait for less time than a process takes to start

    def client(self, patience: float = 10.0) -> EmbeddedDirectory:
        return EmbeddedDirectory(self.keeper.address, KEYS, patience)

    def kill(self) -> None:
        os.kill(self.keeper.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.keeper.pid, os.WEXITED | os.WNOWAIT)

    def start(self) -> None:
        assert self.keeper.restart_if_ended()

    def pause(self) -> None:
        os.kill(self.keeper.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.keeper.pid, signal.SIGCONT)

    def forget(self) -> None:
        client = self.client()
        revision = 0
        for _ in range(CHANGES + 1):
            revision = written(client.swap("filler", b"", revision)).revision
        client.swap("filler", None, revision)
        client.close()


class ThreadEngine:
    """A server in a thread of this process."""

    def __init__(self, keys: Keyring = KEYS) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=directory_server.BACKLOG)
        self.address: tuple[str, int] = listener.getsockname()
        self.server = DirectoryServer(listener, keys)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        self._clients: list[EmbeddedDirectory] = []

    def client(self, patience: float = PATIENCE, keys: Keyring = KEYS) -> EmbeddedDirectory:
        self._clients.append(EmbeddedDirectory(self.address, keys, patience))
        return self._clients[-1]

    def session(self, client: EmbeddedDirectory | None = None) -> EmbeddedSession:
        """Return a connection after its handshake, which no client uses."""
        session = (client or self.client())._sessions._make(0)
        session.open(time.monotonic() + PATIENCE)
        return session

    def connections(self) -> int:
        return len(self.server._strangers) + sum(map(len, self.server._clients.values()))

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.stopped = True
        with contextlib.suppress(OSError):  # the server has stopped already
            socket.create_connection(self.address).close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


class Middleman:
    """A proxy for servers, which get one connection each in turn; it can alter the replies."""

    def __init__(self, *targets: tuple[str, int]) -> None:
        self.targets = itertools.cycle(targets)
        self.altered = 0  # pieces that were altered
        self.to_alter: float = 0  # pieces that will be altered
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._socks = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(next(self.targets))
                self._socks += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(*ends, ends[0] is far), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_reply and self.to_alter:
                    self.to_alter, self.altered = self.to_alter - 1, self.altered + 1
                    data = data[:-1] + bytes([data[-1] ^ 1])
                sink.sendall(data)
        for each in (source, sink):
            shut(each)

    def cut(self) -> None:
        """Close all connections."""
        for each in self._socks[1:]:
            shut(each)

    def close(self) -> None:
        for each in self._socks:
            shut(each)
            each.close()
