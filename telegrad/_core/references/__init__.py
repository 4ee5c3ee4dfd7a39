"""Distributed reference counting: a protocol without I/O, and the table of one worker that runs it.

This file has the state that one worker keeps: of each reference, which reference_protocol.py maintains; and of the
control messages to each other worker, which are delivered exactly once.

No data classes: creating one at import takes longer than creating a thousand records.
"""

from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

Id = tuple[str, int]  # the worker that created it, and its number there


K = TypeVar("K")
V = TypeVar("V")


def remember(table: dict[K, V], key: K, value: V, most: int) -> None:
    """Store an entry that late messages may still need, and keep only the newest entries."""
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]


def added(entries: list[K] | None, entry: K) -> list[K]:
    """Return the list, or a new one, after adding an entry."""
    entries = entries or []
    entries.append(entry)
    return entries


class SharedFork:
    """A user's state of a reference: its one fork, and what keeps the fork alive."""

    __slots__ = ("children", "confirmed", "extras", "fault", "fork", "handles", "owner", "parents")

    def __init__(self, owner: str, fork: Id, confirmed: bool, handles: int = 1) -> None:
        self.owner = owner
        self.fork = fork
        self.confirmed = confirmed
        self.handles = handles
        # Made by the first entry: most references have none, and the garbage collector visits each object.
        self.parents: list[tuple[str, Id]] | None = None  # that get SETTLED once the owner knows the fork
        self.extras: list[Id] | None = None  # known to the owner, dropped once the fork is confirmed
        self.children: dict[Id, str] | None = None  # forks sent to others and not settled
        self.fault = ""


class Owned:
    """The owner's state of a reference."""

    __slots__ = ("forks", "handles", "made")

    def __init__(self, made: bool, handles: int = 0) -> None:
        self.made = made  # the value exists, or its creating call has arrived or never will
        self.handles = handles
        self.forks: dict[Id, str] = {}  # with the workers that hold them or will receive them; `Holders` changes it


class Holders:
    """Counts each worker's forks of the owner's references."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, owned: Owned, fork: Id, holder: str) -> None:
        """Add a fork."""
        if fork in owned.forks:
            self.end(owned, fork)
        owned.forks[fork] = holder
        self.counts[holder] = self.counts.get(holder, 0) + 1

    def end(self, owned: Owned, fork: Id) -> None:
        """Remove a fork, if it is known."""
        holder = owned.forks.pop(fork, None)
        if holder is not None:
            self.counts[holder] -= 1
            if not self.counts[holder]:
                del self.counts[holder]


# Delivery of control messages

L = TypeVar("L")

RESEND_AFTER, RESEND_AT_MOST = 1.0, 30.0  # seconds: the first pause, which doubles, and the longest
ACKNOWLEDGE_WITHIN = 0.05  # seconds that a receipt may wait to be sent with a batch
MOST_REMEMBERED = 1 << 10  # workers that have left, and whose numbers are kept


class Batch(NamedTuple):
    """Control messages under a number (0 for none), and receipts."""

    number: int
    messages: list[Any]
    receipts: list[int]


class _Sent(Generic[L]):
    def __init__(self, messages: list[L], pause: float, due: float) -> None:
        self.messages = messages
        self.pause = pause
        self.due = due


class _PeerDelivery(Generic[L]):
    """The state between this worker and another one."""

    def __init__(self) -> None:
        self.fresh: list[L] = []
        self.number = 0
        self.sent: dict[int, _Sent[L]] = {}  # without a receipt so far
        self.receipts: list[int] = []  # not yet sent
        self.owed_by = inf
        # The numbers that have arrived. A batch is delivered when it arrives, and not held back for an earlier one, so
        # there may be gaps. They close, because the sender repeats each number until it has a receipt.
        self.complete = 0  # all batches up to this number have arrived
        self.ahead: set[int] = set()  # later batches that have arrived

    def enter(self, messages: list[L], now: float) -> int:
        """Store a batch that leaves now; return its number."""
        self.number += 1
        self.sent[self.number] = _Sent(messages, RESEND_AFTER, now + RESEND_AFTER)
        return self.number

    def take(self, number: int) -> bool:
        """Record the arrival of a batch; return True if it is new."""
        if number <= self.complete or number in self.ahead:
            return False
        self.ahead.add(number)
        while self.complete + 1 in self.ahead:
            self.complete += 1
            self.ahead.remove(self.complete)
        return True

    def due(self) -> float:
        return min([self.owed_by, *(sent.due for sent in self.sent.values())])


class ReliableDelivery(Generic[L]):
    """Delivers the control messages of one worker exactly once, over a network that may lose, duplicate, delay and
    reorder.

    Control messages to one worker are sent in numbered batches. A batch is resent, at growing intervals, until a
    receipt for its number arrives. The receiver accepts each number once. A worker that was declared dead gets only
    empty batches: its receipt shows that it is alive. There is no I/O and no clock here: the driver passes the time and
    sends.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _PeerDelivery[L]] = {}  # `outgoing` iterates over all of them each time
        self._dropped: dict[str, _PeerDelivery[L]] = {}  # of the workers that have left most recently

    def post(self, to: str, message: L) -> None:
        self._line(to).fresh.append(message)

    def outgoing(self, now: float) -> list[tuple[str, Batch]]:
        """Return the batches that are due."""
        out: list[tuple[str, Batch]] = []
        for to, line in self._lines.items():
            if line.fresh:
                out.append((to, Batch(line.enter(line.fresh, now), line.fresh, self._receipts(line))))
                line.fresh = []
            for number, sent in line.sent.items():
                if sent.due <= now:
                    # An empty batch asks a worker that was declared dead for a sign of life. Most of these never
                    # answer, so the interval has no limit.
                    sent.pause = min(2 * sent.pause, RESEND_AT_MOST) if sent.messages else 2 * sent.pause
                    sent.due = now + sent.pause
                    out.append((to, Batch(number, sent.messages, self._receipts(line))))
            if line.owed_by <= now:
                out.append((to, Batch(0, [], self._receipts(line))))
        return out

    def _receipts(self, line: _PeerDelivery[L]) -> list[int]:
        receipts, line.receipts, line.owed_by = line.receipts, [], inf
        return receipts

    def next(self) -> float:
        """Return the time when the next batch or receipt is due, if nothing happens before."""
        return min((line.due() for line in self._lines.values()), default=inf)

    def receive(self, sender: str, batch: Batch, now: float) -> list[L]:
        """Process a batch; return its messages unless it has arrived before."""
        line = self._line(sender)
        for number in batch.receipts:
            line.sent.pop(number, None)
        if not batch.number:
            return []
        # A number that is not new gets a receipt, too: the sender repeats it, so the earlier receipt was lost or is
        # late.
        line.receipts.append(batch.number)
        line.owed_by = min(line.owed_by, now + ACKNOWLEDGE_WITHIN)
        return batch.messages if line.take(batch.number) else []

    def hurry(self, to: str, now: float) -> None:
        """Make all batches without a receipt due now: the connection to the worker works again."""
        for sent in self._line(to).sent.values():
            sent.due = now

    def forget(self, worker: str, now: float) -> None:
        """Drop the messages to a worker that was declared dead; send an empty batch in case it is alive. Keep the
        numbers, and resend batches without a receipt as empty ones: the receiver waits for each number."""
        line = self._line(worker)
        line.fresh = []
        for sent in line.sent.values():
            sent.messages = []
        if not line.sent:
            line.enter([], now)
        self._receipts(line)  # dropped: if the worker is alive it repeats its batches, and gets receipts then

    def drop_worker(self, worker: str) -> None:
        """Remove a worker that has left permanently. Keep the numbers for a while, for batches that arrive late."""
        line = self._line(worker)
        line.fresh = []
        line.sent.clear()
        self._receipts(line)
        remember(self._dropped, worker, self._lines.pop(worker), MOST_REMEMBERED)

    @property
    def unsettled(self) -> int:
        """The number of messages without a receipt."""
        lines = self._lines.values()
        return sum(len(line.fresh) + sum(len(sent.messages) for sent in line.sent.values()) for line in lines)

    def _line(self, worker: str) -> _PeerDelivery[L]:
        line = self._lines.get(worker)
        if line is None:
            # Without the numbers of a worker that has left, its late batches would be taken for new ones, and their
            # messages be processed twice.
            line = self._lines[worker] = self._dropped.pop(worker) if worker in self._dropped else _PeerDelivery()
        return line
