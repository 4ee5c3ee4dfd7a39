"""A connection whose frames cross in records (`records`): those over TCP, unless TLS protects them."""

from __future__ import annotations

from typing import Any

from telegrad._core.security.noise import Ciphers, DecryptionFailed
from telegrad._core.security.records import RecordReader, RecordWriter, not_authentic
from telegrad._core.transport.endings import lost
from telegrad._core.transport.link import Link
from telegrad.errors import ProtocolViolation


class EncryptedLink(Link):
    """What comes is decrypted; `Link` and its `Writer` encrypt what leaves."""

    def __init__(self, ciphers: Ciphers, *args: Any, **options: Any) -> None:
        options["records"] = RecordWriter(ciphers.sending)
        super().__init__(*args, **options)
        self._arriving = RecordReader(ciphers.receiving)  # for the thread that reads
        self._buffer, self._arrived = self._arriving.buffer, self._decrypt

    def _decrypt(self, count: int) -> None:
        """Decrypt the records that are whole, each to where it belongs, and hand on the frames."""
        reader, records = self.reader, self._arriving
        if reader.awaits_lanes:
            self._take(0)
        while not (reader.awaits_lanes or self.closed is not None):
            try:
                if reader.is_in_part or reader.end:
                    content = None
                else:  # no frame has begun: what is small need not lie in a buffer
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
