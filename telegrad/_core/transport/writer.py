"""Writes an outbox to a socket: as much as it accepts now, the rest when it is writable again."""

import array
import itertools
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from telegrad._core.memory.blobs import Chunk
from telegrad._core.memory.staging import StagedCopy, Staging
from telegrad._core.security.noise import JOINED, RECORD, RecordWriter
from telegrad._core.sockets import NOT_NOW, shut

_new = tuple.__new__  # takes half the time of a named tuple's own `__new__`
BUFFERS_AT_ONCE = 32
MOST_BUFFERS = 256  # a connection with more queued buffers or bytes is congested
MOST_BYTES = 64 << 20
GATHERS = hasattr(socket.socket, "sendmsg")  # several buffers in one write; not on Windows


class Writer:
    """Writes to one socket. The calling thread must hold the lock of the connection."""

    def __init__(
        self,
        sock: socket.socket,
        tls_lock: AbstractContextManager[object],
        staging: Staging,
        watch: Callable[[bool], None],
        resume: Callable[[], None],
        records: RecordWriter | None = None,
    ) -> None:
        """`watch` turns polling for writability on or off. `resume` is called after a device's copy, and must flush.

        `records` encrypts data when it is written. The outbox is not encrypted.
        """
        self.outbox: deque[Chunk | StagedCopy] = deque()
        self.waits = False  # for the socket
        self.written = 0  # bytes
        # Called when the outbox is no longer full. One is enough: each releases the queue of the only caller.
        self.drained: Callable[[], None] | None = None
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._tls_lock = tls_lock
        self._staging = staging
        self._watch = watch
        self._resume = resume
        self._watched: StagedCopy | None = None  # the copy to send next, while its device still copies
        self._records = records

    @property
    def is_busy(self) -> bool:
        return bool(self.outbox) or (self._records is not None and bool(self._records.unsent))

    def send(self, data: bytes) -> bool:
        """Send data that `Link.send` has not written directly, or queue it; return True if all was sent."""
        records = self._records
        try:
            # A record that was encrypted must be sent, and before any later one: its number is its nonce. So the rest
            # of a partial write is kept as ciphertext, and the plain outbox is not used for it.
            if records is not None and not (self.outbox or records.unsent) and len(data) <= RECORD:
                record = records.encrypt(data)
                sent = 0
                try:
                    sent = self._sock.send(record)
                except OSError:
                    pass  # `flush` gets the same error
                if sent < len(record):
                    records.keep(memoryview(record)[sent:])
                    self.flush()
                return sent == len(record)
            self.outbox.append(_new(Chunk, (data, (), None)))
            self.flush()
        except BaseException:
            self.end()
            raise
        return False

    def flush(self, is_writable: bool = False) -> None:
        """Write as much as the socket accepts. The poller, or the thread that watches devices, continues later."""
        # The socket was full, and the poller has not reported otherwise: another write would only cost a system call.
        if self.waits and not is_writable:
            return
        records = self._records
        waits = False
        try:
            if records is None:
                self._write_plain()
            else:
                self._write_records(records)
        except NOT_NOW:
            waits = True
        except OSError:
            self.end()  # the reader thread gets the same error and reports it
        except BaseException:  # of a device, or without memory
            self.end()
            raise
        if waits != self.waits:
            self.waits = waits
            self._watch(waits)

    def end(self) -> None:
        """Send nothing any more: it is unknown which part of the outbox was sent or encrypted.

        Call this before the lock is released, as another thread would send its message in the place of the rest.
        """
        self.clear()
        shut(self._sock)

    def clear(self) -> None:
        self.outbox.clear()
        if self._records is not None:
            self._records.clear()

    def _write_plain(self) -> None:
        outbox = self.outbox
        while outbox and self._has_next():
            sent = self._write()
            self.written += sent
            while sent:
                chunk = outbox[0]
                assert isinstance(chunk, Chunk)
                if sent < len(chunk.data):
                    outbox[0] = Chunk(memoryview(chunk.data)[sent:], (), chunk.keeper)
                    break
                sent -= len(chunk.data)
                outbox.popleft()

    def _write_records(self, records: RecordWriter) -> None:
        while True:
            if not records.unsent:
                if not (self.outbox and self._has_next()):
                    return
                self._encrypt(records)
            sent = self._sock.send(records.unsent)
            self.written += sent
            records.sent(sent)

    def _encrypt(self, records: RecordWriter) -> None:
        """Encrypt the beginning of the outbox, as much as one write sends."""
        outbox = self.outbox
        small: list[Chunk] = []  # share one record; a chunk's keeper owns its memory
        size, most = 0, JOINED
        while outbox and isinstance(chunk := outbox[0], Chunk):
            data = chunk.data
            if len(data) < JOINED:
                size += len(data)
                if size > most:
                    break
                small.append(chunk)
                outbox.popleft()
                continue
            if small:
                records.add(_joined(small))
                small, size = [], 0
            room = records.room()
            if room <= 0:
                break
            records.add(memoryview(data)[:room])
            if len(data) > room:
                outbox[0] = Chunk(memoryview(data)[room:], (), chunk.keeper)
                break
            outbox.popleft()
            most = min(JOINED, records.room())
        if small and records.unsent:
            records.add(_joined(small))
        elif small:
            records.keep(records.encrypt(_joined(small)))

    def _has_next(self) -> bool:
        """Return True if the first entry can be sent; for a device's copy, insert its next piece before it."""
        first = self.outbox[0]
        if not isinstance(first, StagedCopy):
            return True
        # The device still copies the next piece. The entries behind this one wait too, since frames keep their order; a
        # device thread calls `resume` when the piece is there.
        if first is self._watched and not first.ready:
            return False
        piece = first.next()
        if piece is not None:
            self.outbox.appendleft(Chunk(piece[0], (), piece[1]))
            return True
        if first.over:
            self.outbox.popleft()
            return bool(self.outbox) and self._has_next()
        self._watched = first
        self._staging.watch(first, self._resume)
        return False

    @property
    def is_full(self) -> bool:
        """Return True if nothing should be added because too much is queued. May be called from any thread."""
        if not self.waits:
            return False
        waiting = [len(chunk.data) for chunk in self.outbox.copy() if isinstance(chunk, Chunk)]
        return len(waiting) > MOST_BUFFERS or sum(waiting) > MOST_BYTES

    def take_drained(self) -> Callable[[], None]:
        """Return the function to call because the outbox is not full; it may do nothing."""
        act, self.drained = (_nothing, self.drained) if self.is_full else (self.drained or _nothing, None)
        return act

    def resume(self) -> None:
        """Continue after a piece has been copied or a device has failed."""
        self._watched = None
        self.flush()

    def _write(self) -> int:
        first = self.outbox[0]
        assert isinstance(first, Chunk)
        # TLS sockets have no `sendmsg`.
        if self._tls:
            with self._tls_lock:
                return self._sock.send(first.data)
        if not GATHERS or (len(self.outbox) == 1 and not first.fds):
            return self._sock.send(first.data)
        # Descriptors are attached to the first byte of a write, and the receiver takes them in the order of the frames
        # that name them. So a chunk with descriptors begins a write of its own.
        buffers = [first.data]
        for chunk in itertools.islice(self.outbox, 1, BUFFERS_AT_ONCE):
            if isinstance(chunk, StagedCopy) or chunk.fds:
                break
            buffers.append(chunk.data)
        if first.fds:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", first.fds))
            return self._sock.sendmsg(buffers, [rights])
        return self._sock.sendmsg(buffers)


def _joined(chunks: Iterable[Chunk]) -> bytes:
    return b"".join([chunk.data for chunk in chunks])


def _nothing() -> None:
    """Do nothing."""
