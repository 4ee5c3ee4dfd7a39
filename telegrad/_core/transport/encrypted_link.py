"""A connection whose frames are sent in encrypted records (`records`): each TCP connection without TLS."""

from __future__ import annotations

from typing import Any

from telegrad._core.security.encrypted_records import RecordReader, RecordWriter, not_authentic
from telegrad._core.security.noise import Ciphers, DecryptionFailed
from telegrad._core.transport.connection_errors import lost
from telegrad._core.transport.link import Link
from telegrad.errors import ProtocolViolation


class EncryptedLink(Link):
    """Decrypts received records; `Link` and its `Writer` encrypt sent ones."""

    def __init__(self, ciphers: Ciphers, *args: Any, **options: Any) -> None:
        options["records"] = RecordWriter(ciphers.sending)
        super().__init__(*args, **options)
        self._arriving = RecordReader(ciphers.receiving)  # for the reader thread
        self._buffer, self._arrived = self._arriving.buffer, self._decrypt

    def _decrypt(self, count: int) -> None:
        """Decrypt the complete records, each into its destination, and process the frames."""
        reader, records = self.reader, self._arriving
        if reader.awaits_lanes:
            self._take(0)
        while not (reader.awaits_lanes or self.closed is not None):
            try:
                if reader.is_in_part or reader.end:
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
