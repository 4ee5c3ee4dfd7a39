"""The messages between a publisher and its subscribers.

Messages between two endpoints arrive in order while no connection between them breaks. If one breaks, both are notified
eventually, and messages in transit may be lost. So each message can be sent again.
"""

from __future__ import annotations

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

    def without_known(self, layout: int) -> VersionInfo:
        """Return the info without the description, if the reader's layout has the same number."""
        return self._replace(description=b"") if layout == self.layout else self


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
    """The reader no longer wants that version: it has it, or gets it elsewhere."""

    number: int


# From a source to a reader


class WholeVersion(NamedTuple):
    """A version, sent together with its memory."""

    number: int
    info: VersionInfo


class VersionOpened(NamedTuple):
    """Pieces of that version can be requested."""

    number: int
    info: VersionInfo


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
