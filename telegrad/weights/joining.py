"""A subscriber's party: how it joins a feed, joins again after a connection broke, and hears of the end."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from torch import Tensor

from telegrad.agent.naming import known_as
from telegrad.errors import DeltaRefused, PublisherLost, TelegradError, UnknownPublisher
from telegrad.group.members import Identity, listed
from telegrad.rpc import current
from telegrad.weights.deltas import Delta, apply_deltas
from telegrad.weights.desk import LOOK, Box, Desk
from telegrad.weights.follower import Follower
from telegrad.weights.publisher import PublisherBox
from telegrad.weights.snapshot import Layout
from telegrad.weights.version import Version
from telegrad.weights.words import About, Forgot, Lent, Opened, Over, Party, Piece

MARGIN = 5.0  # seconds more for a call than for what it waits for


class SubscriberBox(Box):
    """With the machine of a subscriber, and what keeps it in its feed."""

    def __init__(self, desk: Desk, name: str, publisher: Identity, limit: float) -> None:
        """Join; wait for a publisher of that name, `limit` seconds at most, 0 for no limit."""
        self._name = name
        self._publisher = publisher
        self.machine = Follower()
        super().__init__(desk, desk.party(publishes=False), self.machine)
        self.over = False  # in order
        self._trouble = ""  # why the publisher is out of reach
        self._joining = False
        self._layout: Layout | None = None
        self._common: set[int] = set()  # versions whose memory here is what others of the host see, too
        self._last: Version | None = None  # that was found
        self._taken = (0, False)  # what was said of it last
        desk.add(self)
        try:
            timeout = limit and limit + MARGIN
            self.machine.publisher = Party(*desk.agent.call(publisher, _join, self._joining_args(limit), None, timeout))
        except BaseException:
            desk.remove(self)
            raise

    # Joining

    def _joining_args(self, limit: float = 0) -> tuple[Any, ...]:
        source = self.machine.publisher
        return self._name, source and source.number, self.me, self._desk.agent.me.host, *self._taken, limit

    def join(self) -> None:
        """Be told of versions again; upon a failure that is known only later."""
        with self.changed:
            if self._joining or self.over or self.machine.publisher is None:
                return
            self._joining = True
            args = self._joining_args()
        try:
            future = self._desk.agent.call_async(self._publisher, _join, args, None)
        except TelegradError as error:
            self._joined(str(error))
        else:
            future.add_done_callback(lambda done: self._joined(_failure(done)))

    def _joined(self, trouble: str) -> None:
        with self.changed:
            self._joining = False
            self._trouble = trouble
        self.tell()

    def check(self) -> None:
        """Raise PublisherLost where that is so; one that is out of reach is asked once more."""
        with self.changed:
            trouble, last = (
                self._trouble,
                max(self.machine.shelf.newest_whole(), self._last.number if self._last else 0),
            )
        if self.over:
            raise self._lost("it was closed", last)
        if trouble:
            self.join()
            with self.changed:
                self.changed.wait_for(lambda: not self._joining, self._desk.agent.timeout or None)
                trouble = self._trouble
            if trouble:
                raise self._lost(trouble, last)

    def _lost(self, why: str, last: int) -> PublisherLost:
        readable = f"version {last} is here: newest() gives it" if last else "no version of it is here"
        return PublisherLost(
            f"the publisher {self._name!r} on worker {self._publisher.name!r} has gone ({why}); {readable}"
        )

    def lost(self, incarnation: str) -> None:
        super().lost(incarnation)
        if incarnation == self._publisher.incarnation:
            self.join()

    def close(self) -> None:
        self._desk.remove(self)
        self.step(self.machine.leave)
        with self.changed:
            self.has_left = True
            self.stock.clear()
            self._last = None

    def look(self) -> None:
        if not self.over and not self._trouble:
            self.step(self.machine.look)

    # What comes

    def take(self, sender: Party, word: Any, tensors: Any) -> None:
        if self.machine.publisher is None:  # the call that joins has not returned: nobody else knows of this party
            self.machine.publisher = sender
        if sender == self.machine.publisher and isinstance(word, Forgot):
            self.join()
        elif isinstance(word, Over):
            self.over = True
            self.tell()
        elif isinstance(word, Piece):
            self._store(sender, word, tensors)
        else:
            memory = tensors[0] if isinstance(word, Lent) else None
            if isinstance(word, Opened):
                memory = self._desk.agent.memory.common(word.about.size)
            self.step(lambda: self._received(sender, word, memory))
            self.tell()

    def _received(self, sender: Party, word: Any, memory: Tensor | None) -> Any:
        if memory is not None and word.number not in self.machine.shelf.about:
            self.stock[word.number] = memory
            if isinstance(word, Opened) or sender.incarnation == self.me.incarnation:
                self._common.add(word.number)
        self._common &= self.stock.keys()
        return self.machine.receive(sender, word)

    def _store(self, sender: Party, word: Piece, content: Sequence[Tensor]) -> None:
        with self.changed:
            new, old = self.stock.get(word.number), self.stock.get(word.base)
            if new is None or not self.machine.expects(word):
                return
            place, about = self.piece(word), self.machine.shelf.about[word.number]
        deltas = []
        for heads in word.heads:
            count = sum(each[2] for each in heads)
            deltas.append(Delta(heads, [*content[:count]]))
            content = content[count:]
        if word.base:
            try:
                if old is None:
                    raise DeltaRefused(f"a delta leads from version {word.base}, which is not here any more")
                apply_deltas(self._layout_of(about), about, old, new, word.piece, deltas)
            except DeltaRefused:
                self.step(lambda: self.machine.distrust(word.number))
                return
        else:
            place.copy_(content[0])
        self.step(lambda: self._stored(sender, word, deltas, about.size))
        if self.machine.shelf.is_whole(word.number):
            self.tell()

    def _stored(self, sender: Party, word: Piece, deltas: list[Delta], size: int) -> Any:
        for number, delta in enumerate(deltas, word.base + 1):
            self.deltas.keep(number, word.piece, delta, size)
        return self.machine.receive(sender, word)

    def _layout_of(self, about: About) -> Layout:
        layout = self._layout
        if layout is None or layout.number != about.layout:
            layout = self._layout = Layout(about.layout, about.description)
        return layout

    # What its user wants

    @property
    def known(self) -> int:
        """The newest version that is known of."""
        return self.machine.shelf.newest

    def next_after(self, number: int) -> int:
        return max(number + 1, self.machine.shelf.oldest)

    def find(self, least: int, exact: bool = False) -> Version | None:
        """Such a version, if it is here."""
        with self.changed:
            shelf, last = self.machine.shelf, self._last
            number = least if exact else shelf.newest_whole()
            if last is not None and (last.number == least if exact else last.number >= max(number, least)):
                return last
            if number < least or not shelf.is_whole(number):
                return None
            about, memory, is_common = shelf.about[number], self.stock[number], number in self._common
        version = Version(
            number, self._layout_of(about), self._desk.agent.memory.private(memory) if is_common else memory
        )
        with self.changed:
            self._last = version
        return version

    def is_newer_here(self, number: int) -> bool:
        return self.machine.shelf.newest_whole() > number

    def want(self, least: int, exact: bool) -> None:
        self.step(lambda: self.machine.want(least, exact, patient=True))

    def may_ask_for_newer(self) -> bool:
        """Whether its source may have a newer version than is here."""
        shelf = self.machine.shelf
        return self.machine.whole and shelf.newest > shelf.newest_whole() > 0 and not (self.over or self._trouble)

    def ask_for_newer(self, patience: float) -> None:
        """Have the source's newest come, if it has a newer one."""
        self.step(lambda: self.machine.want(self.machine.shelf.newest_whole() + 1, exact=False, patient=False))
        with self.changed:
            self.changed.wait_for(lambda: not self.machine.waits, patience)

    def taken(self, number: int, every: bool) -> None:
        self._taken = number, every
        self.step(lambda: self.machine.taken(number, every))
        source = self.machine.source
        if source is not None:  # which fills the memory of old versions anew
            self._desk.agent.give_back(source.worker)


def _failure(done: Any) -> str:
    try:
        done.wait()
    except Exception as error:
        return str(error).partition("\n")[0]
    return ""


# What runs at the publisher


@known_as("Subscriber()")
def _join(name: str, number: int | None, party: Party, host: str, taken: int, every: bool, timeout: float) -> Party:
    """Add a subscriber to the publisher of that name, or to the one of that number alone; wait for the former."""
    worker = current.here()
    desk, agent = worker.attached(Desk), worker.agent
    until = monotonic() + timeout if timeout else float("inf")
    with agent.waiting(), desk.changed:
        while name not in desk.published and number is None:
            left = until - monotonic()
            if left <= 0 or agent.closed:
                names = sorted(desk.published)
                there = f"there are {listed([repr(each) for each in names])}" if names else "there is none at all"
                raise UnknownPublisher(
                    f"worker {agent.name!r} has no publisher {name!r}, and none has come within {timeout:g} s; {there}"
                    f". Make it there, Publisher({name!r}, model), and keep it"
                )
            desk.changed.wait(min(left, LOOK))
        box = desk.published.get(name)
    if box is None or number not in (None, box.me.number):
        raise PublisherLost(f"the publisher {name!r} was closed")
    assert isinstance(box, PublisherBox)
    box.step(lambda: box.feed.join(Party(*party), host, taken, every))
    return box.me
