"""Several streams for one very large tensor.

One stream of TCP is no faster than what one processor moves, and many networks bound each stream, too. So a connection
to another host that has carried a tensor of STRIPE_FROM bytes gets LANES further streams for that direction, and from
then on such tensors are cut into stripes. The first goes through the connection itself, so that frames keep their
order; each other goes by a lane, which has a thread at either end. Stripes have no header: the table of the frame that
they belong to says which come.

The end that connected makes the lanes. The end that receives says READY on each; only then the other may use them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from telegrad._core.atfork import renewed
from telegrad._core.security.noise import Ciphers, DecryptionFailed
from telegrad._core.security.records import RECORD, RecordReader, RecordWriter, not_authentic
from telegrad._core.sockets import shut
from telegrad._core.threads import Thread
from telegrad.errors import ProtocolViolation

STRIPE_FROM = 8 << 20
LANES = 3
READY = b"!"
_ALIGN = 4096

_Stripe = tuple[Iterable[memoryview], Any]  # its memory, in parts, and what owns that
_Stripes = SimpleQueue[_Stripe | None]


def dropped(size: int) -> Iterator[memoryview]:
    """Places to receive `size` bytes into that nobody needs: the same one over and over, as long as a record."""
    place = memoryview(bytearray(min(size, RECORD)))
    for at in range(0, size, RECORD):
        yield place[: size - at]


def _cuts(size: int) -> list[slice]:
    """Where the stripes of `size` bytes lie; the last may be short, or empty."""
    step = -(-size // (LANES + 1))
    step += -step % _ALIGN
    return [slice(number * step, (number + 1) * step) for number in range(LANES + 1)]


class Lanes:
    """Those of one direction, at one end."""

    def __init__(self, sends: bool, failed: Callable[[Exception], None], make: Callable[[], None] | None) -> None:
        """`make` is called once, when there is use for lanes, at the end that makes them."""
        self.ready = False  # stripes may be sent
        self.wanted = False  # `make_wanted` is due
        self._sends = sends
        self._failed = failed
        self._make = make
        # Guards all below, that `_make` is taken once, and the order of stripes. `is_idle` peeks, and `close` looks at
        # both lists without, since nothing is added to them any more.
        self._lock = renewed(threading.Lock())  # since NO_LANES outlives any worker
        self._socks: list[socket.socket] = []
        self._stripes: list[_Stripes] = []
        self._greeted = 0
        self._under_way = 0
        self._then: Callable[[], None] | None = None  # to be called when nothing is under way
        self._closed = False

    def serve(self, size: int) -> bool:
        """Whether a tensor of that size travels in stripes; if not, the next may, after `make_wanted`."""
        if size < STRIPE_FROM:
            return False
        self.wanted = self._make is not None
        return self.ready

    def make_wanted(self) -> None:
        """Have them made, where there was use for them; not under a lock, since this starts a thread."""
        if not self.wanted:
            return
        with self._lock:
            make, self._make, self.wanted = self._make, None, False
        if make is not None:
            make()

    def add(self, sock: socket.socket, heard: bytes, ciphers: Ciphers | None = None) -> None:
        """Take in a further stream, on which the other end has said `heard` already."""
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
        except (RuntimeError, MemoryError):  # there is no thread left; and so no stripes
            sock.close()

    def carry(self, memory: memoryview, keeper: Any) -> memoryview:
        """Have lanes move all stripes of `memory` but the first, which is returned."""
        cuts = _cuts(len(memory))
        self._put([((memory[cut],), keeper) for cut in cuts[1:]])
        return memory[cuts[0]]

    def drop(self, size: int) -> Iterator[memoryview]:
        """Have lanes receive and drop all stripes of `size` bytes but the first, whose places are returned."""
        first, *others = [dropped(len(range(size)[cut])) for cut in _cuts(size)]
        self._put([(parts, None) for parts in others])
        return first

    def _put(self, moves: list[_Stripe]) -> None:
        with self._lock:
            if len(self._stripes) < LANES:
                raise ProtocolViolation("a tensor was announced in stripes, and there are no streams for them")
            self._under_way += LANES
            for stripes, move in zip(self._stripes, moves, strict=True):
                stripes.put(move)

    def afterwards(self, then: Callable[[], None]) -> bool:
        """Have `then` called as soon as nothing is under way, or all is at its end; False where nothing is."""
        with self._lock:
            if not self._under_way or self._closed:
                return False
            self._then = then
            return True

    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def _run(self, stream: _Stream, stripes: _Stripes) -> None:
        move = stream.send if self._sends else stream.receive
        with contextlib.closing(stream.sock):
            try:
                if not self._greet(stream):
                    return
                while (stripe := stripes.get()) is not None:
                    for _ in map(move, stripe[0]):
                        pass
                    del stripe  # and the memory, before waiting for more
                    self._moved()
            except Exception as error:
                self._failed(error)

    def _greet(self, stream: _Stream) -> bool:
        """Whether the other end has this stream, too; that it has not harms nobody, while it is not used."""
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
        """End the streams; their threads follow."""
        with self._lock:
            self._closed = True
            then, self._then = self._then, None
        for stripes in self._stripes:
            stripes.put(None)
        for sock in self._socks:
            shut(sock)
        if then is not None:
            then()

    def abandon(self) -> None:
        """Close the descriptors, and nothing else."""
        for sock in self._socks:
            sock.close()


NO_LANES = Lanes(False, lambda _: None, None)  # of each connection that shares memory with its other end


class _Stream:
    """A further stream, for its thread."""

    def __init__(self, sock: socket.socket, heard: bytes) -> None:
        self.sock = sock
        self._heard = memoryview(heard)

    def send(self, stripe: memoryview) -> None:
        self.sock.sendall(stripe)  # of the socket's own class: TLS has another

    def receive(self, stripe: memoryview) -> None:
        """Fill `stripe`.

        Raises:
            OSError: the stream has ended before.
        """
        while stripe:
            stripe = stripe[self._receive(stripe) :]

    def _receive(self, buffer: memoryview) -> int:
        """Write to `buffer` what comes next; how many bytes."""
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
    """One whose stripes cross in records."""

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
