"""What a publisher and its subscribers tell each other.

Between two parties messages arrive in order, as long as no connection between them breaks. Where one does, both are
told, sooner or later, and messages under way may be lost. So each can be sent again.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Party(NamedTuple):
    """A publisher, whose number is negative, or a subscriber. Its worker has no other one of that number."""

    worker: str
    incarnation: str
    number: int


class VersionInfo(NamedTuple):
    """What must be known of a version before its bytes come."""

    layout: int  # the number of its layout, of this publisher
    description: bytes  # the layout itself; empty for a reader that knows it
    size: int  # bytes
    piece: int  # bytes of each piece but the last

    @property
    def pieces(self) -> int:
        return -(-self.size // self.piece)

    def without_known(self, layout: int) -> VersionInfo:
        """Return it for a reader that knows the layout of that number."""
        return self._replace(description=b"") if layout == self.layout else self


# From a subscriber to its publisher


class Alive(NamedTuple):
    """The subscriber listens; it is answered with JoinAgain if the publisher has forgotten it."""


class Leave(NamedTuple):
    """The subscriber has closed. Its worker also answers so to messages that come later."""


class Progress(NamedTuple):
    """The user has read that version; `every`: and wants each version that follows it."""

    number: int
    every: bool


class SourceFailed(NamedTuple):
    """Nothing comes from that source."""

    source: Party


# From a publisher to its subscribers


class Available(NamedTuple):
    """The newest version, and the oldest one that a subscriber may still want."""

    newest: int
    oldest: int


class FetchFrom(NamedTuple):
    """The source to fetch from; of several such messages the one with the highest number holds."""

    number: int
    source: Party
    whole: bool  # the source is of the same host, and lends its memory; else pieces are fetched, and passed on


class Closed(NamedTuple):
    """The publisher has closed."""


# From a reader to its source


class VersionRequest(NamedTuple):
    """A request for the version `least` itself if `exact`, else for the newest from there on."""

    least: int
    exact: bool
    patient: bool  # answer when there is such a version; else at once
    whole: bool  # in one, else in pieces
    layout: int  # the last that the reader knows


class PieceRequest(NamedTuple):
    """A request for one piece, once it is there, or for deltas that lead to it from a version that the reader has."""

    number: int
    piece: int
    base: int = 0  # that version


class Finished(NamedTuple):
    """The reader wants that version no more: it has it, or gets it elsewhere."""

    number: int


# From a source to a reader


class WholeVersion(NamedTuple):
    """A version, whose memory goes along."""

    number: int
    info: VersionInfo


class VersionOpened(NamedTuple):
    """Pieces of that version can be requested."""

    number: int
    info: VersionInfo


class Piece(NamedTuple):
    """A piece, whose bytes go along, or deltas that lead there from version `base`."""

    number: int
    piece: int
    base: int = 0
    heads: tuple[Any, ...] = ()  # of the deltas, whose tensors go along


class Refused(NamedTuple):
    """The source does not have the requested version, or not now; and which versions it knows of."""

    least: int
    newest: int
    oldest: int


# From any party


class JoinAgain(NamedTuple):
    """The sender has forgotten the receiver, since a connection broke: the receiver is to say again what it wants."""


Outgoing = list[tuple[Party, Any]]  # messages, and to which parties
