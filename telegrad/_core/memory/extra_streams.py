"""Additional TCP streams for very large tensors.

One TCP stream is limited by one processor, and many networks limit each stream. When a connection to another host has
carried a tensor of STRIPE_FROM bytes in one direction, it gets LANES further streams for that direction. From then on,
such tensors are cut into stripes. The first stripe is sent on the connection itself, which keeps frames in order; each
other stripe is sent on one lane, with one thread at each end. Stripes have no header: the table of their frame says
which stripes follow.

The end that opened the connection creates the lanes. The receiving end sends READY on each lane; only then may the
other end use them: a frame with stripes is a violation of the protocol at an end that has not yet got all lanes.

All lanes carry stripes in the same order, the one in which frames are written or read on the connection. `_put`
therefore adds to all queues under one lock. A reader that gets to the end of a frame does not wait for its stripes: it
asks for a call after the last one (`afterwards`), and stops reading. `_under_way` and `_then` are changed under the
same lock, so either the reader learns that no stripe is missing, or the lane with the last stripe finds the call.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from telegrad._core.forks import renewed
from telegrad._core.processes import processors
from telegrad._core.security.noise import RECORD, Ciphers, DecryptionFailed, RecordReader, RecordWriter, not_authentic
from telegrad._core.sockets import shut
from telegrad._core.threads import Thread
from telegrad.errors import ProtocolViolation

LANES = 3
# Each stream has a thread at either end. With fewer processors than streams, one stream was up to 40% faster.
STRIPE_FROM = 8 << 20 if processors() > LANES else 256 << 20
READY = b"!"
_ALIGN = 4096

_Stripe = tuple[Iterable[memoryview], Any]  # its memory in parts, and the object that owns it
_Stripes = SimpleQueue[_Stripe | None]


def dropped(size: int) -> Iterator[memoryview]:
    """Yield buffers to receive and discard `size` bytes: the same buffer each time, at most one record long."""
    place = memoryview(bytearray(min(size, RECORD)))
    for at in range(0, size, RECORD):
        yield place[: size - at]


def _cuts(size: int) -> list[slice]:
    """Return the slices of the stripes of `size` bytes; the last may be short or empty."""
    step = -(-size // (LANES + 1))
    step += -step % _ALIGN
    return [slice(number * step, (number + 1) * step) for number in range(LANES + 1)]


class ExtraStreams:
    """The lanes of one direction, at one end of a connection."""

    def __init__(self, sends: bool, failed: Callable[[Exception], None], make: Callable[[], None] | None) -> None:
        """`make` creates the lanes on their first use; it is None at the end that does not create them."""
        self.ready = False  # stripes may be sent
        self.wanted = False  # `make_wanted` must be called
        self._sends = sends
        self._failed = failed
        self._make = make
        # Guards all below, that `make` is called once, and the order of stripes. `is_idle` reads without the lock.
        # `close` iterates over both lists without it, because nothing is added to them after `_closed` is set.
        self._lock = renewed(threading.Lock())  # because NO_LANES outlives any worker
        self._socks: list[socket.socket] = []
        self._stripes: list[_Stripes] = []
        self._greeted = 0
        self._under_way = 0
        self._then: Callable[[], None] | None = None  # called when no stripe is in transit
        self._closed = False

    def serve(self, size: int) -> bool:
        """Return True if a tensor of `size` bytes is sent in stripes. If not, call `make_wanted` afterwards."""
        if size < STRIPE_FROM:
            return False
        self.wanted = self._make is not None
        return self.ready

    def make_wanted(self) -> None:
        """Create the lanes if `serve` asked for them. Call it without a lock: it starts a thread."""
        if not self.wanted:
            return
        with self._lock:
            make, self._make, self.wanted = self._make, None, False
        if make is not None:
            make()

    def add(self, sock: socket.socket, heard: bytes, ciphers: Ciphers | None = None) -> None:
        """Add a stream, from which the bytes `heard` have been read already."""
        sock.setblocking(True)
        stripes: _Stripes = SimpleQueue()
        with self._lock:
            refused = self._closed or len(self._socks) == LANES
            if not refused:
                self._socks.append(sock)
                self._stripes.append(stripes)
        if refused:
            sock.close()
            return
        stream = _Stream(sock, heard) if ciphers is None else _EncryptedStream(sock, heard, ciphers)
        lane = Thread(target=self._run, args=(stream, stripes), name="telegrad-lane")
        try:
            lane.start()
        # READY is then not exchanged on this lane, so no stripes are sent in this direction.
        except (RuntimeError, MemoryError):  # no thread can be started: no stripes
            sock.close()

    def carry(self, memory: memoryview, keeper: Any) -> memoryview:
        """Pass all stripes of `memory` but the first to the lanes; return the first."""
        cuts = _cuts(len(memory))
        self._put([((memory[cut],), keeper) for cut in cuts[1:]])
        return memory[cuts[0]]

    def drop(self, size: int) -> Iterator[memoryview]:
        """Let the lanes receive and discard all stripes of `size` bytes but the first; return buffers for the first."""
        first, *others = [dropped(len(range(size)[cut])) for cut in _cuts(size)]
        self._put([(parts, None) for parts in others])
        return first

    def _put(self, moves: list[_Stripe]) -> None:
        with self._lock:
            if len(self._stripes) < LANES:
                raise ProtocolViolation("a tensor was announced in stripes, but there are no streams for them")
            self._under_way += LANES
            for stripes, move in zip(self._stripes, moves, strict=True):
                stripes.put(move)

    def afterwards(self, then: Callable[[], None]) -> bool:
        """Call `then` as soon as no stripe is in transit, or when closed; return False if none is in transit now."""
        with self._lock:
            if not self._under_way or self._closed:
                return False
            self._then = then
            return True

    def is_idle(self) -> bool:
        return not self._under_way

    def _run(self, stream: "_Stream", stripes: _Stripes) -> None:
        move = stream.send if self._sends else stream.receive
        with contextlib.closing(stream.sock):
            try:
                if not self._greet(stream):
                    return
                while (stripe := stripes.get()) is not None:
                    # A dropped stripe is a generator that yields one buffer again and again, so each part is moved
                    # before the next is taken.
                    for _ in map(move, stripe[0]):
                        pass
                    del stripe  # release the memory before waiting for the next stripe
                    self._moved()
            except Exception as error:
                self._failed(error)

    def _greet(self, stream: "_Stream") -> bool:
        """Return True if the other end has this stream too. Without it, this one is never used."""
        with contextlib.suppress(OSError):
            if not self._sends:
                stream.send(memoryview(READY))
                return True
            stream.receive(memoryview(bytearray(len(READY))))
            with self._lock:
                self._greeted += 1
                self.ready = self._greeted == LANES
            return True
        return False

    def _moved(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way:
                return
            then, self._then = self._then, None
        if then is not None:
            then()

    def close(self) -> None:
        """Shut down the streams; their threads end afterwards."""
        with self._lock:
            self._closed = True
            then, self._then = self._then, None
        # A lane waits in its queue or in a call of its socket, so both are ended. A lane whose thread starts later ends
        # by the same two.
        for stripes in self._stripes:
            stripes.put(None)
        for sock in self._socks:
            shut(sock)
        if then is not None:
            then()

    def abandon(self) -> None:
        """Only close the descriptors."""
        for sock in self._socks:
            sock.close()


NO_LANES = ExtraStreams(False, lambda _: None, None)  # for connections that use shared memory


class _Stream:
    """One lane's stream, used by the thread of the lane."""

    def __init__(self, sock: socket.socket, heard: bytes) -> None:
        self.sock = sock
        self._heard = memoryview(heard)

    def send(self, stripe: memoryview) -> None:
        self.sock.sendall(stripe)  # `socket.socket.sendall`: TLS sockets override it

    def receive(self, stripe: memoryview) -> None:
        """Fill `stripe`; raise OSError if the stream ended first."""
        while stripe:
            stripe = stripe[self._receive(stripe) :]

    def _receive(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._heard))
        if count:
            buffer[:count] = self._heard[:count]
            self._heard = self._heard[count:]
            return count
        count = self.sock.recv_into(buffer)
        if not count:
            raise ConnectionError("one of its streams ended")
        return count


class _EncryptedStream(_Stream):
    """A lane's stream that carries stripes in encrypted records."""

    def __init__(self, sock: socket.socket, heard: bytes, ciphers: Ciphers) -> None:
        super().__init__(sock, heard)
        self._writer = RecordWriter(ciphers.sending)
        self._reader = RecordReader(ciphers.receiving)

    def send(self, stripe: memoryview) -> None:
        for at in range(0, len(stripe), RECORD):
            self._writer.add(stripe[at : at + RECORD])
            self.sock.sendall(self._writer.unsent)
            self._writer.sent(len(self._writer.unsent))

    def receive(self, stripe: memoryview) -> None:
        came = 0
        while stripe:
            try:
                count = self._reader.decrypt_into(stripe, came)
            except (DecryptionFailed, ProtocolViolation) as error:
                raise ConnectionError(not_authentic(error)) from error
            stripe = stripe[count:]
            came = 0 if count else self._receive(self._reader.buffer())
