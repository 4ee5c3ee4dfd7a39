"""What the parties of a feed tell each other: a publisher, and those who subscribe to its versions.

Between two parties these arrive in order, as long as no connection between them breaks. Where one does, both are told,
sooner or later, and what was under way may be lost. So all are such that they can be said again.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Party(NamedTuple):
    """A publisher, whose number is negative, or a subscriber. Its worker has no other one of that number."""

    worker: str
    incarnation: str
    number: int


class About(NamedTuple):
    """What must be known of a version before its bytes come."""

    layout: int  # where which tensor is: the number of that layout, of this feed
    description: bytes  # the layout itself; empty for who knows it
    size: int  # bytes
    piece: int  # bytes of each piece but the last

    @property
    def pieces(self) -> int:
        return -(-self.size // self.piece)

    def for_who_knows(self, layout: int) -> About:
        return self._replace(description=b"") if layout == self.layout else self


# A subscriber to its publisher


class Here(NamedTuple):
    """It still listens: to be told if the publisher does not know of it any more."""


class Leave(NamedTuple):
    """It listens no more. Its worker also says so to whoever goes on telling it something."""


class Taken(NamedTuple):
    """Its user has that version; `every`: and wants all that come after it."""

    number: int
    every: bool


class Blame(NamedTuple):
    """Nothing comes from that source."""

    source: Party


# A publisher to its subscribers


class News(NamedTuple):
    """Which versions there are: the newest, and the oldest that anybody may still want."""

    newest: int
    oldest: int


class Route(NamedTuple):
    """From whom to fetch from now on; of several routes the one with the highest number holds."""

    number: int
    source: Party
    whole: bool  # it is of the same host, and lends its memory; else pieces are fetched, for others of the host, too


class Over(NamedTuple):
    """The publisher has closed."""


# Who fetches to its source


class Fetch(NamedTuple):
    """A version is wanted: `least` itself if `exact`, else the newest from there on."""

    least: int
    exact: bool
    patient: bool  # it may take time
    whole: bool  # in one, else in pieces
    layout: int  # the last that it knows


class Ask(NamedTuple):
    """One piece, once it is there; what has changed in it since a version that the reader has will do."""

    number: int
    piece: int
    base: int = 0  # that version


class Done(NamedTuple):
    """That version is wanted no more: it is here, or comes from elsewhere."""

    number: int


# A source to who fetches


class Lent(NamedTuple):
    """A whole version; its memory goes along."""

    number: int
    about: About


class Opened(NamedTuple):
    """Pieces of that version can be asked for."""

    number: int
    about: About


class Piece(NamedTuple):
    """Its bytes go along, or deltas that lead there from version `base`."""

    number: int
    piece: int
    base: int = 0
    heads: tuple[Any, ...] = ()  # of the deltas, whose tensors go along


class Refused(NamedTuple):
    """There is none such, or not now; and what this source knows of news."""

    least: int
    newest: int
    oldest: int


# Anybody


class Forgot(NamedTuple):
    """What the receiver has said to the sender is forgotten, since a connection broke: say it again."""


Out = list[tuple[Party, Any]]  # what is to be told to whom
