"""Letters that arrive once each, over a network that may lose, double, delay and reorder what it carries.

Letters to one worker are sent in numbered batches. A batch is sent again, ever more rarely, until its number comes
back; the receiver passes on each number once. To a worker that is taken for dead go empty batches only: its receipt
tells that it lives. Pure: the driver tells the time and does the sending.
"""

from __future__ import annotations

from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from telegrad._core.references.records import remember

L = TypeVar("L")

RESEND_AFTER, RESEND_AT_MOST = 1.0, 30.0  # seconds: the first pause, which doubles, and the longest
ACKNOWLEDGE_WITHIN = 0.05  # seconds that a receipt may wait for a batch to travel with
MOST_REMEMBERED = 1 << 10  # workers that have left, whose numbers are kept


class Batch(NamedTuple):
    """Letters under a number (0 for none), and receipts."""

    number: int
    letters: list[Any]
    receipts: list[int]


class _Sent(Generic[L]):
    def __init__(self, letters: list[L], pause: float, due: float) -> None:
        self.letters = letters
        self.pause = pause
        self.due = due


class _Line(Generic[L]):
    """What there is between this worker and another."""

    def __init__(self) -> None:
        self.fresh: list[L] = []
        self.number = 0
        self.sent: dict[int, _Sent[L]] = {}  # without a receipt yet
        self.receipts: list[int] = []  # owed
        self.owed_by = inf
        self.complete = 0  # all batches up to this number have come
        self.ahead: set[int] = set()  # and these

    def enter(self, letters: list[L], now: float) -> int:
        """The number of a batch that leaves now."""
        self.number += 1
        self.sent[self.number] = _Sent(letters, RESEND_AFTER, now + RESEND_AFTER)
        return self.number

    def take(self, number: int) -> bool:
        """Note a batch; whether it is new."""
        if number <= self.complete or number in self.ahead:
            return False
        self.ahead.add(number)
        while self.complete + 1 in self.ahead:
            self.complete += 1
            self.ahead.remove(self.complete)
        return True

    def due(self) -> float:
        return min([self.owed_by, *(sent.due for sent in self.sent.values())])


class Courier(Generic[L]):
    """One worker's post."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[L]] = {}  # all are looked at in each turn
        self._buried: dict[str, _Line[L]] = {}  # of the workers that have left last

    def post(self, to: str, letter: L) -> None:
        self._line(to).fresh.append(letter)

    def outgoing(self, now: float) -> list[tuple[str, Batch]]:
        """What is to be sent now."""
        out: list[tuple[str, Batch]] = []
        for to, line in self._lines.items():
            if line.fresh:
                out.append((to, Batch(line.enter(line.fresh, now), line.fresh, self._receipts(line))))
                line.fresh = []
            for number, sent in line.sent.items():
                if sent.due <= now:
                    sent.pause = min(2 * sent.pause, RESEND_AT_MOST) if sent.letters else 2 * sent.pause
                    sent.due = now + sent.pause
                    out.append((to, Batch(number, sent.letters, self._receipts(line))))
            if line.owed_by <= now:
                out.append((to, Batch(0, [], self._receipts(line))))
        return out

    def _receipts(self, line: _Line[L]) -> list[int]:
        receipts, line.receipts, line.owed_by = line.receipts, [], inf
        return receipts

    def next(self) -> float:
        """When something will be due, if nothing happens before."""
        return min((line.due() for line in self._lines.values()), default=inf)

    def receive(self, sender: str, batch: Batch, now: float) -> list[L]:
        """The letters that have not come before."""
        line = self._line(sender)
        for number in batch.receipts:
            line.sent.pop(number, None)
        if not batch.number:
            return []
        line.receipts.append(batch.number)
        line.owed_by = min(line.owed_by, now + ACKNOWLEDGE_WITHIN)
        return batch.letters if line.take(batch.number) else []

    def hurry(self, to: str, now: float) -> None:
        """The way to a worker is open again: what it has not receipted is due."""
        for sent in self._line(to).sent.values():
            sent.due = now

    def forget(self, worker: str, now: float) -> None:
        """It is taken for dead: nothing more is to be delivered, but it is asked for a sign, should it live.

        The numbers stay, and those without a receipt are sent on: the receiver must not wait for them for ever.
        """
        line = self._line(worker)
        line.fresh = []
        for sent in line.sent.values():
            sent.letters = []
        if not line.sent:
            line.enter([], now)
        self._receipts(line)

    def bury(self, worker: str) -> None:
        """It has left for good. The numbers stay for a while, for what it has said before."""
        line = self._line(worker)
        line.fresh = []
        line.sent.clear()
        self._receipts(line)
        remember(self._buried, worker, self._lines.pop(worker), MOST_REMEMBERED)

    @property
    def unsettled(self) -> int:
        """Letters that have not been receipted."""
        return sum(
            len(line.fresh) + sum(len(sent.letters) for sent in line.sent.values()) for line in self._lines.values()
        )

    def _line(self, worker: str) -> _Line[L]:
        line = self._lines.get(worker)
        if line is None:
            line = self._lines[worker] = self._buried.pop(worker) if worker in self._buried else _Line()
        return line
