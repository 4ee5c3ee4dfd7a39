"""The versions that an endpoint has, the requests of its readers, and which versions it keeps.

A version is kept while it is incomplete, while a reader fetches its pieces, while it is pinned, and while it is the
newest complete one. If other subscribers depend on this endpoint for all versions, it keeps those from the oldest on
that any of them may want.

The user of this endpoint may write to the memory of a lent version (shared by the source), so readers never get it. An
endpoint that becomes the source of others drops such versions, and fetches their pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

from telegrad.weights import weight_messages as messages
from telegrad.weights.weight_messages import EndpointAddress, Outgoing, VersionInfo


class VersionStore:
    """The versions that are here, complete or partial."""

    def __init__(self, keeps_all: bool) -> None:
        self.keeps_all = keeps_all  # from `oldest` on
        self.newest = self.oldest = 0  # of all versions, here or not
        self.pinned = 0  # the version that this endpoint's user is about to read
        self.info: dict[int, VersionInfo] = {}
        self._lent: set[int] = set()  # lent to this endpoint, for its user only
        self._missing: dict[int, set[int]] = {}  # pieces of incomplete versions
        self._requests: dict[EndpointAddress, messages.VersionRequest] = {}  # requests that cannot be answered yet
        # By version and piece: readers and bases.
        self._awaited: dict[tuple[int, int], list[tuple[EndpointAddress, int]]] = {}
        self._reads: dict[EndpointAddress, int] = {}  # the version whose pieces each reader fetches

    def is_complete(self, number: int) -> bool:
        return number in self.info and number not in self._missing

    def newest_complete(self) -> int:
        """Return the number of the newest complete version, or 0."""
        return max(filter(self.is_complete, self.info), default=0)

    def missing(self, number: int) -> list[int]:
        return sorted(self._missing.get(number, ()))

    # Versions

    def put(self, number: int, info: VersionInfo, lent: bool = False) -> Outgoing:
        """Add a complete version."""
        if number not in self.info:
            self.info[number] = info
            self._lent |= {number} if lent else set()
        return self._settle()

    def drop_lent(self) -> None:
        """Drop all versions that were lent to this endpoint."""
        for number in self._lent:
            self.info.pop(number, None)
        self._lent.clear()

    def begin(self, number: int, info: VersionInfo) -> Outgoing:
        """Add a version whose pieces will arrive."""
        self.info[number] = info
        if info.pieces:
            self._missing[number] = set(range(info.pieces))
        return self._settle()

    def add_piece(self, number: int, piece: int) -> Outgoing:
        missing = self._missing.get(number)
        if missing is None or piece not in missing:
            return []
        missing.remove(piece)
        out: Outgoing = [
            (reader, messages.WeightPiece(number, piece, base))
            for reader, base in self._awaited.pop((number, piece), ())
        ]
        if missing:
            return out
        del self._missing[number]
        return out + self._settle()

    def drop_incomplete(self, number: int) -> Outgoing:
        """Drop a version whose remaining pieces will not arrive."""
        if number not in self._missing:
            return []
        del self._missing[number], self.info[number]
        readers = [reader for reader, read in self._reads.items() if read == number]
        for reader in readers:
            self._end_read(reader)
        return [(reader, messages.Refused(number, self.newest, self.oldest)) for reader in readers]

    def pin(self, number: int) -> Outgoing:
        """Keep that version, once it is here, until another is pinned."""
        self.pinned = number
        return self._settle()

    def set_available(self, newest: int, oldest: int) -> Outgoing:
        """Update the range of existing versions."""
        self.newest, self.oldest = max(newest, self.newest), max(oldest, self.oldest)
        return self._settle()

    # Readers

    def request_version(self, reader: EndpointAddress, request: messages.VersionRequest) -> Outgoing:
        self._end_read(reader)
        self._requests[reader] = request
        return self._settle()

    def request_piece(self, reader: EndpointAddress, request: messages.PieceRequest) -> Outgoing:
        number, piece, base = request
        if self._reads.get(reader) != number:
            return []  # sent before the reader knew that this version was dropped
        if piece in self._missing.get(number, ()):
            self._awaited.setdefault((number, piece), []).append((reader, base))
            return []
        return [(reader, messages.WeightPiece(number, piece, base))]

    def finish(self, reader: EndpointAddress, number: int) -> Outgoing:
        """Drop a reader's requests for that version."""
        if self._reads.get(reader) == number:
            self._end_read(reader)
        request = self._requests.get(reader)
        if request is not None and request.least == number:
            del self._requests[reader]
        return self._settle()

    def readers(self) -> set[EndpointAddress]:
        """Return the readers that wait for a version, or fetch its pieces."""
        return self._requests.keys() | self._reads.keys()

    def forget(self, reader: EndpointAddress) -> Outgoing:
        self._requests.pop(reader, None)
        self._end_read(reader)
        return self._settle()

    def _end_read(self, reader: EndpointAddress) -> None:
        if self._reads.pop(reader, None) is not None:
            rest = {place: [each for each in waiting if each[0] != reader] for place, waiting in self._awaited.items()}
            self._awaited = {place: waiting for place, waiting in rest.items() if waiting}

    def _settle(self) -> Outgoing:
        """Answer the requests that can be answered now, and drop the versions that need not be kept."""
        out = [(reader, answer) for reader, each in [*self._requests.items()] for answer in self._answers(reader, each)]
        kept = {self.newest_complete(), self.pinned, *self._reads.values()}
        for number in [*filter(self.is_complete, self.info)]:
            if number not in kept and not (self.keeps_all and number >= self.oldest):
                del self.info[number]
        self._lent &= self.info.keys()
        return out

    def _answers(
        self, reader: EndpointAddress, request: messages.VersionRequest
    ) -> Iterator[messages.WholeVersion | messages.VersionOpened | messages.Refused]:
        number = request.least if request.exact else self.newest_complete()
        is_here = number >= request.least and number in self.info and number not in self._lent
        if is_here and (self.is_complete(number) or not request.whole):
            del self._requests[reader]
            info = self.info[number].without_known(request.layout)
            if request.whole:
                yield messages.WholeVersion(number, info)
            else:
                self._reads[reader] = number
                yield messages.VersionOpened(number, info)
        elif not request.patient or (request.exact and not is_here and request.least < self.oldest):
            del self._requests[reader]
            yield messages.Refused(request.least, self.newest, self.oldest)
