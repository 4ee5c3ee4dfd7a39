"""One connection after its handshake: sends and receives frames.

Sending never blocks: data that the socket does not accept stays in the outbox, and the poller sends it later. Only the
thread that holds the right to read (`reading`) may read; all else may be called from any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from telegrad._core.memory import blobs
from telegrad._core.memory.blobs import Chunk, IncomingBlob, MemorySources, Outgoing, Prepared
from telegrad._core.memory.extra_streams import NO_LANES, ExtraStreams
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.security.noise import Ciphers, DecryptionFailed, RecordReader, RecordWriter, not_authentic
from telegrad._core.sockets import NOT_NOW, process_at, shut
from telegrad._core.transport.connect import LoopEnd, OpenedChannel, broken, departed_error, lost
from telegrad._core.transport.poller import Poller, Waker, wait_readable
from telegrad._core.transport.reading import ReadRight
from telegrad._core.transport.writer import Writer
from telegrad._core.wire import messages
from telegrad._core.wire.messages import PREFIX, SCRATCH, FrameReader, Message, encode, pack_numbers, unpack_numbers
from telegrad.errors import PeerError, ProtocolViolation

log = logging.getLogger("telegrad")
READ_AT_ONCE = 8  # reads per turn: a busy connection must not starve the others
# Bytes of frames per turn, and the rest of the last one, if the peer makes calls: each may cost a short call.
# 16 KB hold up to 300 calls. With 4 KB, and the time limit in `Polling._spin`, the processor time from one look at all
# connections to the next is 0.8 ms in place of 1.3 (p99), beside a caller whose calls return at once.
CALLS_AT_ONCE = 4 << 10


class LinkHandlers(NamedTuple):
    on_messages: Callable[[Link, Iterable[Message]], None]  # called on the reading thread
    on_closed: Callable[[Link, PeerError], None]
    prompt: bool  # the other end waits for responses, so its next frame follows soon
    expected: Callable[[], object] = partial(bool, True)  # returns True if a response is expected here
    widen: Callable[[Link, bool], None] | None = None  # makes lanes, for sending if its second argument is True


class Link:
    """A connection to the worker named `peer`."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        poller: Poller,
        stores: MemorySources,
        handlers: LinkHandlers,
        ciphers: Ciphers | None = None,
    ) -> None:
        """With `ciphers`, all data is sent in encrypted records."""
        self._on_messages, self._on_closed, self.prompt, expected, widen = handlers
        sock.setblocking(False)
        self.peer = peer
        self.closed: PeerError | None = None
        self.received = 0  # bytes received over the socket; for the reader thread
        self._sock, self.fileno = sock, sock.fileno
        self._tls = isinstance(sock, ssl.SSLSocket)
        # OpenSSL keeps one state for both directions of a connection, and two threads may use them at once: the thread
        # that reads does not hold `_lock`.
        self._tls_lock = threading.Lock() if self._tls else contextlib.nullcontext()
        self._poller = poller
        self._shares = stores.pool is not None  # descriptors may be received
        self.process = process_at(sock) if self._shares else 0  # of the peer, or 0
        self._over: str | None = None  # set by BYE, the peer's last message: how it left
        self.lanes_in, self.lanes_out = (
            NO_LANES if self._shares else ExtraStreams(sends, self._broke, widen and partial(widen, self, sends))
            for sends in (False, True)
        )
        self._incoming = IncomingBlob(stores, self.lanes_in)
        self._maps = self._incoming.maps
        # While the frame reader awaits lanes, the reading thread has nothing to read and must call `stop_reading`.
        self.reader = FrameReader(self._incoming.allocate, self._incoming.attach, self._control, self.lanes_in.is_idle)
        watch = partial(poller.watch, self)
        self.reading = ReadRight(threading.Lock(), watch, expected, self._finish, self.reader, self._continue_on_lanes)
        self.stop_reading = self.reading.give_back
        self._recv_into = self._recv_tls if self._tls else sock.recv_into
        self._is_limited = self.prompt and not self._tls  # between frames, at most CALLS_AT_ONCE bytes are read
        self._buffer: Callable[[int], memoryview] = self.reader.buffer  # memory for the next bytes from the socket
        # Without records, this memory is always the same between frames.
        self._first: memoryview | None = self.reader.buffer(CALLS_AT_ONCE if self._is_limited else SCRATCH)
        self._arrived: Callable[[int], None] = self._take  # called with the number of bytes received there
        writes: RecordWriter | None = None
        if ciphers is not None:
            records = RecordReader(ciphers.receiving)
            self._buffer, self._first, self._arrived = records.buffer, None, partial(self._decrypt, records)
            writes = RecordWriter(ciphers.sending)
        # Guards all below, setting `closed`, and writing to the socket. Frames must enter the socket in the order in
        # which their records are numbered and their blocks are lent, so the lock is held while they are written. The
        # socket never blocks.
        self._lock = threading.Lock()
        self.sent = 0  # bytes of messages and of their tensors
        self._outgoing = Outgoing(stores, self.lanes_out)
        self._writer = Writer(sock, self._tls_lock, stores.staging, partial(watch, None), self._resume, writes)
        self._is_plain = writes is None and not self._tls
        self._outbox = self._writer.outbox

    @property
    def taken(self) -> int:
        """The number of bytes received, including those in shared memory."""
        return self.received + self._incoming.attached

    @property
    def written(self) -> int:
        return self._writer.written

    @property
    def is_sending(self) -> bool:
        return self._writer.is_busy

    @property
    def is_congested(self) -> bool:
        """Return True if the outbox is over its limit because the peer does not read. Takes no lock."""
        return self._writer.waits and self._writer.is_full

    def when_drained(self, act: Callable[[], None]) -> None:
        """Call `act` as soon as the connection is not congested or has ended. This replaces an earlier `act`."""
        with self._lock:
            self._writer.drained = act
        self._tell_drained()

    def _tell_drained(self) -> None:
        if self._writer.drained is not None:
            with self._lock:
                act = self._writer.take_drained()
            act()

    # Sending

    def send(self, message: Message, later: bool = False) -> bool:
        """Send a message, or with `later` queue it until `on_writable`. Return True if it was sent directly.

        Blobs are taken one by one, and those that are copied are released. Raise PeerError if the connection has ended.
        """
        if message.blobs:
            self._send_with_blobs(message)
            return False
        head, meta, body = message.head, message.meta, message.body
        # `encode`, inlined, since this runs for each message
        prefix = PREFIX.pack(message.kind, message.flags, len(head), len(meta), 0, len(body), message.id)
        data = b"".join((prefix, head, meta, body))
        try:
            with self._lock:
                if self.closed is not None:
                    raise fresh(self.closed)
                self.sent += len(data)
                if self._maps.released:
                    self._queue_release()
                if later:
                    self._outbox.append(tuple.__new__(Chunk, (data, (), None)))
                    return False
                if self._is_plain and not self._outbox:
                    try:
                        data = data[self._sock.send(data) :]
                        if not data:
                            return True
                    except OSError:
                        pass  # the writer gets the same error
                return self._writer.send(data)
        except PeerError:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def _send_with_blobs(self, message: Message) -> None:
        prepared: list[Prepared] = []
        left, are_prepared = blobs.MOST_NEW, False
        try:
            for blob in message.blobs:
                # This copies a blob that is sent in lent memory, which takes long for large tensors and needs no lock
                # of the connection. Only the table of the frame and the order of the chunks need it (`_send_prepared`).
                made = self._outgoing.prepare(blob, shares=left > 0)
                del blob  # release a blob that was copied
                prepared.append(made)
                if made.block is not None:
                    left -= self._outgoing.passes_descriptor(made)
            are_prepared = True
            self._send_prepared(message, prepared)
        except BaseException as error:
            self._outgoing.rollback(prepared)
            if are_prepared and not isinstance(error, PeerError):
                self.fail(error)  # half of the message may be in the outbox
            raise

    def _send_prepared(self, message: Message, prepared: list[Prepared]) -> None:
        with self._lock:
            if self.closed is not None:
                raise fresh(self.closed)
            if self._maps.released:
                self._queue_release()
            try:
                table, fds, before, behind = self._outgoing.commit(prepared)
                self._outbox.extend(before)
                data = encode(message, table)
                self.sent += len(data) + sum(each.size for each in prepared)
                # Send descriptors above the limit of one write ahead: the receiver takes them in the table's order.
                most = blobs.DESCRIPTORS_AT_ONCE
                while len(fds) > most:
                    self._outbox.append(Chunk(encode(Message(messages.RELEASE)), tuple(fds[:most])))
                    del fds[:most]
                self._outbox.append(Chunk(data, tuple(fds)))
                self._outbox.extend(behind)
                self._writer.flush()
            except BaseException:
                self._writer.end()
                raise
        self.lanes_out.make_wanted()
        if self._outgoing.way:
            self._log_way()

    def _log_way(self) -> None:
        with self._lock:
            way, self._outgoing.way = self._outgoing.way, ""
        if way:  # without the lock: a handler of the program may send the line to the same worker
            log.info("telegrad: tensors on accelerators go to worker %r %s", self.peer, way)

    def _queue_release(self) -> None:
        released = self._maps.released
        numbers = [released.popleft() for _ in range(len(released))]  # other threads only append
        try:
            self._outbox.append(Chunk(encode(Message(messages.RELEASE, body=pack_numbers(numbers)))))
        except MemoryError:
            released.extend(numbers)
            raise

    def release(self) -> None:
        """Notify the peer which of its blocks are free again, if any. Unmap those that are not lent any more."""
        self._maps.lasting.trim()
        self._maps.lender.tick()
        if self._maps.released:
            with self._lock:
                if self.closed is None:
                    self._queue_release()
            self._write(self._writer.flush)

    def ask(self) -> None:
        with contextlib.suppress(PeerError):  # the connection has ended, and this was reported
            self.send(Message(messages.PULSE, 1))

    def has_unread(self) -> bool:
        with contextlib.suppress(OSError, ValueError):  # the connection has ended
            return wait_readable(self._sock, 0.0)
        return False

    def retire(self, numbers: list[int]) -> None:
        """Notify the peer which blocks this worker dropped."""
        with self._lock:
            known = self._outgoing.forget(numbers)
            if known and self.closed is None:
                self._outbox.append(Chunk(encode(Message(messages.RETIRE, body=pack_numbers(known)))))
        self._write(self._writer.flush)

    def on_writable(self) -> None:
        self._write(partial(self._writer.flush, is_writable=True))
        self._tell_drained()

    def _resume(self) -> None:
        """Continue writing after a device has copied the next piece, or has failed."""
        self._write(self._writer.resume)
        self._tell_drained()

    def _write(self, step: Callable[[], None]) -> None:
        """Run a step of the writer. An error ends the connection, as parts of messages may have been sent."""
        try:
            with self._lock:
                if self.closed is None:
                    step()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    # Receiving

    def feed(self, data: bytes) -> None:
        """Process bytes that were received together with the end of the handshake."""
        view = memoryview(data)
        while view and self.closed is None:
            buffer = self._buffer(SCRATCH)
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            self.received += count
            self._arrived(count)
            view = view[count:]

    def on_readable(self) -> bool:
        """Read available data unless another thread is reading."""
        if not self.reading.begin():
            return False
        try:
            return self.read()
        finally:
            self.stop_reading()

    def _continue_on_lanes(self) -> bool:
        """While the next frame waits for lanes, let the lane that ends last go on; return False if none is needed."""
        while self.reader.awaits_lanes and self.closed is None:
            # The right goes to the lanes before they are asked to continue: from `afterwards` on, a lane may call
            # `_go_on` at once. If no stripe is under way any more, `afterwards` returns False and this thread reads the
            # rest itself. It is the only one to do so, since no lane was given the continuation.
            self.reading.pass_on()
            if self.lanes_in.afterwards(self._go_on):
                return True
            self.read()
        return False

    def _go_on(self) -> None:
        """Continue reading after the lanes have received all stripes, or the connection has ended."""
        self.read()
        self.stop_reading()

    def wait_readable(self, timeout: float | None, waker: Waker | None = None) -> None:
        """With `reading` held: sleep until there is data, the connection ends, time is up, or `waker` is woken."""
        if self.reader.awaits_lanes:
            return
        wait_readable(self._sock, timeout, waker)

    def read(self) -> bool:
        """Read available data and process its frames. Return True if there was any. The caller must hold `reading`."""
        reader, sock, shares, first = self.reader, self._sock, self._shares, self._first
        # The frame that awaited lanes may be complete now. No bytes are needed to find out.
        if came := reader.awaits_lanes and self.closed is None:
            self._arrived(0)
        for _ in itertools.count() if self._tls else range(READ_AT_ONCE):  # TLS buffers bytes that no poller sees
            if reader.awaits_lanes or self.closed is not None:
                return came
            # A message in the middle of its memory is read in full. Between frames, a connection over which calls
            # arrive is read in small portions, since each frame may be a call.
            limited = self._is_limited and reader.target is None
            most = CALLS_AT_ONCE if limited else SCRATCH
            buffer = first if first and reader.target is None and not reader.end else self._buffer(most)
            try:
                # Inlined, because each call has two reads on either side.
                if shares:
                    count, ancillary, flags, _ = sock.recvmsg_into([buffer], blobs.ANCILLARY, blobs.CLOSE_ON_EXEC)
                    if ancillary or flags & blobs.TRUNCATED:
                        self._maps.take_descriptors(ancillary, flags)
                else:
                    count = self._recv_into(buffer)
            except NOT_NOW:
                return came
            except (ProtocolViolation, OSError) as error:
                self._broke(error)
                return came
            if not count:
                self._broke(None)
                return came
            came = True
            self.received += count
            self._arrived(count)
            # A buffer that was not filled mostly shows that the socket is empty. Another read would cost a system call.
            if (limited and reader.missing <= CALLS_AT_ONCE) or (count < len(buffer) and not self._tls):
                return True
        return came

    def _recv_tls(self, buffer: memoryview) -> int:
        with self._tls_lock:
            return self._sock.recv_into(buffer)

    def _take(self, count: int, data: bytes | None = None) -> None:
        """Process the frames that these bytes complete. After an invalid frame, close the connection."""
        try:
            self._on_messages(self, self.reader.advance(count, data))
        except Exception as error:
            self.close(broken(self.peer, error, f"it sent an invalid frame ({error})"))
        if self._over is not None:
            self.close(departed_error(self.peer, self._over))

    def _decrypt(self, records: RecordReader, count: int) -> None:
        """Decrypt the complete records, each into its destination, and process the frames."""
        reader = self.reader
        if reader.awaits_lanes:
            self._take(0)
        while not (reader.awaits_lanes or self.closed is not None):
            try:
                if reader.target is not None or reader.end:
                    content = None
                else:  # between frames: a small record needs no buffer
                    content, count = records.decrypt(count), 0
                size = len(content) if content else records.decrypt_into(reader.buffer(), count)
            except (DecryptionFailed, ProtocolViolation) as error:
                self.close(lost(self.peer, not_authentic(error)))
                return
            if not size:
                return
            self._take(size, content or None)
            if not records.has_more:
                return
            count = 0

    def _control(self, frame: Message) -> bool:
        """Process a frame of the connection itself; return False for any other frame."""
        if frame.kind == messages.RELEASE:
            with self._lock:
                numbers = self._outgoing.returned(unpack_numbers(frame.body))
            self._outgoing.reclaim(numbers)
        elif frame.kind == messages.RETIRE:
            self._maps.retire(unpack_numbers(frame.body))
        elif frame.kind == messages.LEND:  # the next frame may use this block of an accelerator
            said = self._incoming.open(frame.id, bytes(frame.body))
            if said is not None:
                self.send(Message(messages.OPENED, frame.id, body=said.encode()))
        elif frame.kind == messages.OPENED:
            with self._lock:
                self._outgoing.opened(bytes(frame.body).decode())
            self._log_way()
        elif frame.kind == messages.BYE:
            self._over = bytes(frame.body).decode()
        elif frame.kind != messages.PULSE:
            return False
        elif frame.id and not self.is_congested:  # a congested peer gets other frames anyway
            self.send(Message(messages.PULSE))
        return True

    # Closing

    def _broke(self, error: Exception | None) -> None:
        """Close after an error, or with None after the other end has closed the socket."""
        if error is None:
            why = "the connection ended: it died, or its program ended without calling shutdown()"
            self.close(lost(self.peer, why))
        else:
            did = "it broke the protocol:" if isinstance(error, ProtocolViolation) else "the connection broke:"
            self.close(broken(self.peer, error, f"{did} {error}"))

    def close(self, reason: PeerError) -> None:
        """End the connection; `on_closed` is called once."""
        with self._lock:
            if self.closed is not None:
                return
            self.closed = reason
            self._writer.clear()
            self._outgoing.abandon()
            # Shut down, not closed: another thread may be reading or polling this descriptor, and the number of a
            # closed descriptor may belong to another file the next moment. The shutdown wakes that thread; `_finish`
            # closes the descriptor once no thread reads.
            shut(self._sock)
        self._tell_drained()
        self.reading.end()
        self._poller.forget(self)
        for lanes in (self.lanes_in, self.lanes_out):
            lanes.close()
        # Without a lock: this ends the calls that the connection carried, and tells other layers of the loss.
        self._on_closed(self, reason)

    def join(self, sends: bool, channel: OpenedChannel) -> None:
        (self.lanes_out if sends else self.lanes_in).add(channel.sock, channel.leftover, channel.ciphers)

    def fail(self, error: BaseException) -> None:
        """Close the connection because a message could not be sent (no memory, ...): no response will come."""
        self.close(lost(self.peer, f"a message could not be sent ({error!r})"))

    def abandon(self) -> None:
        """Close the descriptors in a forked child. Send nothing, because the peer is connected to the parent."""
        self._sock.close()
        for lanes in (self.lanes_in, self.lanes_out):
            lanes.abandon()

    def _finish(self) -> None:
        """Close the descriptor, after the last reader has stopped."""
        with self._lock:
            self._maps.close()
            self._poller.forget(self)  # the thread in `close` may not have done this yet
            with contextlib.suppress(OSError):  # the program has closed the descriptor
                self._sock.close()


AnyLink = Link | LoopEnd
