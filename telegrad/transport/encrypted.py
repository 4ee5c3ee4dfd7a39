"""A connection whose frames cross in records (`records`): those over TCP, unless TLS protects them."""

from __future__ import annotations

from typing import Any

from telegrad.errors import ProtocolViolation
from telegrad.transport.endings import lost
from telegrad.transport.link import CALLS_AT_ONCE, READ_AT_ONCE, Link
from telegrad.transport.noise import Ciphers, DecryptionFailed
from telegrad.transport.records import SCRATCH, RecordReader, RecordWriter, not_authentic
from telegrad.transport.sockets import NOT_NOW


class EncryptedLink(Link):
    """What comes is decrypted; `Link` and its `Writer` encrypt what leaves."""

    def __init__(self, ciphers: Ciphers, *args: Any, **options: Any) -> None:
        options["records"] = RecordWriter(ciphers.sending)
        super().__init__(*args, **options)
        self._arriving = RecordReader(ciphers.receiving)  # for the thread that reads

    def feed(self, data: bytes) -> None:
        """Take in bytes that came with the end of the handshake."""
        view = memoryview(data)
        while view and self.closed is None:
            buffer = self._arriving.buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            self.received += count
            self._arrived(count)
            view = view[count:]

    def read(self) -> bool:
        """With `reading` held: take what has come and hand the frames on; whether there was anything."""
        if self.closed is not None:
            return False
        came = False
        if self.reader.awaits_lanes:
            self._take(0)
            came = self._arrived(0)  # records that came while a frame waited for further streams
        for _ in range(READ_AT_ONCE):
            if self.reader.awaits_lanes or self.closed is not None:
                return came
            buffer = self._arriving.buffer()
            limited = self.prompt and not self.reader.is_in_part and len(buffer) <= SCRATCH
            if limited:
                buffer = buffer[:CALLS_AT_ONCE]
            try:
                count = self._sock.recv_into(buffer)
            except NOT_NOW:
                return came
            except OSError as error:
                self._broke(error)
                return came
            if not count:
                self._broke()
                return came
            came = True
            self.received += count
            self._arrived(count)
            if limited or count < len(buffer):
                return True
        return came

    def _arrived(self, count: int) -> bool:
        """Decrypt the records that are here to where they belong, and hand on the frames; whether there were any."""
        took = False
        reader, records = self.reader, self._arriving
        while not (reader.awaits_lanes or self.closed is not None):
            try:
                size = records.decrypt_into(reader.buffer(), count)
            except (DecryptionFailed, ProtocolViolation) as error:
                self.close(lost(self.peer, not_authentic(error)))
                return took
            if not size:
                return took
            took = True
            self._take(size)
            if not records.has_more:
                return True
            count = 0
        return took
