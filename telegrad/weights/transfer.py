"""The transfer of versions: the messages between a publisher and its subscribers, and the versions that each has.

Messages between two endpoints may overtake each other, since several threads send and handle them. If a connection
breaks, messages in transit may be lost, and both ends are notified eventually. So each message can be sent again,
readers repeat requests without an answer, and numbers (of versions, of `FetchFrom`) show which messages are outdated.

A version is kept while it is incomplete, while a reader fetches its pieces, while it is pinned, and while it is the
newest complete one. If other subscribers depend on this endpoint for all versions, it keeps those from the oldest on
that any of them may want.

The user of this endpoint may write to the memory of a lent version (shared by the source), so readers never get it. An
endpoint that becomes the source of others drops such versions, and fetches their pieces.
"""

from collections import OrderedDict
from collections.abc import Iterator, KeysView
from typing import Any, NamedTuple


class EndpointAddress(NamedTuple):
    """The address of a publisher (negative number) or a subscriber. The number is unique on its worker."""

    worker: str
    incarnation: str
    number: int


class VersionInfo(NamedTuple):
    """The data needed about a version before its bytes."""

    layout: int  # unique for this publisher
    description: bytes  # the layout itself; empty for a reader that knows it
    size: int  # bytes
    piece: int  # bytes of each piece except the last

    @property
    def pieces(self) -> int:
        return -(-self.size // self.piece)


# From a subscriber to its publisher


class Alive(NamedTuple):
    """The subscriber is alive. The publisher answers JoinAgain if it has dropped the subscriber."""


class Unsubscribe(NamedTuple):
    """The subscriber has closed. Its worker also answers with this to later messages."""


class TransferProgress(NamedTuple):
    """The user has read that version. `every`: it also wants each following version."""

    number: int
    every: bool


class SourceFailed(NamedTuple):
    """The subscriber gets no data from that source."""

    source: EndpointAddress


# From a publisher to its subscribers


class Available(NamedTuple):
    """The newest version, and the oldest one that a subscriber may still want."""

    newest: int
    oldest: int


class FetchFrom(NamedTuple):
    """The source to fetch from. Of several such messages, the one with the highest number is valid."""

    number: int
    source: EndpointAddress
    whole: bool  # True: the source is on the same host and shares its memory; False: pieces are fetched, and forwarded


class Closed(NamedTuple):
    """The publisher has closed."""


# From a reader to its source


class VersionRequest(NamedTuple):
    """A request for exactly the version `least` if `exact`, else for the newest from `least` on."""

    least: int
    exact: bool
    patient: bool  # True: answer when there is such a version; False: answer at once
    whole: bool  # True: in shared memory; False: in pieces
    layout: int  # the last layout that the reader knows


class PieceRequest(NamedTuple):
    """A request for one piece when it is available, or for deltas that lead to it from a version of the reader."""

    number: int
    piece: int
    base: int = 0  # the version of the reader


class Finished(NamedTuple):
    """The reader no longer wants anything from this source."""


# From a source to a reader


class VersionOpened(NamedTuple):
    """A version. If `whole`, it is sent together with its memory; otherwise its pieces can be requested."""

    number: int
    info: VersionInfo
    whole: bool


class WeightPiece(NamedTuple):
    """A piece, sent with its bytes, or with deltas from version `base`."""

    number: int
    piece: int
    base: int = 0
    heads: tuple[Any, ...] = ()  # of the deltas, whose tensors are sent along


class Refused(NamedTuple):
    """The source does not have the requested version, or not yet. Contains the versions that it knows."""

    least: int
    newest: int
    oldest: int


# From any endpoint


class JoinAgain(NamedTuple):
    """The sender has dropped the receiver, since a connection broke. The receiver must repeat its requests."""


Outgoing = list[tuple[EndpointAddress, Any]]  # messages and their recipients


class VersionStore:
    """The versions that are here, complete or partial."""

    def __init__(self, keeps_all: bool) -> None:
        self.keeps_all = keeps_all  # from `oldest` on
        self.newest = self.oldest = 0  # of all versions, here or not
        self.pinned = 0  # the version that this endpoint's user is about to read
        self.info: dict[int, VersionInfo] = {}
        self._lent: set[int] = set()  # lent to this endpoint, for its user only
        # Pieces of incomplete versions, in order. An OrderedDict finds its first key at once. A set has no order, and
        # `iter` of a dict passes over all that were deleted.
        self._missing: dict[int, OrderedDict[int, None]] = {}
        self._requests: dict[EndpointAddress, VersionRequest] = {}  # requests that cannot be answered yet
        # By reader: the version whose pieces it fetches, and by requested piece that is not here yet its base.
        self._reads: dict[EndpointAddress, tuple[int, dict[int, int]]] = {}

    def is_complete(self, number: int) -> bool:
        return number in self.info and number not in self._missing

    def newest_complete(self) -> int:
        """Return the number of the newest complete version, or 0."""
        return max(filter(self.is_complete, self.info), default=0)

    def missing(self, number: int) -> KeysView[int]:
        return self._missing.get(number, OrderedDict[int, None]()).keys()

    # Versions

    def put(self, number: int, info: VersionInfo, lent: bool = False, pieces: int = 0) -> Outgoing:
        """Add a version that is complete, or of which some pieces will arrive."""
        # A request that was repeated may be answered twice. The second answer must not mark pieces as missing that have
        # arrived.
        if number not in self.info:
            self.info[number] = info
            self._lent |= {number} if lent else set()
            if pieces:
                self._missing[number] = OrderedDict.fromkeys(range(pieces))
        return self._settle()

    def drop_lent(self) -> None:
        """Drop all versions that were lent to this endpoint."""
        for number in self._lent:
            self.info.pop(number, None)
        self._lent.clear()

    def add_piece(self, number: int, piece: int) -> Outgoing:
        missing = self._missing.get(number)
        if missing is None or piece not in missing:
            return []
        del missing[piece]
        # Readers get the piece now, not once the version is complete. So all hosts of a chain transfer the version at
        # the same time.
        out: Outgoing = [
            (reader, WeightPiece(number, piece, bases.pop(piece)))
            for reader, (read, bases) in self._reads.items()
            if read == number and piece in bases
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
        readers = [reader for reader, (read, _) in self._reads.items() if read == number]
        for reader in readers:
            del self._reads[reader]
        # Without an answer, these readers would wait for the remaining pieces. `Refused` makes them request a version
        # that exists.
        return [(reader, Refused(number, self.newest, self.oldest)) for reader in readers]

    def pin(self, number: int) -> Outgoing:
        """Keep that version, once it is here, until another is pinned."""
        self.pinned = number
        return self._settle()

    def set_available(self, newest: int, oldest: int) -> Outgoing:
        """Update the range of existing versions."""
        # An older announcement may be handled after a newer one.
        self.newest, self.oldest = max(newest, self.newest), max(oldest, self.oldest)
        return self._settle()

    # Readers

    def receive(self, reader: EndpointAddress, request: VersionRequest | PieceRequest | Finished) -> Outgoing:
        if isinstance(request, Finished):
            return self.forget(reader)
        if isinstance(request, VersionRequest):
            self._reads.pop(reader, None)
            # A reader has one request at a time. A new request, or the same one again, replaces it and ends the fetch
            # of pieces.
            self._requests[reader] = request
            return self._settle()
        number, piece, base = request
        read, bases = self._reads.get(reader, (0, {}))
        if read != number:
            return []  # sent before the reader knew that this version was dropped
        if piece in self._missing.get(number, ()):
            bases[piece] = base
            return []
        return [(reader, WeightPiece(number, piece, base))]

    def readers(self) -> set[EndpointAddress]:
        """Return the readers that wait for a version, or fetch its pieces."""
        return self._requests.keys() | self._reads.keys()

    def forget(self, reader: EndpointAddress) -> Outgoing:
        self._requests.pop(reader, None)
        self._reads.pop(reader, None)
        return self._settle()

    def _settle(self) -> Outgoing:
        """Answer the requests that can be answered now, and drop the versions that need not be kept."""
        # Answer before versions are dropped: an answer in pieces adds the reader to `_reads`, which keeps the version
        # for it. A version that is answered whole may be dropped at once, so `Endpoint.update` takes its memory for the
        # message before it releases the memory of dropped versions.
        out = [(reader, answer) for reader, each in [*self._requests.items()] for answer in self._answers(reader, each)]
        kept = {self.newest_complete(), self.pinned, *(number for number, _ in self._reads.values())}
        for number in [*filter(self.is_complete, self.info)]:
            if number not in kept and not (self.keeps_all and number >= self.oldest):
                del self.info[number]
        self._lent &= self.info.keys()
        return out

    def _answers(self, reader: EndpointAddress, request: VersionRequest) -> Iterator[VersionOpened | Refused]:
        number = request.least if request.exact else self.newest_complete()
        is_here = number >= request.least and number in self.info and number not in self._lent
        if is_here and (self.is_complete(number) or not request.whole):
            del self._requests[reader]
            if not request.whole:
                self._reads[reader] = number, {}
            info = self.info[number]
            if info.layout == request.layout:
                info = info._replace(description=b"")
            yield VersionOpened(number, info, request.whole)
        # Refuse even a patient reader if the exact version is not here and is older than `oldest`: it will not arrive
        # any more. A version that is here but incomplete will, and its reader waits.
        elif not request.patient or (request.exact and not is_here and request.least < self.oldest):
            del self._requests[reader]
            yield Refused(request.least, self.newest, self.oldest)
