"""A listener recovers after any crowd of connections, and an ending connection affects no other one."""

import contextlib
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad._core.security.handshake import Hello, Initiator
from telegrad._core.security.keyring import Keyring
from telegrad._core.transport import listener
from telegrad._core.transport.listener import Listener
from telegrad._core.transport.poller import READ, Poller
from tests.cluster import wait_until
from tests.strangers.door import HAS_PROC

KEY = Keyring([b"the key of the group"])
ME = Hello("w0", 0, "x", "")


class Doors:
    """A listener that only the test polls."""

    def __init__(self) -> None:
        self.poller = Poller()
        self.accepted: list[socket.socket] = []
        self.failures: list[BaseException] = []
        self.listener = Listener(
            "127.0.0.1", None, "tcp", 10.0, self.poller, lambda channel, *_: self.accepted.append(channel.sock)
        )
        self.listener.serve(KEY, ME)

    def look(self, timeout: float = 0.0) -> bool:
        """Do the work of the leader; return True if there was any."""
        ready = self.poller.poll(timeout)
        for source, events in ready:
            if events & READ:
                try:
                    source.on_readable()
                except Exception as error:
                    self.failures.append(error)
        return bool(ready)

    def tick(self) -> None:
        """Do the work of the timer."""
        try:
            self.listener.tick(time.monotonic())
        except Exception as error:
            self.failures.append(error)

    def knock(self) -> socket.socket:
        sock = socket.create_connection(self.listener.tcp, 2.0)
        sock.settimeout(2.0)
        return sock

    def close(self) -> None:
        self.listener.close()
        self.poller.close()
        for sock in self.accepted:
            sock.close()


@pytest.fixture
def doors() -> Iterator[Doors]:
    made = Doors()
    yield made
    made.close()


@contextlib.contextmanager
def repeated(*jobs: Callable[..., Any]) -> Iterator[None]:
    """Repeat each job on a thread of its own, with the shortest switch interval."""
    over, interval = threading.Event(), sys.getswitchinterval()

    def repeat(job: Callable[..., Any]) -> None:
        while not over.is_set():
            job()

    threads = [threading.Thread(target=repeat, args=(job,)) for job in jobs]
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    """Record log messages, without pytest's capture since there may be many."""
    logger, said = logging.getLogger("telegrad"), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.propagate = False
    yield said
    logger.propagate = True
    logger.removeHandler(handler)


def test_a_listener_that_stopped_accepting_resumes(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer closes the crowd's connections at the moment when the leader stops accepting."""
    doors.listener.most_strangers, doors.listener.patience = 2, -1.0
    watch = doors.poller.watch
    ticks: list[threading.Thread] = []

    def watch_late(source: listener._Handshake, *, read: bool | None = None, write: bool | None = None) -> None:
        if isinstance(source, listener._ListeningSocket) and read is False and not ticks:
            ticks.append(threading.Thread(target=doors.tick))
            ticks[0].start()
            ticks[0].join(0.5)  # with a limit: the timer may wait until this call ends
        watch(source, read=read, write=write)

    monkeypatch.setattr(doors.poller, "watch", watch_late)
    with doors.knock(), doors.knock():
        while doors.look(0.1):
            pass
    doors.tick()
    with doors.knock() as sock:
        while doors.look(0.1):
            pass
        doors.tick()
        assert sock.recv(1) == b""
    assert doors.failures == []


def test_the_timer_reopens_the_listener(doors: Doors, monkeypatch: pytest.MonkeyPatch, lines: list[Any]) -> None:
    """The timer ticks at each step of the leader that stops accepting."""
    forget = doors.poller.forget

    def forget_late(source: listener._ListeningSocket) -> None:
        doors.tick()
        forget(source)
        doors.tick()

    monkeypatch.setattr(doors.poller, "forget", forget_late)
    for _ in range(3):
        doors.listener.shut(OSError("no descriptor"))
    assert len(lines) == 1
    monkeypatch.undo()
    doors.tick()
    with doors.knock():
        assert doors.look(2.0)
    assert doors.failures == []


def test_time_in_which_this_worker_did_not_run_is_not_counted(doors: Doors) -> None:
    began = time.monotonic()
    doors.listener.tick(began)
    with doors.knock() as sock:
        assert doors.look(1.0)
        late = began + 2 * listener.PATIENCE  # as if a function had held the interpreter
        for second in range(int(listener.PATIENCE)):
            doors.listener.tick(late + second)
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        doors.listener.tick(late + listener.PATIENCE + 1)
        sock.settimeout(2.0)
        assert sock.recv(1) == b""


def test_a_crowd_that_comes_and_goes_does_not_stop_the_listener(doors: Doors, lines: list[Any]) -> None:
    # The timer closes each accepted connection at once.
    doors.listener.most_strangers, doors.listener.patience = 2, -1.0
    with repeated(lambda: doors.look(0.1), doors.tick):
        for _ in range(50):
            with contextlib.ExitStack() as stack:
                for _ in range(8):
                    stack.enter_context(doors.knock())
        with doors.knock() as sock, contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
    assert doors.failures == []


def test_a_connection_that_completed_its_handshake_late_is_kept(doors: Doors) -> None:
    """The timer closes one of two late connections while the other completes its handshake."""
    socks = {sock.getsockname()[1]: sock for sock in (doors.knock(), doors.knock())}
    ends = {port: Initiator(KEY, ME, ME.incarnation) for port in socks}
    proofs = {port: end.start() for port, end in ends.items()}
    for _ in range(2):
        for port, sock in socks.items():
            sock.sendall(proofs.pop(port))
        while len(proofs) < 2:
            doors.look(0.01)
            for port, sock in socks.items():
                sock.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    proofs[port] = ends[port].receive(sock.recv(4096))

    def emit(record: logging.LogRecord) -> None:
        for port, sock in socks.items():
            if f":{port} " not in record.getMessage() and not doors.accepted:
                sock.sendall(proofs[port])
                while not doors.accepted:
                    doors.look(0.01)

    handler = logging.Handler()
    handler.emit = emit
    doors.listener.patience = -1.0
    logging.getLogger("telegrad").addHandler(handler)
    try:
        doors.tick()
    finally:
        logging.getLogger("telegrad").removeHandler(handler)
    (member,) = doors.accepted
    assert member.fileno() >= 0
    for sock in socks.values():
        sock.close()


@pytest.mark.skipif(not HAS_PROC, reason="the platform does not tell which descriptors are open")
def test_a_listener_without_descriptors_waits_and_logs_this_seldom(doors: Doors, lines: list[Any]) -> None:
    with doors.knock() as first, no_descriptors(spare=first):
        for _ in range(1000):
            doors.look()
        assert 1 <= len(lines) <= 10
    with doors.knock() as sock:
        sock.sendall(b"\0\0")
        doors.tick()
        wait_until(lambda: doors.look(0.01) and any("an invalid message" in line for line in lines))


@contextlib.contextmanager
def no_descriptors(spare: socket.socket) -> Iterator[None]:
    """Take all free descriptors of this process, except for `spare` and those opened before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(spare.fileno()))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
