"""Which workers a group is made of: said in a way that travels, and looked up among those that are there. Pure.

A choice that begins with all workers or with a role follows who comes and goes, and so does all that is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from telegrad.agent.naming import user_name
from telegrad.group.members import WorkerInfo, listed

Workers = list[WorkerInfo]


class Choice(Protocol):
    """Its text tells two choices of one group apart."""

    @property
    def live(self) -> bool:
        """Whether it depends on who is there."""

    def of(self, there: Sequence[WorkerInfo]) -> Workers:
        """Who is chosen, of those that are there by rank."""


class Everybody(NamedTuple):
    @property
    def live(self) -> bool:
        return True

    def of(self, there: Sequence[WorkerInfo]) -> Workers:
        return list(there)

    def __str__(self) -> str:
        return "everybody"


class Role(NamedTuple):
    role: str

    @property
    def live(self) -> bool:
        return True

    def of(self, there: Sequence[WorkerInfo]) -> Workers:
        return [worker for worker in there if worker.role == self.role]

    def __str__(self) -> str:
        return f"role {self.role!r}"


class These(NamedTuple):
    """Named workers, whether they are there or not."""

    workers: tuple[WorkerInfo, ...]

    @property
    def live(self) -> bool:
        return False

    def of(self, there: Sequence[WorkerInfo]) -> Workers:
        return list(self.workers)

    def __str__(self) -> str:
        return listed([worker.name for worker in self.workers])


class Part(NamedTuple):
    """A slice."""

    whole: Choice
    start: int | None
    stop: int | None
    step: int | None

    @property
    def live(self) -> bool:
        return self.whole.live

    def of(self, there: Sequence[WorkerInfo]) -> Workers:
        return self.whole.of(there)[self.start : self.stop : self.step]

    def __str__(self) -> str:
        ends = ["" if end is None else str(end) for end in (self.start, self.stop, self.step)]
        return f"{self.whole} [{':'.join(ends if ends[2] else ends[:2])}]"


class Filtered(NamedTuple):
    whole: Choice
    keep: Callable[[WorkerInfo], object]

    @property
    def live(self) -> bool:
        return self.whole.live

    def of(self, there: Sequence[WorkerInfo]) -> Workers:
        return [worker for worker in self.whole.of(there) if self.keep(worker)]

    def __str__(self) -> str:
        return f"{self.whole} where {user_name(self.keep)}"


class Without(NamedTuple):
    whole: Choice
    others: Choice

    @property
    def live(self) -> bool:
        return self.whole.live or self.others.live

    def of(self, there: Sequence[WorkerInfo]) -> Workers:
        others = {worker.name for worker in self.others.of(there)}
        return [worker for worker in self.whole.of(there) if worker.name not in others]

    def __str__(self) -> str:
        return f"{self.whole} without {self.others}"


class Together(NamedTuple):
    first: Choice
    second: Choice

    @property
    def live(self) -> bool:
        return self.first.live or self.second.live

    def of(self, there: Sequence[WorkerInfo]) -> Workers:
        chosen = {worker.name: worker for worker in (*self.first.of(there), *self.second.of(there))}
        return list(chosen.values())

    def __str__(self) -> str:
        return f"{self.first} and {self.second}"
