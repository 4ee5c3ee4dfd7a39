"""The process that serves an embedded directory, and its keeper, which starts it, and restarts it when it has ended.

One thread and one selector serve all clients. One iteration of the loop reads received data, answers at most one
request of each connection, commits their changes, and only then sends: each fact in a reply is in the file. A
connection carries one request at a time, so a client that sends fast, or does not read its replies, takes neither
memory nor time from the others.

The keeper owns the listening socket, and passes it to each process that it starts. Therefore the address stays the
same, and clients that connect while no server runs wait in the socket's queue. The directory's state is in a file
(`lease_table.py`).

`python -m telegrad._core.stores.directory_server FD` serves the directory that the pipe FD describes. When the
keeper ends, the pipe is closed. The server then runs until no lease is left, and removes the file and the notes that
name it. A server that cannot use its file writes the reason to its output and ends.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pickle
import secrets
import selectors
import socket
import subprocess
import sys
import threading
from functools import partial
from time import monotonic

from telegrad._core.private_files import open_regular, private_folder, replacing
from telegrad._core.processes import SAFE_PATH, describe_exit, new_session_options
from telegrad._core.security.handshake import Acceptor, Hello, Refusals, host_of, to_give_way
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.noise import DecryptionFailed
from telegrad._core.sockets import NOT_NOW, family_of, socket_address, tune_tcp
from telegrad._core.stores import directory_requests as requests
from telegrad._core.stores.directory_requests import Channel, Watches
from telegrad._core.stores.lease_table import DEFAULT, LOG, LeaseTable, Limits, remove_all
from telegrad._core.threads import run_in_thread
from telegrad.errors import HandshakeError, PeerUnreachable, ProtocolViolation, TelegradError

BACKLOG = 4096  # connections waiting to be accepted; all workers of a group may connect at once
PIECE = 1 << 16  # bytes read from one client in an iteration
ACCEPTS = 64  # connections accepted in an iteration
MOST_STRANGERS = 1024  # concurrent handshakes; above it, the oldest one of the host with the most is refused
MOST_OF_ONE = 64  # connections of one client, one for each request in flight; above it, its oldest is closed
INTRODUCTION = 10.0  # seconds that a handshake may take
SILENCE = 30.0  # seconds after which the kernel declares the host of a client lost
TICK = 0.5  # seconds; the longest sleep
STOPPED = 1.0  # seconds beyond a tick: the process did not run, and could take no renewals
PAUSE = 0.5  # seconds without accepting if no descriptor is free
# Of the keeper
PATIENCE = 5.0  # seconds for the process to end by itself
LAST_WORDS = 500  # bytes of its log
LONGEST_REASON = 4096  # bytes of the reason that it reports when it ends
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 1.0  # seconds before a restart, if it ends for the same reason repeatedly
STEADY = 60.0  # seconds; after running for so long, it has ended for a new reason

log = logging.getLogger("telegrad")
Closed = (OSError, ProtocolViolation, DecryptionFailed)


class DirectoryServer:
    def __init__(
        self, listener: socket.socket, keys: Keyring, path: str = ":memory:", limits: Limits = DEFAULT
    ) -> None:
        """Open the directory's file; raise UsageError if it cannot be used."""
        self.table = LeaseTable(path, limits, monotonic())
        self.watches: Watches[_Connection] = Watches(self.table)
        self.stopped = False  # set by any thread; `run` returns after its next event
        hello = Hello(requests.name_of(path) + self.table.identity, 0, requests.INCARNATION, "")
        self._acceptor = partial(Acceptor, keys, hello)
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[_Connection, None] = {}  # oldest first
        self._clients: dict[str, list[_Connection]] = {}
        self._replies: list[tuple[_Connection, bytes]] = []  # of this iteration
        self._refusals = Refusals()
        self._accepts_at: float | None = None  # when to accept again
        self._keeper_left = False

    def run(self, pipe: int | None = None, parent: int = 0) -> None:
        """Serve. With a pipe: until the keeper has closed it or has ended, and no lease is left."""
        self._listener.setblocking(False)
        try:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            if pipe is not None:
                self._selector.register(pipe, selectors.EVENT_READ, partial(self._note_keeper_left, pipe))
            last = monotonic()
            while not self.stopped:
                last = self._turn(last)
                # Processes that the parent has forked hold the pipe as well, so it may stay open after the parent has
                # ended. Then this process has another parent.
                if (self._keeper_left or (parent and os.getppid() != parent)) and not self.table.leases:
                    break
        finally:
            for connection in [*self._strangers, *(each for own in self._clients.values() for each in own)]:
                connection.sock.close()
            self._selector.close()
            self._listener.close()
            self.table.file.close()

    def _note_keeper_left(self, pipe: int, _: int) -> None:
        self._keeper_left = True
        self._selector.unregister(pipe)

    def _turn(self, last: float) -> float:
        """Wait for events and process them; return the time. `last` is the time of the last iteration."""
        waits = [at - monotonic() for at in (self.table.next_end(), self.watches.next_at()) if at is not None]
        ready = self._selector.select(max(0.0, min([TICK, *waits])))
        now = monotonic()
        # This process was stopped, or had no processor, and could take no renewals meanwhile. Without this, each stop
        # that is longer than a ttl would declare all members lost.
        if now - last > TICK + STOPPED:
            self.table.extend_leases(now - last)
        for key, events in ready:
            key.data(events)
        self.table.expire(now)
        # After `expire`, so that watchers learn of ended leases in this turn, and before the commit: a reply must
        # report nothing that a restart could undo.
        replies, self._replies = self._replies + self.watches.collect(now), []
        self.table.file.commit(self.table.revision)
        for connection, reply in replies:
            if connection.sock.fileno() >= 0:
                connection.reply(reply)
                self._send(connection)
        self._check_strangers(now)
        return now

    # Connections

    def _accept(self, _: int) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except NOT_NOW:
                return
            except OSError as error:
                # As a rule, no descriptor is free, and an immediate retry would fail again. The waiting connection
                # keeps the listener readable, so the listener leaves the selector for a while: otherwise the loop would
                # turn without a pause.
                advice = " (see `ulimit -n`)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
                log.warning("telegrad: the directory cannot accept connections: %s%s", error, advice)
                self._selector.unregister(self._listener)
                self._accepts_at = monotonic() + PAUSE
                for oldest in list(self._strangers)[:1]:
                    self._refuse(oldest, "no file descriptor is free")
                return
            origin = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this host"
            connection = _Connection(sock, origin, self._acceptor())
            self._strangers[connection] = None
            self._selector.register(sock, selectors.EVENT_READ, partial(self._ready, connection))
            if len(self._strangers) > MOST_STRANGERS:
                waiting = list(self._strangers)
                self._refuse(waiting[to_give_way(each.origin for each in waiting)], "too many unfinished handshakes")

    def _ready(self, connection: _Connection, events: int) -> None:
        if connection.sock.fileno() < 0:  # dropped in this iteration
            return
        try:
            if events & selectors.EVENT_READ and (request := connection.receive()) is not None:
                reply = self._answer(connection, request)
                if reply is not None:
                    self._replies.append((connection, reply))
        except NOT_NOW:
            pass
        except (HandshakeError, PeerUnreachable, *Closed) as error:
            # A connection that ends without a byte is a probe of the port, of which there are many.
            if connection in self._strangers and connection.has_spoken:
                self._refuse(connection, error)
            else:
                self._drop(connection, error)
            return
        if connection in self._strangers and connection.channel is not None:
            del self._strangers[connection]
            own = self._clients.setdefault(connection.client, [])
            own.append(connection)
            if len(own) > MOST_OF_ONE:
                self._drop(own[0])
        # These are bytes of the handshake, or the rest of an earlier reply. A reply to this request is sent only after
        # the commit of this turn.
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        """Send as much as the socket accepts."""
        try:
            with contextlib.suppress(*NOT_NOW):
                while connection.unsent:
                    del connection.unsent[: connection.sock.send(connection.unsent)]
        except OSError as error:
            self._drop(connection, error)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.sock, events, partial(self._ready, connection))

    def _drop(self, connection: _Connection, why: object = None) -> None:
        if connection.sock.fileno() < 0:
            return
        if why is not None:
            log.debug("telegrad: a connection of the directory with %s has ended: %s", connection.origin, why)
        self.watches.leave(connection)
        self._strangers.pop(connection, None)
        own = self._clients.get(connection.client, [])
        if connection in own:
            own.remove(connection)
            if not own:
                del self._clients[connection.client]
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _refuse(self, connection: _Connection, why: object) -> None:
        with contextlib.suppress(OSError):
            connection.sock.send(connection.acceptor.last_bytes)
        if self._refusals.should_log(host_of(connection.origin), monotonic()):
            log.warning("telegrad: the directory has refused a connection from %s: %s", connection.origin, why)
        self._drop(connection)

    def _check_strangers(self, now: float) -> None:
        while self._strangers and now - (oldest := next(iter(self._strangers))).since > INTRODUCTION:
            self._refuse(oldest, f"it did not complete its handshake within {INTRODUCTION:g} s")
        for host, count in self._refusals.left_out(now):
            log.warning("telegrad: the directory has refused %d more connections from %s in a minute", count, host)
        if self._accepts_at is not None and now >= self._accepts_at:
            self._accepts_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    # Requests

    def _answer(self, connection: _Connection, data: bytes) -> bytes | None:
        """Return the reply to a request, or None if it waits. Raises ProtocolViolation if the data is no request."""
        request, now = requests.read_request(data), monotonic()
        try:
            if request.operation == requests.WATCH:
                return self.watches.add(connection, request.key, request.revision, request.seconds, now)
            return requests.do(self.table, connection.client, request, now)
        except tuple(requests.ERRORS.values()) as error:
            outcome = next(outcome for outcome, kind in requests.ERRORS.items() if isinstance(error, kind))
            return requests.write_reply(outcome, text=str(error))


class _Connection:
    """A connection of a client, or one in its handshake."""

    def __init__(self, sock: socket.socket, origin: str, acceptor: Acceptor) -> None:
        self.sock, self.origin, self.acceptor = sock, origin, acceptor
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # closed already, which the next read finds; or not a TCP socket
            tune_tcp(sock, SILENCE)
        self.since = monotonic()
        self.has_spoken = False
        self.client = ""  # its authenticated name
        self.channel: Channel | None = None  # after the handshake
        self.unsent = bytearray()
        self.events = selectors.EVENT_READ  # registered with the selector
        self._is_asked = False  # a request has no reply yet

    def receive(self) -> bytes | None:
        """Read available data once; return a complete request. Raises NOT_NOW, or why to close the connection."""
        data = self.sock.recv(PIECE)
        if not data:
            raise ConnectionResetError("it closed the connection")
        self.has_spoken = True
        owes = self._is_asked or bool(self.unsent)
        if self.channel is None:
            end = self.acceptor
            self.unsent += end.receive(data)
            if not end.done:
                return None
            assert end.ciphers is not None
            assert end.peer is not None
            self.client = end.peer.name
            self.channel = Channel(end.ciphers, requests.LONGEST_REQUEST, end.leftover)
            data = b""
        found = self.channel.decrypt(data)
        if not found:
            return None
        if owes or len(found) > 1:
            raise ProtocolViolation("it sent a request before it received the reply to the last one")
        self._is_asked = True
        return found[0]

    def reply(self, data: bytes) -> None:
        """Queue the reply to the last request."""
        assert self.channel is not None
        self.unsent += self.channel.encrypt(data)
        self._is_asked = False


def main(pipe: int) -> None:
    """Serve the directory that the pipe describes."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # open as many descriptors as permitted
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    size = int.from_bytes(_read_all(pipe, 4), "little")
    parent, number, keys, path, limits = pickle.loads(_read_all(pipe, size))  # written by `ServerProcess`
    # The port stays taken until all is removed: until then no worker begins a directory from the file or a note.
    with socket.socket(fileno=number) as listener:
        try:
            DirectoryServer(listener.dup(), keys, path, limits).run(pipe, parent)
        except TelegradError as error:  # the file's disk may be that of the log, and full
            with contextlib.suppress(OSError):  # the keeper has ended
                os.write(sys.stdout.fileno(), str(error).encode())
            raise
        remove_all(path)  # no lease is left, so no later group needs the file


def _read_all(pipe: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(pipe, size - len(data))
        if not piece:
            raise SystemExit(1)  # the process that started this one has ended
        data += piece
    return data


# In the process that starts it


class ServerProcess:
    """The serving process and its address."""

    def __init__(
        self, keys: Keyring, host: str = "127.0.0.1", port: int = 0, path: str = "", limits: Limits = DEFAULT
    ) -> None:
        """Start the process. `path` is its file, which a killed server may have left; by default, a new one is made.
        Raise OSError if the port is taken, or the process cannot be started."""
        self._keys, self._limits = keys, limits
        self.path = path
        if not path:
            with private_folder("directory") as folder:
                name = f"{secrets.token_hex(8)}.sqlite"
                folder.create(name).close()  # for this user only; SQLite makes its other files likewise
                self.path = os.path.join(folder.path, name)
        self._listener = socket.create_server(socket_address(host, port), family=family_of(host), backlog=BACKLOG)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        # Guards all that follows, and the listener: a worker may leave while the thread that restarts the process is at
        # it.
        self._lock = threading.Lock()
        self._has_ended = False  # the end of the process has been noted
        self._told = ""  # the reason of its last end, if it reported one
        self._pause = self._starts_at = 0.0  # seconds before it is restarted, and the time of that
        try:
            self._process = self._start()
        except BaseException:
            self._listener.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def restart_if_ended(self) -> bool:
        """Restart the process if it has ended, unless this is closed; return True if this was done. Call it regularly.
        After repeated ends for one reason, such as a full disk, restarts are delayed. Raise OSError if one fails."""
        with self._lock:
            if self._listener.fileno() == -1 or self._process.poll() is None:
                return False
            if not self._has_ended:
                self._has_ended = True
                self._note_end()
            if monotonic() < self._starts_at:
                return False
            self._close_pipe()
            self._process = self._start()
            self._has_ended = False
            return True

    def _note_end(self) -> None:
        """Log how the process has ended. If it has reported the same reason before, only delay the restart."""
        reason = self._reason()
        if reason and reason == self._told and monotonic() < self._starts_at + STEADY:
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
        else:
            self._pause = 0.0
            log.warning(
                "telegrad: the process of the group's directory ended with %s, and is restarted; its last output: %s",
                describe_exit(self._process.returncode),
                reason or self._last_words() or "none",
            )
        self._told = reason
        self._starts_at = monotonic() + self._pause

    def leave(self) -> None:
        """Let the process run until no lease is left."""
        with self._lock:
            self._listener.close()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, and could not be restarted
            # The server takes any byte, like the end of the pipe, for the end of its keeper. Closing the pipe is not
            # enough: processes that this one has forked may hold it.
            self._process.stdin.write(b"\0")
            self._process.stdin.flush()
        self._close_pipe()
        # Otherwise it stays as a zombie.
        run_in_thread("telegrad-keeper", self._process.wait)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the process, and with it the directory."""
        with self._lock:
            self._listener.close()
        self._close_pipe()
        self._process.terminate()  # closing is not enough: forked processes may hold the pipe
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_all(self.path)

    def _start(self) -> subprocess.Popen[bytes]:
        listener = self._listener.fileno()
        # It may outlive this process, so it must not hold pipes from which others read the end of this process's
        # output. Its output pipe carries the reason of its end, because a log on a full disk would be empty.
        with replacing(self.path + LOG) as output:
            process = subprocess.Popen(
                [sys.executable, *SAFE_PATH, "-m", "telegrad._core.stores.directory_server", "0"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=[listener],
                **new_session_options(),
            )
        config = pickle.dumps((os.getpid(), listener, self._keys, self.path, self._limits))
        assert process.stdin is not None
        try:
            process.stdin.write(len(config).to_bytes(4, "little") + config)  # fits into the pipe
            process.stdin.flush()
        except BrokenPipeError:  # it has ended at once, as `restart_if_ended` will find
            pass
        return process

    def _reason(self) -> str:
        """Return why the process has ended, if it reported a reason."""
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)  # forked processes may hold the pipe
        with contextlib.suppress(BlockingIOError):
            return os.read(self._process.stdout.fileno(), LONGEST_REASON).decode("utf-8", "replace")
        return ""

    def _last_words(self) -> str:
        with contextlib.suppress(OSError), open_regular(self.path + LOG) as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - LAST_WORDS))
            return output.read().decode("utf-8", "replace").strip()
        return ""

    def _close_pipe(self) -> None:
        """Close the pipes; a process that still runs ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and the last data cannot be written
            self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
